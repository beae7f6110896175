"""Different data in each federation group, and how well each group's own model knows each part."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import Trainer, TrainerCallback

from clm_data import collate_blocks
from clm_metrics import sequence_losses


def name_parts(bounds: Sequence[float]) -> list[str]:
    """
    Names the parts that bounds make.

    Args:
        bounds (`Sequence[float]`):
            Where a new part begins, in rising order.

    Returns:
        `list[str]`: `before_1900` and `from_1900` for one bound of 1900.
    """
    texts = [f"{bound:g}" for bound in bounds]
    middle = [f"from_{low}_before_{high}" for low, high in pairwise(texts)]
    return [f"before_{texts[0]}", *middle, f"from_{texts[-1]}"]


def split_parts(rows: Dataset, column: str, bounds: Sequence[float]) -> dict[str, Dataset]:
    """
    Splits rows by a number in them.

    Args:
        rows (`Dataset`):
            The rows.
        column (`str`):
            Column that holds the number.
        bounds (`Sequence[float]`):
            Where a new part begins.

    Returns:
        `dict[str, Dataset]`: By name of the part, in order.
    """
    numbers: list[list[int]] = [[] for _ in range(len(bounds) + 1)]
    for index, value in enumerate(rows[column]):
        numbers[bisect_right(bounds, float(value))].append(index)
    return {name: rows.select(chosen) for name, chosen in zip(name_parts(bounds), numbers, strict=True)}


class OwnPerplexity(TrainerCallback):
    """
    Measures each group's own model at the end of the last round, before it is averaged.

    Args:
        parts (`Mapping[str, Dataset]`):
            Blocks to measure on, by name of the part.
        batch_size (`int`):
            Blocks in a batch.
    """

    def __init__(self, parts: Mapping[str, Dataset], batch_size: int) -> None:
        self.parts = parts
        self.batch_size = batch_size
        self.trainer: Trainer | None = None
        """To be set once the Trainer is made."""
        self._sums: torch.Tensor | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Within the last round collectives stay in the group, so this takes nothing from the others."""
        if state.global_step < state.max_steps:
            return
        assert self.trainer is not None
        model.eval()
        sums = torch.stack([self._sum_losses(model, blocks) for blocks in self.parts.values()])
        # Over the group's ranks; that the sum is repeated for each group cancels out.
        self._sums = self.trainer.accelerator.reduce(sums, reduction="sum")
        model.train()

    @torch.no_grad()
    def _sum_losses(self, model: Any, blocks: Dataset) -> torch.Tensor:
        """Losses and tokens of this rank's share, of shape (2,): as many batches on all ranks, as FSDP needs it."""
        assert self.trainer is not None
        state, num_groups = PartialState(), len(self.parts)
        group_size = state.num_processes // num_groups
        step = self.batch_size * group_size
        sums = torch.zeros(2, device=state.device, dtype=torch.float32)
        for start in range(0, len(blocks) // step * step, step):
            first = start + state.process_index % group_size * self.batch_size
            batch = collate_blocks(list(blocks.select(range(first, first + self.batch_size))))
            batch = {key: value.to(state.device) for key, value in batch.items()}
            losses = sequence_losses(model(**batch).logits, batch["labels"])
            sums += torch.stack([losses.sum(), losses.new_tensor(batch["labels"][:, 1:].numel())])
        return sums

    def results(self) -> dict[str, float]:
        """
        Collective over the world, after training.

        Returns:
            `dict[str, float]`: `group<g>_<part>_perplexity`.
        """
        assert self.trainer is not None and self._sums is not None, "training ended before its last step"
        gathered = self.trainer.accelerator.gather(self._sums[None])
        own = gathered[:: len(gathered) // len(self.parts)]
        return {
            f"group{group}_{name}_perplexity": float(torch.exp(sums[index, 0] / sums[index, 1]))
            for group, sums in enumerate(own)
            for index, name in enumerate(self.parts)
        }
