"""Perplexity inside the evaluation of a Trainer."""

from collections.abc import Callable
from pathlib import Path

import evaluate
import numpy as np
import torch
from transformers import EvalPrediction


METRIC_FOLDER = Path(__file__).resolve().parent / "metrics" / "perplexity"


def sequence_losses(logits: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    """
    Reduces the logits of a batch to one number a sequence, before Trainer gathers them over all processes.

    Args:
        logits (`torch.Tensor` or `tuple[torch.Tensor, ...]`):
            Logits of shape (batch, block, vocabulary), or a tuple that starts with them.
        labels (`torch.Tensor`):
            Labels of shape (batch, block); -100 is no label.

    Returns:
        `torch.Tensor`: Negative log-likelihoods in nats, summed over each sequence, of shape (batch,).
    """
    if isinstance(logits, tuple):
        logits = logits[0]
    # The logits at a position predict the token after it.
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100, reduction="none"
    )
    return losses.view(labels.shape[0], -1).sum(dim=1)


def make_compute_metrics() -> Callable[[EvalPrediction], dict[str, float]]:
    """
    Makes the `compute_metrics` of a Trainer whose `preprocess_logits_for_metrics` is [`sequence_losses`].

    Returns:
        `Callable[[EvalPrediction], dict[str, float]]`: Function that gives the perplexity of the evaluated sequences.
    """
    # In memory, because every process of the world computes it, and a file of their own each would have to be locked.
    perplexity = evaluate.load(str(METRIC_FOLDER), keep_in_memory=True)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        num_tokens = (np.asarray(prediction.label_ids)[:, 1:] != -100).sum(axis=1)
        return perplexity.compute(predictions=prediction.predictions, references=num_tokens)

    return compute_metrics
