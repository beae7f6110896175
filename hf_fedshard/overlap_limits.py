"""Which settings go together with averaging beside the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .periods import parse_stages
from .slow_tier import SLOW_BACKENDS


if TYPE_CHECKING:
    from .config import FederationConfig


def check_overlap(config: FederationConfig) -> None:
    """
    Refuses settings of the overlap that are out of range, or that another setting rules out.

    Args:
        config ([`FederationConfig`]):
            The settings, each in its own range.

    Raises:
        ValueError: With the field, its value, what is allowed and the way out.
    """
    steps, fragments, alpha = config.overlap_steps, config.num_fragments, config.overlap_alpha
    for name, value, least in (("overlap_steps", steps, 0), ("num_fragments", fragments, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, but got {value!r}.")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha < 1:
        raise ValueError(f"overlap_alpha must be a number of at least 0 and below 1, but got {alpha!r}.")
    if config.slow_backend is not None and config.slow_backend not in SLOW_BACKENDS:
        raise ValueError(
            f"slow_backend must be one of {', '.join(SLOW_BACKENDS)}, or unset, but got {config.slow_backend!r}."
        )
    if not steps:
        for name, is_set in (("overlap_alpha", alpha != 0), ("num_fragments", fragments != 1)):
            if is_set:
                raise ValueError(
                    f"{name}={getattr(config, name)} is for averaging beside the steps. Set overlap_steps too, 1 or more."
                )
        return
    shortest = _shortest_period(config)
    # A period that is measured changes when an outcome arrives, which must not be the step at which the round may end.
    longest = shortest - 1 if config.sync_every == "drift" else shortest
    if steps > longest:
        raise ValueError(
            f"overlap_steps={steps} must be {longest} or less with a shortest period of {shortest} ({_where(config)}): the "
            "outcome of an averaging is taken in before the next one starts. Make it smaller, or the period longer."
        )
    if fragments > shortest:
        raise ValueError(
            f"num_fragments={fragments} must not be above the shortest period, which is {shortest} ({_where(config)}): each "
            "fragment starts after a step of its own. Make it smaller, or the period longer."
        )
    _check_combinations(config)


def refuse_preemption(config: FederationConfig) -> None:
    """
    Refuses the overlap in a run that may be told to end inside a round.

    Args:
        config ([`FederationConfig`]):
            The settings.

    Raises:
        ValueError: If both are asked for.
    """
    if config.overlap_steps:
        raise ValueError(
            f"overlap_steps={config.overlap_steps} cannot be used with enable_jit_checkpoint=True: a group that has to save "
            "by itself inside a round would have to wait for the averaging that is in flight, and with it for groups that "
            "may be gone. Set one of them to 0 or False."
        )


def _check_combinations(config: FederationConfig) -> None:
    refused: list[tuple[bool, str, Any, str, str]] = [
        (
            config.sync_every == "auto",
            "sync_every",
            config.sync_every,
            "follows the time for which an averaging stops the steps, and beside the steps it does not",
            "a number, a list of periods, or 'drift'",
        ),
        (
            config.inner_moments == "average",
            "inner_moments",
            config.inner_moments,
            "would send moments that are old by the time they arrive",
            "'keep' or 'reset'",
        ),
        (
            config.lora_average == "product",
            "lora_average",
            config.lora_average,
            "puts whole adapters together inside the group, on the communicators of the steps",
            "'factors' or 'freeze_a'",
        ),
    ]
    if config.num_fragments > 1:
        refused += [
            (
                config.sync_every == "drift",
                "sync_every",
                config.sync_every,
                "would change the period while fragments have their turns in it",
                "a number or a list of periods, or num_fragments=1",
            ),
            (
                config.outer_max_norm is not None,
                "outer_max_norm",
                config.outer_max_norm,
                "bounds a norm over the whole model, and a fragment is stepped without the others",
                "num_fragments=1, or leave it unset",
            ),
            (
                not isinstance(config.group_weights, str) or ":" in config.group_weights,
                "group_weights",
                config.comparable()["group_weights"],
                "weighs what groups did in a round, and fragments begin and end inside of one",
                "'uniform', 'samples', 'tokens' or 'steps', or num_fragments=1",
            ),
        ]
    for is_refused, name, value, reason, instead in refused:
        if is_refused:
            with_fragments = f", num_fragments={config.num_fragments}" if "num_fragments" in instead else ""
            raise ValueError(
                f"{name}={value!r} cannot be used with overlap_steps={config.overlap_steps}{with_fragments}: it {reason}. Use "
                f"{instead}."
            )


def _shortest_period(config: FederationConfig) -> int:
    every = config.sync_every
    if isinstance(every, int):
        return every
    if every in ("auto", "drift"):
        return config.min_sync_every
    stages, _ = parse_stages(every)
    return min(period for period, _ in stages)


def _where(config: FederationConfig) -> str:
    name = "min_sync_every" if config.sync_every in ("auto", "drift") else "sync_every"
    return f"{name}={getattr(config, name)!r}"
