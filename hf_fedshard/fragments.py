"""Fragments of a model that are averaged at different steps of a round (Streaming DiLoCo, arXiv 2501.18512)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn


def unit_of(name: str) -> str:
    """
    What a parameter is averaged together with: its transformer block, which is the element of the outermost list of modules
    that it is in, or outside of all lists its module. So the embedding, the last norm and the head are apart.

    Args:
        name (`str`):
            Of the parameter, `"model.layers.3.mlp.up_proj.weight"`, whose unit is `"model.layers.3"`.
    """
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if part.isdecimal():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:-1])


def divide(
    sizes: Mapping[str, int], num_fragments: int, whole_sizes: Mapping[str, int] | None = None
) -> list[frozenset[str]]:
    """
    Divides parameters into fragments of about the same size. Without communication: all ranks hold the same names and sizes
    and arrive at the same fragments.

    Units stay whole. The largest comes first, into the fragment that is smallest by then, so that the blocks of a
    fragment lie scattered over the depth of the model. Units that do not train follow, by all of their elements: they travel
    when they are unfrozen, and are not to travel all at once.

    Args:
        sizes (`Mapping[str, int]`):
            Elements of each parameter over the whole model, in the model's order; 0 for one that does not train.
        num_fragments (`int`):
            How many.
        whole_sizes (`Mapping[str, int]`, *optional*):
            Elements of each parameter whether it trains or not. Defaults to `sizes`.

    Returns:
        `list[frozenset[str]]`: Names of the parameters of each fragment.

    Raises:
        ValueError: If there are fewer units that train than fragments.
    """
    units, whole_units = _by_unit(sizes), _by_unit(sizes if whole_sizes is None else whole_sizes)
    trained = sum(size > 0 for size in units.values())
    if trained < num_fragments:
        raise ValueError(
            f"num_fragments={num_fragments} is more than the model can be divided into: it has {trained} units that train "
            "(transformer blocks, embedding, norm, head). Make it smaller."
        )
    loads, whole_loads = [0] * num_fragments, [0] * num_fragments
    place: dict[str, int] = {}
    # Stable: equal ones in the model's order. What trains lies as it would without the rest.
    for unit in sorted(units, key=lambda unit: (-units[unit], 0 if units[unit] else -whole_units[unit])):
        counted = loads if units[unit] else whole_loads
        place[unit] = min(range(num_fragments), key=lambda index: (counted[index], index))
        loads[place[unit]] += units[unit]
        whole_loads[place[unit]] += whole_units[unit]
    fragments: list[set[str]] = [set() for _ in range(num_fragments)]
    for name in sizes:
        fragments[place[unit_of(name)]].add(name)
    return [frozenset(names) for names in fragments]


def _by_unit(sizes: Mapping[str, int]) -> dict[str, int]:
    units: dict[str, int] = {}
    for name, size in sizes.items():
        units[unit_of(name)] = units.get(unit_of(name), 0) + size
    return units


def trained_sizes(model: nn.Module, trained: Iterable[str]) -> dict[str, int]:
    """
    Elements of each parameter of a model, 0 for those that do not train.

    Args:
        model (`nn.Module`):
            The model, resharded; sizes are those of whole parameters, not of shards.
        trained (`Iterable[str]`):
            Names of the parameters that are averaged.
    """
    trained = set(trained)
    return {name: param.numel() if name in trained else 0 for name, param in model.named_parameters()}


def starts(period: int, num_fragments: int) -> list[int]:
    """
    After which steps of a round the exchange of each fragment starts: evenly over the round, the last one at its end.

    Args:
        period (`int`):
            H, at least `num_fragments`.
        num_fragments (`int`):
            P.

    Returns:
        `list[int]`: `(p + 1) H / P` for fragment p, rounded down, all different.
    """
    return [(index + 1) * period // num_fragments for index in range(num_fragments)]
