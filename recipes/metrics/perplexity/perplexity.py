"""Perplexity from token losses: `evaluate.load("recipes/metrics/perplexity")`, without a network."""

from typing import Any

import datasets
import evaluate
import numpy as np


_DESCRIPTION = """
Perplexity of a language model: exp of the mean negative log-likelihood of a token. Unlike the metric of the same name on
the Hub it takes losses that a model has already computed, so that it fits into the evaluation of a Trainer.
"""

_INPUTS_DESCRIPTION = """
Args:
    predictions (`list[float]`):
        Negative log-likelihood in nats, summed over the predicted tokens of a sequence.
    references (`list[int]`):
        Number of predicted tokens of that sequence.

Returns:
    `dict[str, float]`: `perplexity`, `bits_per_token` and `num_tokens`.

Examples:

```python
>>> perplexity = evaluate.load("recipes/metrics/perplexity")
>>> perplexity.compute(predictions=[2.0794415, 0.0], references=[2, 1])["perplexity"]
2.0
```
"""


class Perplexity(evaluate.Metric):
    """Perplexity over all tokens of all sequences, whatever their lengths."""

    def _info(self) -> evaluate.MetricInfo:
        features = {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS_DESCRIPTION,
            features=datasets.Features(features),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        num_tokens = int(np.sum(references))
        if num_tokens == 0:
            raise ValueError("Perplexity needs at least one predicted token.")
        mean_loss = float(np.sum(predictions)) / num_tokens
        return {
            "perplexity": float(np.exp(mean_loss)),
            "bits_per_token": mean_loss / float(np.log(2)),
            "num_tokens": num_tokens,
        }
