"""Accuracy: `evaluate.load("recipes/metrics/accuracy")`, without a network and without scikit-learn."""

from typing import Any

import datasets
import evaluate
import numpy as np


_DESCRIPTION = "Share of the predictions that are right, as the metric of the same name on the Hub counts it."
_INPUTS_DESCRIPTION = """
Args:
    predictions (`list[int]`):
        Predicted classes.
    references (`list[int]`):
        True classes.

Returns:
    `dict[str, float]`: `accuracy`.
"""


class Accuracy(evaluate.Metric):
    """Share of right predictions."""

    def _info(self) -> evaluate.MetricInfo:
        features = {"predictions": datasets.Value("int32"), "references": datasets.Value("int32")}
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS_DESCRIPTION,
            features=datasets.Features(features),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}
