"""Cells: evaluation and prediction, compared with a single process that holds the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.harness.data import ListDataset, token_samples

from .cell import Cell, even_samples


# The last batch of a world is filled up with repeats, which must not count.
NUM_EVAL = 11
# Trainer's own loss does count them.
NUM_WHOLE = 32


def tell_accuracy(prediction: Any) -> dict[str, float]:
    found, labels = prediction.predictions, prediction.label_ids
    found = found.argmax(-1) if found.ndim == 3 else found
    return {"accuracy": float((found[:, :-1] == labels[:, 1:]).mean()), "rows": float(len(labels))}


class Accumulating:
    """A metric for `batch_eval_metrics`: it is given one batch at a time."""

    def __init__(self) -> None:
        self.right = self.all = 0.0

    def __call__(self, prediction: Any, compute_result: bool = False) -> dict[str, float]:
        found, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
        self.right += float((found == labels).sum())
        self.all += labels.numel()
        if not compute_result:
            return {}
        result = {"accuracy": self.right / self.all, "labels": self.all}
        self.right = self.all = 0.0
        return result


def argmax(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)
    return found


def dataset(num_samples: int = NUM_EVAL) -> Any:
    return ListDataset(token_samples(num_samples, uneven=False, seed=1))


def plain() -> dict[str, Any]:
    return {"eval_dataset": dataset(NUM_WHOLE)}


def with_metrics() -> dict[str, Any]:
    return {"eval_dataset": dataset(), "compute_metrics": tell_accuracy}


def with_argmax() -> dict[str, Any]:
    return {**with_metrics(), "preprocess_logits_for_metrics": argmax}


def by_batch() -> dict[str, Any]:
    return {"eval_dataset": dataset(), "compute_metrics": Accumulating()}


def evaluated(trainer: Any) -> dict[str, Any]:
    found = trainer.evaluate()
    kept = {"eval_loss"} if len(trainer.eval_dataset) == NUM_WHOLE else {"eval_accuracy", "eval_rows", "eval_labels"}
    return {name: value for name, value in found.items() if name in kept}


def predicted(trainer: Any) -> dict[str, Any]:
    found = trainer.predict(dataset())
    return {"logits": np.asarray(found.predictions), "labels": np.asarray(found.label_ids)}


IN_TRAINING = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}

EVALUATION_CELLS = [
    Cell("evaluate", "`eval_strategy='steps'`", IN_TRAINING, data=even_samples, options=plain, after=evaluated),
    Cell("predict", "`trainer.predict(dataset)`", {"per_device_eval_batch_size": 2}, options=plain, after=predicted),
    Cell(
        "compute_metrics",
        "with gathered logits",
        {**IN_TRAINING, "eval_accumulation_steps": 1},
        options=with_metrics,
        after=evaluated,
    ),
    Cell(
        "preprocess_logits_for_metrics",
        "with gathered arguments of the maximum",
        IN_TRAINING,
        options=with_argmax,
        after=evaluated,
    ),
    Cell(
        "batch_eval_metrics",
        "without gathered logits",
        {**IN_TRAINING, "batch_eval_metrics": True},
        options=by_batch,
        after=evaluated,
    ),
]
