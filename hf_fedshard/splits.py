"""Splitting one dataset into a part for each group: by what a column says, or at random with unequal shares of labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from numbers import Real
from typing import Any

from torch.utils.data import IterableDataset, Subset

from .group_data import GroupData, GroupStreams, group_dataset


Assignment = Mapping[Any, int] | Callable[[Any], int]

_TRIES = 100


def split_by_column(dataset: Any, column: str, num_groups: int, assignment: Assignment | None = None) -> GroupData:
    """
    Gives each group the samples with its values of a column: an era, a party, a source, a language.

    ```python
    train_dataset = split_by_column(dataset, "year", num_groups=2)  # the earlier and the later half
    train_dataset = split_by_column(dataset, "party", num_groups=2, assignment={"Republican": 0, "Democratic": 1})
    ```

    Args:
        dataset (`Dataset` or `datasets.IterableDataset`):
            With the column.
        column (`str`):
            Its name.
        num_groups (`int`):
            Number of groups.
        assignment (`Mapping[Any, int]` or `Callable[[Any], int]`, *optional*):
            The group of each value; samples with a value that a mapping leaves out belong to no group. By default numbers
            are cut into consecutive ranges, and other values go, the most frequent first, to the group with the fewest
            samples. A value is never divided. A streaming dataset needs it.

    Returns:
        [`GroupData`]: To be given as `train_dataset`.

    Raises:
        ValueError: If there is no such column, a value is missing where there is no `assignment`, a group does not exist,
            or would be empty.
    """
    _check_num_groups(num_groups)
    if isinstance(dataset, IterableDataset):
        if assignment is None:
            raise ValueError(
                f"The values of {column!r} in a streaming dataset are not known in advance. Give assignment, a mapping from "
                "value to group or a function."
            )
        if isinstance(assignment, Mapping):
            for value, given in assignment.items():
                _check_group(given, value, column, num_groups)
        select: Any = getattr(dataset, "filter", None)
        if select is None:
            raise ValueError(
                f"A {type(dataset).__name__} has no `filter`. Give a datasets.IterableDataset, or one stream for each group "
                "with group_dataset."
            )
        # Every rank reads the whole stream and keeps its group's: the column may follow the files.
        streams = [select(partial(_belongs, column, assignment, num_groups, group)) for group in range(num_groups)]
        return GroupStreams(streams, num_groups, take_turns=True)
    values = _column(dataset, column)
    if assignment is None:
        _refuse_missing(
            values, column, "Leave these samples out, or give assignment, a mapping or function with their group"
        )
        assignment = _assign(Counter(values), column, num_groups)
    parts: list[list[int]] = [[] for _ in range(num_groups)]
    for index, value in enumerate(values):
        group = _group_of(value, assignment)
        if group is None:
            continue
        _check_group(group, value, column, num_groups)
        parts[group].append(index)
    return _take(dataset, parts, f"the values of {column!r}")


def split_dirichlet(dataset: Any, label: str, alpha: float, num_groups: int, seed: int = 0) -> GroupData:
    """
    Gives each group another mixture of labels: of each label, shares drawn from a symmetric Dirichlet distribution over the
    groups (arXiv 1905.12022; arXiv 2102.02079 compares it with others). The usual way to make groups as unlike as one
    wants. Groups differ in size too, unlike in arXiv 1909.06335, which draws a mixture for each group and keeps the sizes.

    ```python
    train_dataset = split_dirichlet(dataset, "party", alpha=0.5, num_groups=2)
    ```

    Args:
        dataset (`Dataset`):
            With a length.
        label (`str`):
            The column that holds the label, of few distinct values.
        alpha (`float`):
            Concentration: 100 gives nearly equal mixtures, 0.1 nearly one label for each group.
        num_groups (`int`):
            Number of groups.
        seed (`int`, defaults to `0`):
            Seed, the same on all ranks. The split depends on nothing else.

    Returns:
        [`GroupData`]: To be given as `train_dataset`. Every sample is in one part, and no part is empty.

    Raises:
        ValueError: If an argument is out of its range, a label is missing, or no draw leaves each group a sample.
    """
    import numpy

    _check_num_groups(num_groups)
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < float("inf"):
        raise ValueError(f"alpha must be a positive number, but got {alpha!r}.")
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            "split_dirichlet needs a dataset with a length: the shares of a label are counted. For a streaming dataset use "
            "split_by_column with an assignment, or group_dataset."
        )
    labels = _column(dataset, label)
    _refuse_missing(labels, label, "Leave these samples out, or give them a label")
    places: dict[Any, list[int]] = {}
    for index, value in enumerate(labels):
        places.setdefault(value, []).append(index)
    generator = numpy.random.default_rng(seed)
    for _ in range(_TRIES):
        parts: list[list[int]] = [[] for _ in range(num_groups)]
        # In the order of first appearance, so that it is the same everywhere.
        for indices in places.values():
            cuts = numpy.cumsum(generator.dirichlet([alpha] * num_groups))[:-1] * len(indices)
            shuffled = generator.permutation(indices)
            for group, own in enumerate(numpy.split(shuffled, cuts.round().astype(int))):
                parts[group] += own.tolist()
        if all(parts):
            return _take(dataset, [sorted(part) for part in parts], f"the shares of {label!r}")
    raise ValueError(
        f"In {_TRIES} draws with alpha={alpha} some of the {num_groups} groups had no sample. Use a larger alpha, fewer groups "
        "or more data."
    )


def _check_num_groups(num_groups: int) -> None:
    if isinstance(num_groups, bool) or not isinstance(num_groups, int) or num_groups < 1:
        raise ValueError(f"num_groups must be an integer of at least 1, but got {num_groups!r}.")


def _column(dataset: Any, name: str) -> list[Any]:
    names = getattr(dataset, "column_names", None)
    if names is not None:
        if name not in names:
            raise ValueError(f"The dataset has no column {name!r}. It has {', '.join(names)}.")
        # In the format for training a value may be a tensor, which is equal to no other one where values are counted.
        rows = dataset.with_format(None) if hasattr(dataset, "with_format") else dataset
        return [_plain(value) for value in rows[name]]
    return [_plain(dataset[index][name]) for index in range(len(dataset))]


def _plain(value: Any) -> Any:
    """The number in a scalar of NumPy or torch."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def _refuse_missing(values: Sequence[Any], column: str, way_out: str) -> None:
    missing = sum(value is None or (isinstance(value, (Real, Decimal)) and value != value) for value in values)
    if missing:
        raise ValueError(f"{missing} of {len(values)} samples have no value in {column!r} (None or NaN). {way_out}.")


