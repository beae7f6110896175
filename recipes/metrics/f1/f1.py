"""F1: `evaluate.load("recipes/metrics/f1")`, without a network and without scikit-learn."""

from typing import Any

import datasets
import evaluate
import numpy as np


_DESCRIPTION = "Harmonic mean of precision and recall, as the metric of the same name on the Hub counts it."
_INPUTS_DESCRIPTION = """
Args:
    predictions (`list[int]`):
        Predicted classes.
    references (`list[int]`):
        True classes.
    average (`str`, *optional*, defaults to `"binary"`):
        `"binary"`, the F1 of `pos_label`; `"macro"`, the mean over classes; `"micro"`, over all predictions.
    pos_label (`int`, *optional*, defaults to 1):
        The class that counts for `"binary"`.

Returns:
    `dict[str, float]`: `f1`. A class that is neither predicted nor true has an F1 of 0.
"""


class F1(evaluate.Metric):
    """F1 of one class or over all classes."""

    def _info(self) -> evaluate.MetricInfo:
        features = {"predictions": datasets.Value("int32"), "references": datasets.Value("int32")}
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS_DESCRIPTION,
            features=datasets.Features(features),
        )

    def _compute(
        self, predictions: Any, references: Any, average: str = "binary", pos_label: int = 1
    ) -> dict[str, float]:
        predicted, true = np.asarray(predictions), np.asarray(references)
        if average not in ("binary", "macro", "micro"):
            raise ValueError(f"average is one of binary, macro and micro, got {average!r}.")
        classes = np.array([pos_label]) if average == "binary" else np.union1d(predicted, true)
        right = np.array([np.sum((predicted == c) & (true == c)) for c in classes])
        named = np.array([np.sum(predicted == c) + np.sum(true == c) for c in classes])
        if average == "micro":
            return {"f1": float(2 * right.sum() / named.sum())}
        return {"f1": float(np.mean(2 * right / np.maximum(named, 1)))}
