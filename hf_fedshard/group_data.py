"""A dataset of its own for each group, in the place of a `train_dataset`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import ConcatDataset, Dataset, IterableDataset

from . import environment


class GroupData:
    """
    One dataset for each federation group, in the place of a `train_dataset`. Made by [`group_dataset`] and the splits.

    With [`FedAvgCallback`] each group trains on its own. Where there are no groups (`num_groups=1`, or no callback) the
    datasets of a list are trained on together, so that the synchronous baseline sees the same data.

    Args:
        datasets (`Sequence` or `Callable[[int], Any]`):
            One dataset for each group, or a function that gives that of a group.
        num_groups (`int`):
            Number of groups.
        take_turns (`bool`, defaults to `False`):
            Whether every rank of a group reads the group's whole stream and takes its turn, where it would otherwise have
            files of its own: those of a filtered stream may hold any number of samples, or none.
    """

    def __init__(
        self, datasets: Sequence[Any] | Callable[[int], Any], num_groups: int, take_turns: bool = False
    ) -> None:
        self.num_groups = num_groups
        self.take_turns = take_turns
        self._make = datasets if callable(datasets) else None
        self._parts: dict[int, Any] = {} if callable(datasets) else dict(enumerate(datasets))
        self._union: ConcatDataset[Any] | None = None

    def of_group(self, group: int) -> Any:
        """
        The dataset of a group, as it was given.

        Args:
            group (`int`):
                The group.
        """
        if group not in self._parts:
            assert self._make is not None
            self._parts[group] = self._make(group)
        return self._parts[group]

    def map(self, function: Callable[..., Any], **options: Any) -> GroupData:
        """
        Applies `datasets.Dataset.map` to the dataset of each group: to tokenize after a split, say.

        Args:
            function (`Callable`):
                For `map`.
            options (`Any`):
                For `map`.

        Raises:
            ValueError: If a group's dataset has no `map`.
        """
        if self._make is None:
            mapped = [_map(part, group, function, options) for group, part in self._parts.items()]
            return type(self)(mapped, self.num_groups, self.take_turns)
        make = self._make
        return type(self)(lambda group: _map(make(group), group, function, options), self.num_groups, self.take_turns)

    def all_parts(self) -> list[Any]:
        """
        The datasets of all groups, which are trained on together where there are no groups.

        Raises:
            ValueError: If they are made by a function of the group.
        """
        if self._make is not None:
            raise ValueError(
                "This dataset is made by a function of the group, so without federation groups there is nothing to train on. "
                "Train with FedAvgCallback(num_groups=...) or FederatedFSDPPlugin, or give a list of datasets."
            )
        return list(self._parts.values())


class GroupDatasets(GroupData, Dataset[Any]):
    """Datasets with a length. See [`GroupData`]."""

    def __len__(self) -> int:
        if self._make is None:
            return sum(len(part) for part in self._parts.values())
        # Those of other groups may not even exist here. Groups are runs of consecutive ranks.
        rank, world_size = environment.launched_rank(), environment.launched_world_size()
        try:
            own = len(self.of_group(rank * self.num_groups // world_size))
        except Exception:
            # Trainer asks in its constructor, on each rank alone. What is wrong is told when all ranks prepare their data.
            own = 1
        return max(own, 1) * self.num_groups

    def __getitem__(self, index: int) -> Any:
        if self._union is None:
            self._union = ConcatDataset(self.all_parts())
        return self._union[index]


class GroupStreams(GroupData, IterableDataset[Any]):
    """Streaming datasets. See [`GroupData`]."""

    def __iter__(self) -> Iterator[Any]:
        for part in self.all_parts():
            yield from part


def group_dataset(
    datasets: Sequence[Any] | Callable[[int], Any], num_groups: int | None = None, streaming: bool = False
) -> GroupData:
    """
    Gives each federation group a dataset of its own.

    ```python
    train_dataset = group_dataset([dataset, train_dataset])  # of group 0 and of group 1
    ```

    Args:
        datasets (`Sequence` or `Callable[[int], Any]`):
            One dataset for each group; or a function that is given the number of a group and returns its dataset, and is
            called for a process's own group only: a site may hold no other data than its own.
        num_groups (`int`, *optional*):
            Number of groups. Needed with a function.
        streaming (`bool`, defaults to `False`):
            With a function: whether it returns a streaming dataset.

    Returns:
        [`GroupData`]: To be given as `train_dataset`.

    Raises:
        ValueError: If the numbers do not fit, or streaming datasets and others are mixed.
    """
    if callable(datasets):
        if num_groups is None or num_groups < 1:
            raise ValueError(f"num_groups must be given beside a function of the group, but is {num_groups!r}.")
        return (GroupStreams if streaming else GroupDatasets)(datasets, num_groups)
    parts = list(datasets)
    if not parts or num_groups not in (None, len(parts)):
        raise ValueError(f"{len(parts)} datasets were given for num_groups={num_groups}: give one for each group.")
    streams = [isinstance(part, IterableDataset) for part in parts]
    if any(streams) != all(streams):
        raise ValueError(
            "Some of the groups' datasets are streaming datasets and some are not: give all groups the same kind."
        )
    if not all(streams):
        for group, part in enumerate(parts):
            if not len(part):
                raise ValueError(f"The dataset of group {group} is empty. Every group needs data of its own.")
    return (GroupStreams if all(streams) else GroupDatasets)(parts, len(parts))


def _map(part: Any, group: int, function: Callable[..., Any], options: dict[str, Any]) -> Any:
    if not hasattr(part, "map"):
        raise ValueError(
            f"The dataset of group {group} is a {type(part).__name__}, which has no `map`. Split a dataset of `datasets`, or "
            "change the samples before they are split."
        )
    return part.map(function, **options)


def wrong_number(data: GroupData, num_groups: int) -> str:
    """
    The message for data that was made for another number of groups.

    Args:
        data ([`GroupData`]):
            The data.
        num_groups (`int`):
            Groups of the federation.
    """
    return (
        f"The train_dataset holds data for {data.num_groups} groups, but the federation has num_groups={num_groups}. Split the "
        "data into as many parts as there are groups."
    )