def _check_group(group: int, value: Any, column: str, num_groups: int) -> None:
    if not 0 <= group < num_groups:
        raise ValueError(
            f"assignment gives {column}={value!r} the group {group}, but groups are 0 to {num_groups - 1}."
        )


def _belongs(column: str, assignment: Assignment, num_groups: int, own_group: int, sample: Mapping[str, Any]) -> bool:
    value = _plain(sample[column])
    group = _group_of(value, assignment)
    if group is not None:
        _check_group(group, value, column, num_groups)
    return group == own_group


def _group_of(value: Any, assignment: Assignment) -> int | None:
    return assignment.get(value) if isinstance(assignment, Mapping) else assignment(value)


def _assign(counts: Counter[Any], column: str, num_groups: int) -> dict[Any, int]:
    if len(counts) < num_groups:
        raise ValueError(
            f"{column!r} has {len(counts)} distinct values, too few for num_groups={num_groups}. Use fewer groups, another "
            "column, or split_dirichlet."
        )
    if all(isinstance(value, (Real, Decimal)) and not isinstance(value, bool) for value in counts):
        return _cut(sorted(counts.items()), num_groups)
    sizes = [0] * num_groups
    groups: dict[Any, int] = {}
    for value, count in sorted(counts.items(), key=lambda item: (-item[1], str(item[0]))):
        groups[value] = sizes.index(min(sizes))
        sizes[groups[value]] += count
    return groups


def _cut(counts: list[tuple[Any, int]], num_groups: int) -> dict[Any, int]:
    """Consecutive ranges of about equally many samples, each of one value at least."""
    total = sum(count for _, count in counts)
    groups: dict[Any, int] = {}
    behind, group, begun = 0, 0, False
    for place, (value, count) in enumerate(counts):
        # The middle of this value lies beyond the border, or the groups left need all values left.
        beyond = behind + count / 2 > total * (group + 1) / num_groups
        if begun and group < num_groups - 1 and (beyond or len(counts) - place == num_groups - 1 - group):
            group += 1
        groups[value] = group
        begun = True
        behind += count
    return groups


def _take(dataset: Any, parts: Sequence[Sequence[int]], what: str) -> GroupData:
    empty = [group for group, part in enumerate(parts) if not part]
    if empty:
        raise ValueError(
            f"Group {', '.join(map(str, empty))} would have no sample: {what} give the groups "
            f"{[len(part) for part in parts]}."
        )
    return group_dataset(
        [dataset.select(part) if hasattr(dataset, "select") else Subset(dataset, part) for part in parts]
    )
