"""What an averaging came to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """
    What an averaging came to, the same on all ranks. See [`RoundMetrics`].

    Args:
        drift (`float`):
            Distance of the groups from their average.
        weights (`tuple[float, ...]`):
            How much each group counted; none where the model was taken as it is.
        with_moments (`bool`, defaults to `False`):
            Whether moments of the inner optimizers were averaged.
        pseudo_gradient_norm (`float`, *optional*):
            Norm of the anchor minus the average.
        outer_learning_rate (`float`, *optional*):
            Of the outer step.
        lora_error (`float`, *optional*):
            What the adapters could not hold.
    """

    drift: float
    weights: tuple[float, ...] = ()
    with_moments: bool = False
    pseudo_gradient_norm: float | None = None
    outer_learning_rate: float | None = None
    lora_error: float | None = None


@dataclass(frozen=True)
class Exchanged:
    """
    What the collectives of an averaging have left to be done by each rank for itself, the same on all ranks.

    Args:
        weights (`tuple[float, ...]`):
            Of each group.
        squared_drift (`float`):
            Mean over the groups of the squared distance from the average, each element counted once.
        squared_norm (`float`):
            Squared norm of the average, counted likewise.
        pseudo_gradient_norm (`float`):
            Norm of the pseudo-gradient.
        with_moments (`bool`):
            Whether moments of the inner optimizers were averaged.
        lora_error (`float`, *optional*):
            What the adapters could not hold.
        step (`bool`):
            Whether the outer optimizer is to step.
        turn (`frozenset[str]`, *optional*):
            Names of the parameters that it is to step; by default all.
    """

    weights: tuple[float, ...]
    squared_drift: float
    squared_norm: float
    pseudo_gradient_norm: float
    with_moments: bool
    lora_error: float | None
    step: bool
    turn: frozenset[str] | None = None

    @property
    def drift(self) -> float:
        """Distance of the groups from their average, relative to its norm."""
        return (self.squared_drift / self.squared_norm) ** 0.5 if self.squared_norm > 0 else 0.0
