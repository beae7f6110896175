"""What the ranks tell each other when a round is closed: their rows, what must be equal in all groups, and what it came to."""

from __future__ import annotations

import logging

import torch

from .handshake import FederationMismatchError
from .held import Held
from .metrics import RoundMetrics, Rows, Tally, ratios
from .outcome import Outcome
from .peers import Peers


logger = logging.getLogger(__name__)


def make_row(
    held: Held,
    tally: Tally,
    steps: int,
    updates: torch.Tensor | float,
    seconds: float,
    bytes_sent: int,
    group_size: int,
) -> dict[str, float]:
    """
    What a rank tells the others: sums over the ranks of a group are what the group says.

    Args:
        held ([`Held`]):
            What this rank brings.
        tally ([`Tally`]):
            What it has counted.
        steps (`int`):
            Optimizer steps of the round.
        updates (`float` or `torch.Tensor`):
            Those that were made: a gradient scaler may have skipped some.
        seconds (`float`):
            Time of the round, waiting for other groups left aside.
        bytes_sent (`int`):
            Bytes to other groups, moments left aside, and what follows from the rows: after synchronous steps it is not known
            yet whether the parameters travel, so what they take has a place of its own.
        group_size (`int`):
            Ranks of a group: what all of them say alike is divided among them.
    """
    return {
        "steps": steps / group_size,
        "updates": float(updates) / group_size,
        "plan": held.digest() / group_size,
        "moments": held.moments_digest() / group_size,
        "not_finite": float(not held.finite),
        "problems": len(held.problems),
        "slow_bytes": bytes_sent,
        "parameter_bytes": held.parameter_bytes(),
        "moment_bytes": held.slow_bytes("moments"),
        "seconds": seconds,
        "all_tokens": float(tally.tokens),
        "tokens": float(tally.labels),
        "samples": float(tally.samples),
        "loss_sum": float(tally.loss_sum),
        "num_losses": tally.num_losses,
    }


def check_rows(rows: Rows, held: Held, round: int) -> None:
    """
    Refuses to average what does not belong together. The rows are the same on all ranks, so all raise or none.

    Args:
        rows (`Mapping[str, list[float]]`):
            Of all groups.
        held ([`Held`]):
            What this rank brings, for the message.
        round (`int`):
            Number of the round, counted from 1.

    Raises:
        FederationMismatchError: If the groups made different numbers of steps or train different parameters.
        ValueError: If a rank holds what cannot be averaged.
        RuntimeError: If no group has finite parameters.
    """
    if len({_whole(steps) for steps in rows["steps"]}) > 1:
        raise FederationMismatchError(
            f"The groups closed a round after different numbers of optimizer steps: {[_whole(s) for s in rows['steps']]} "
            "in group 0, 1, .... Every group must make the same number of steps: give all of them the same number "
            "of batches."
        )
    if len({_whole(digest) for digest in rows["plan"]}) > 1:
        names = list(held.shards)
        own = f"{len(names)} parameters, {names[0]} to {names[-1]}" if names else "no parameter"
        raise FederationMismatchError(
            "The groups train different parameters: requires_grad was changed in some groups only. This rank's group averages "
            f"{own}. Freeze and unfreeze on all ranks after the same step."
        )
    if any(rows["problems"]):
        raise ValueError(" ".join(held.problems) or "Another rank cannot average its model; its error says why.")
    if all(rows["not_finite"]):
        raise RuntimeError(
            f"The parameters of every federation group are not finite at the end of round {round}. "
            "Training cannot go on from here; lower the learning rate, or clip gradients (max_grad_norm), and start "
            "from the last checkpoint."
        )


def left_out(rows: Rows) -> tuple[int, ...]:
    """
    The groups whose parameters are not finite.

    Args:
        rows (`Mapping[str, list[float]]`):
            Of all groups.
    """
    return tuple(group for group, bad in enumerate(rows["not_finite"]) if bad)


