"""Which settings of the step at a border go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .outer_optimizers import UNSCHEDULED, is_plain_averaging, make_outer_optimizer
from .ranges import check_int, check_number
from .selection import parse_patterns
from .weights import find_weight_function


if TYPE_CHECKING:
    from .config import FederationConfig


def check_outer(config: FederationConfig) -> None:
    """
    Refuses settings of the step at a border that are out of range, or that another setting rules out.

    Args:
        config ([`FederationConfig`]):
            The settings.

    Raises:
        ValueError: With the field, its value, what is allowed and the way out.
    """
    for name, value in (
        ("outer_learning_rate", config.outer_learning_rate),
        ("outer_max_norm", config.outer_max_norm),
    ):
        if value is not None:
            check_number(name, value, 0.0, above=True)
    check_number("proximal_mu", config.proximal_mu, 0.0, above=False)
    check_int("outer_warmup_rounds", config.outer_warmup_rounds, minimum=0)
    rounds, warmup = config.outer_schedule_rounds, config.outer_warmup_rounds
    if rounds is not None:
        check_int("outer_schedule_rounds", rounds, minimum=1)
        if config.outer_schedule == "constant":
            raise ValueError(
                f"outer_schedule_rounds={rounds} is where a schedule ends, but outer_schedule is 'constant' and has no end. Set "
                "outer_schedule to 'linear' or 'cosine', or leave outer_schedule_rounds out."
            )
        if rounds <= warmup:
            raise ValueError(
                f"outer_warmup_rounds={warmup} leaves nothing of outer_schedule_rounds={rounds}. Make it smaller."
            )
    elif config.outer_schedule != "constant":
        raise ValueError(
            f"outer_schedule={config.outer_schedule!r} needs outer_schedule_rounds, the rounds of the run: its steps "
            "divided by sync_every."
        )
    # Made once for its checks: torch's own of the options' ranges among them.
    make_outer_optimizer(config.outer_optimizer, config.outer_learning_rate, config.outer_options, [torch.zeros(1)])
    scheduled = config.outer_schedule != "constant" or warmup > 0
    if scheduled and config.outer_optimizer in UNSCHEDULED:
        raise ValueError(
            f"outer_optimizer={config.outer_optimizer} {UNSCHEDULED[config.outer_optimizer]}, so outer_schedule="
            f"{config.outer_schedule!r} with outer_warmup_rounds={warmup} would not do what it says. Leave both at their "
            "defaults, 'constant' and 0, or use another optimizer."
        )
    find_weight_function(config.group_weights)
    for name in ("include_parameters", "exclude_parameters", "local_parameters"):
        try:
            parse_patterns(getattr(config, name))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name}: {error}") from error
    if config.lora_average == "product" and not is_plain_averaging(config):
        raise ValueError(
            f"lora_average='product' cannot be stepped by outer_optimizer={config.outer_optimizer!r}: factors of one product "
            "differ from border to border without a meaning. Use the default outer settings, or lora_average='freeze_a'."
        )
    if config.lora_average == "product" and config.wire_format != "fp32":
        raise ValueError(
            f"lora_average='product' sends the factors of every group, and wire_format={config.wire_format!r} carries "
            "differences of averages only. Use wire_format='fp32', or lora_average='factors' or 'freeze_a'."
        )
