"""Splitting a dataset into parts for groups."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from typing import Any

import pytest
import torch
from datasets import Dataset

from hf_fedshard import GroupData, split_by_column, split_dirichlet
from tests.harness.data import ListDataset, StreamDataset


def table(**columns: list[Any]) -> Dataset:
    length = len(next(iter(columns.values())))
    return Dataset.from_dict({"number": list(range(length)), **columns})


GAPS = table(year=[1, None, 2])


def numbers(data: GroupData) -> list[list[int]]:
    return [[row["number"] for row in data.of_group(group)] for group in range(data.num_groups)]


def test_numbers_are_cut_into_ranges() -> None:
    years = [1790 + index // 2 for index in range(20)]
    parts = numbers(split_by_column(table(year=years[::-1]), "year", 3))
    assert sorted(sum(parts, [])) == list(range(20))
    own = [[years[::-1][number] for number in part] for part in parts]
    assert max(own[0]) < min(own[1]) <= max(own[1]) < min(own[2])
    assert [len(part) for part in parts] == [6, 8, 6]


def test_every_range_has_a_value() -> None:
    parts = numbers(split_by_column(table(year=[1] * 50 + [2, 3]), "year", 3))
    assert [len(part) for part in parts] == [50, 1, 1]
    assert [len(part) for part in numbers(split_by_column(table(year=[1, 2] + [3] * 50), "year", 3))] == [1, 1, 50]


@pytest.mark.parametrize("kind", ["numpy", "torch", "tensors"])
def test_the_format_for_training_does_not_matter(kind: str) -> None:
    """Values are those of the data, not tensors that are equal to no other."""
    years = [1790, 1800, 1790, 1800, 1810, 1790]
    if kind == "tensors":
        data: Any = ListDataset([{"number": at, "year": torch.tensor(year)} for at, year in enumerate(years)])
    else:
        data = table(year=years).with_format(kind)
    split = split_by_column(data, "year", 2)
    assert numbers(split) == [[0, 2, 5], [1, 3, 4]]
    assert numbers(split_by_column(data, "year", 2, {1790: 1, 1800: 0})) == [[1, 3], [0, 2, 5]]
    assert numbers(split_dirichlet(data, "year", 1.0, 2)) == numbers(
        split_dirichlet(table(year=years), "year", 1.0, 2)
    )
    if kind != "tensors":
        assert split.of_group(0).format["type"] == kind, "the parts are as they were given"
        stream = data.to_iterable_dataset().with_format(kind)
        assert numbers(split_by_column(stream, "year", 2, {1790: 1, 1800: 0})) == [[1, 3], [0, 2, 5]]


def test_decimals_are_numbers() -> None:
    data = table(price=[Decimal("10"), Decimal("9"), Decimal("100"), Decimal("9")])
    assert numbers(split_by_column(data, "price", 2)) == [[1, 3], [0, 2]]


def test_missing_values_can_be_assigned() -> None:
    assert numbers(split_by_column(GAPS, "year", 2, {1: 0, 2: 1})) == [[0], [2]]
    assert numbers(split_by_column(GAPS, "year", 2, {1: 0, 2: 1, None: 1})) == [[0], [1, 2]]


def test_names_are_balanced() -> None:
    party = ["Republican"] * 9 + ["Democratic"] * 8 + ["Whig"] * 4 + ["Federalist"] * 2
    data = split_by_column(table(party=party), "party", 2)
    assert [Counter(part["party"]) for part in (data.of_group(0), data.of_group(1))] == [
        {"Republican": 9, "Federalist": 2},
        {"Democratic": 8, "Whig": 4},
    ]


@pytest.mark.parametrize("assignment", [{"a": 1, "b": 0}, lambda value: {"a": 1, "b": 0}.get(value)])
def test_assignment(assignment: Any) -> None:
    column = ["a", "b", "c", "a", "b"]
    assert numbers(split_by_column(table(kind=column), "kind", 2, assignment)) == [[1, 4], [0, 3]]
    rows = ListDataset([{"number": index, "kind": kind} for index, kind in enumerate(column)])
    assert numbers(split_by_column(rows, "kind", 2, assignment)) == [[1, 4], [0, 3]]
    stream = table(kind=column).to_iterable_dataset(num_shards=2)
    assert numbers(split_by_column(stream, "kind", 2, assignment)) == [[1, 4], [0, 3]]


def test_dirichlet() -> None:
    labels = [index % 4 for index in range(400)]
    parts = {}
    for alpha in (0.1, 100):
        data = split_dirichlet(table(label=labels), "label", alpha, num_groups=4, seed=3)
        parts[alpha] = numbers(data)
        assert sorted(sum(parts[alpha], [])) == list(range(400)), "every sample in one part"
        assert numbers(split_dirichlet(table(label=labels), "label", alpha, 4, seed=3)) == parts[alpha]
        assert numbers(split_dirichlet(table(label=labels), "label", alpha, 4, seed=4)) != parts[alpha]

    def largest_shares(alpha: float) -> list[float]:
        counts = [Counter(labels[number] for number in part) for part in parts[alpha]]
        return [max(count.values()) / sum(count.values()) for count in counts]

    assert min(largest_shares(0.1)) > 0.5 > 0.4 > max(largest_shares(100))


def test_a_split_is_mapped() -> None:
    data = split_by_column(table(year=[1, 2, 3, 4]), "year", 2).map(lambda row: {"number": 10 * row["number"]})
    assert numbers(data) == [[0, 10], [20, 30]]
    assert [row["number"] for row in (data[index] for index in range(len(data)))] == [0, 10, 20, 30]


SPLIT = table(year=[1, 1, 2])
STREAM = SPLIT.to_iterable_dataset()


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (lambda: split_by_column(SPLIT, "era", 2), "no column 'era'. It has number, year"),
        (lambda: split_by_column(SPLIT, "year", 3), "2 distinct values, too few for num_groups=3"),
        (lambda: split_by_column(SPLIT, "year", 0), "num_groups must be an integer of at least 1, but got 0"),
        (lambda: split_by_column(SPLIT, "year", 2, {1: 0, 2: 2}), "year=2 the group 2, but groups are 0 to 1"),
        (lambda: split_by_column(SPLIT, "year", 2, {1: 0, 2: 0}), "Group 1 would have no sample"),
        (lambda: split_by_column(SPLIT.to_iterable_dataset(), "year", 2), "Give assignment"),
        (lambda: split_by_column(GAPS, "year", 2), "1 of 3 samples have no value in 'year'"),
        (lambda: split_by_column(table(year=[1.0, float("nan"), 2.0]), "year", 2), "1 of 3 samples have no value"),
        (lambda: split_dirichlet(GAPS, "year", 1.0, 2), "1 of 3 samples have no value in 'year'"),
        (lambda: split_by_column(STREAM, "year", 2, {1: 0, 2: 2}), "year=2 the group 2, but groups are 0 to 1"),
        (lambda: numbers(split_by_column(STREAM, "year", 2, lambda year: year)), "year=2 the group 2, but groups are"),
        (lambda: split_by_column(StreamDataset([]), "year", 2, {1: 0}), "StreamDataset has no `filter`"),
        (lambda: split_dirichlet(SPLIT, "year", 0, 2), "alpha must be a positive number, but got 0"),
        (lambda: split_dirichlet(SPLIT, "year", 1.0, 4), "In 100 draws with alpha=1.0 some of the 4 groups"),
        (lambda: split_dirichlet(SPLIT.to_iterable_dataset(), "year", 1.0, 2), "needs a dataset with a length"),
    ],
)
def test_wrong_use(split: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split()