def moments_agree(rows: Rows, mesh: Peers, round: int) -> bool:
    """
    Whether the groups hold moments of the same parameters; not where one of them has made no step yet.

    Args:
        rows (`Mapping[str, list[float]]`):
            Of all groups.
        mesh ([`Peers`]):
            The federation.
        round (`int`):
            Number of the round, counted from 1.
    """
    if len({_whole(digest) for digest in rows["moments"]}) == 1:
        return True
    if mesh.is_main:
        logger.warning(
            "The optimizers of the federation groups hold moments of different parameters at the end of round %d: a "
            "gradient scaler has skipped all steps of a group, say. The moments were not averaged this time.",
            round,
        )
    return False


def make_metrics(
    rows: Rows,
    mesh: Peers,
    outcome: Outcome,
    *,
    round: int,
    steps: int,
    seconds: float,
    wait_seconds: float,
    sync_seconds: float,
    period: int | None,
    synchronous: bool,
    bytes_besides: int = 0,
) -> RoundMetrics:
    """
    The metrics of a round, from what all groups said and what its averaging came to.

    Args:
        rows (`Mapping[str, list[float]]`):
            Of all groups.
        mesh ([`Peers`]):
            The federation.
        outcome ([`Outcome`]):
            Of the averaging.
        round (`int`):
            See [`RoundMetrics`], as for all others.
        steps (`int`):
            The same.
        seconds (`float`):
            The same.
        wait_seconds (`float`):
            The same.
        sync_seconds (`float`):
            The same.
        period (`int`, *optional*):
            The same.
        synchronous (`bool`):
            The same.
        bytes_besides (`int`, defaults to `0`):
            Bytes that the group has sent for the averaging beside what the rows say.
    """
    moment_bytes = int(rows["moment_bytes"][mesh.group_index]) if outcome.with_moments else 0
    return RoundMetrics(
        round=round,
        steps=steps,
        seconds=seconds,
        wait_seconds=wait_seconds,
        sync_seconds=sync_seconds,
        bytes_sent=int(rows["slow_bytes"][mesh.group_index]) + moment_bytes + bytes_besides,
        drift=outcome.drift,
        losses=ratios(rows["loss_sum"], rows["num_losses"], otherwise=float("nan")),
        # Each rank adds its seconds to the row, so their sum over the group is `group_size` times the group's.
        tokens_per_second=ratios(
            rows["all_tokens"], [total / mesh.layout.group_size for total in rows["seconds"]], otherwise=0.0
        ),
        excluded=left_out(rows),
        period=period,
        synchronous=synchronous,
        weights=outcome.weights,
        moment_bytes_sent=moment_bytes,
        pseudo_gradient_norm=outcome.pseudo_gradient_norm,
        outer_learning_rate=outcome.outer_learning_rate,
        lora_error=outcome.lora_error,
    )


def row_alone(tally: Tally) -> dict[str, float]:
    """
    What a rank tells the others where there is one group, as in [`make_row`].

    Args:
        tally ([`Tally`]):
            What it has counted.
    """
    return {
        "seconds": tally.seconds(),
        "all_tokens": float(tally.tokens),
        "loss_sum": float(tally.loss_sum),
        "num_losses": tally.num_losses,
    }


def metrics_alone(rows: Rows, tally: Tally, round: int, steps: int, group_size: int) -> RoundMetrics:
    """
    The metrics of a round with one group: plain FSDP or HSDP.

    Args:
        rows (`Mapping[str, list[float]]`):
            Of the group: sums of what [`row_alone`] says.
        tally ([`Tally`]):
            What this rank has counted.
        round (`int`):
            Number of the round, counted from 1.
        steps (`int`):
            Its optimizer steps.
        group_size (`int`):
            Ranks of the group.
    """
    return RoundMetrics(
        round=round,
        steps=steps,
        seconds=tally.seconds(),
        wait_seconds=0.0,
        sync_seconds=0.0,
        bytes_sent=0,
        drift=0.0,
        losses=ratios(rows["loss_sum"], rows["num_losses"], otherwise=float("nan")),
        tokens_per_second=ratios(rows["all_tokens"], [total / group_size for total in rows["seconds"]], otherwise=0.0),
    )


def _whole(value: float) -> int:
    """What the ranks of a group have divided among them, put together: rounding of the parts goes away."""
    return int(value + 0.5)
