"""Small Python state (schedules, hyper-parameters, scalers) as JSON: exact, typed, and with nothing to unpickle."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import numpy
import torch


_TAG = "__type__"
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "deque": deque}
_MAX_TENSOR_ELEMENTS = 65_536


def encode(value: Any, where: str) -> Any:
    """
    Turns a value into what JSON can hold and [`decode`] restores exactly.

    Args:
        value (`Any`):
            Numbers, strings, `None`, lists, tuples, sets, dictionaries, `Counter`, `deque`, small tensors and NumPy
            scalars, nested.
        where (`str`):
            What it is, for the error.

    Raises:
        ValueError: If it contains anything else; the message says where and of which type.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if isinstance(value, numpy.generic):
        return encode(value.item(), where)
    if isinstance(value, list):
        return [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    for name, kind in _SEQUENCES.items():
        if type(value) is kind:
            length = {"maxlen": value.maxlen} if isinstance(value, deque) else {}
            return {_TAG: name, "items": [encode(item, f"{where}[...]") for item in value], **length}
    if type(value) in (dict, Counter) or (isinstance(value, dict) and hasattr(value, "default_factory")):
        # As pairs: JSON would turn integer keys into strings.
        pairs = [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
        return {_TAG: "Counter" if isinstance(value, Counter) else "dict", "items": pairs}
    if isinstance(value, torch.Tensor) and value.numel() <= _MAX_TENSOR_ELEMENTS and not hasattr(value, "placements"):
        flat = value.detach().cpu().flatten().tolist()
        return {_TAG: "tensor", "dtype": str(value.dtype), "shape": list(value.shape), "items": flat}
    if isinstance(value, (int, float)):  # enumerations and the like
        return float(value) if isinstance(value, float) else int(value)
    raise ValueError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: it keeps "
        "numbers, strings, tensors and their lists and dictionaries. Leave it out of the object's state_dict()."
    )


def decode(value: Any) -> Any:
    """
    The inverse of [`encode`].

    Args:
        value (`Any`):
            What was read from JSON.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, items = value[_TAG], value["items"]
    if kind == "tensor":
        # Python's floats hold every dtype up to 64 bits exactly, in JSON too.
        return torch.tensor(items, dtype=getattr(torch, value["dtype"].removeprefix("torch."))).reshape(value["shape"])
    if kind in ("dict", "Counter"):
        pairs = {decode(key): decode(item) for key, item in items}
        return Counter(pairs) if kind == "Counter" else pairs
    if kind == "deque":
        return deque((decode(item) for item in items), maxlen=value["maxlen"])
    return _SEQUENCES[kind](decode(item) for item in items)
