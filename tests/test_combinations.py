"""The matrix of what users combine: each cell against its groups as stock launches that exchange weights through files."""

from __future__ import annotations

import importlib.util
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.combinations.cell import NUM_GROUPS, Cell
from tests.combinations.cells import CELLS
from tests.combinations.runs import federated, group_alone, launch_of, samples_of_group, single, unfederated
from tests.combinations.table import DOCUMENT, OTHER_TESTS, document_with_tables
from tests.harness.pool import WorkerPool


LIMIT = 200.0


def _cases() -> list[Any]:
    cases = []
    for cell in CELLS.values():
        for number, size in enumerate(cell.sizes):
            algorithm = ("FL+FSDP", "FL+HSDP")[number]
            marks = () if cell.fast and number == 0 else (pytest.mark.slow,)
            cases.append(pytest.param(cell, size, id=f"{cell.name}-{algorithm}", marks=marks))
    return cases


@pytest.mark.parametrize(("cell", "size"), _cases())
def test_combination(cell: Cell, size: int, worlds: dict[int, list[WorkerPool]], tmp_path: Path) -> None:
    for package in cell.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    world = pool_of(worlds, size)
    options: dict[str, Any] = {"init_group": False, "limit_seconds": LIMIT}
    env = launch_of(cell, size, NUM_GROUPS)
    if cell.error is not None:
        refused(world.run_failing(federated, cell.name, str(tmp_path), env=env, **options), cell.error)
        if cell.stock_error is not None:
            refused(world.run_failing(unfederated, cell.name, str(tmp_path), env=env, **options), cell.stock_error)
        return
    ranks = world.run(federated, cell.name, str(tmp_path / "run"), env=env, **options)
    stays_in_its_group(ranks)
    groups = alone(cell, size, ranks, worlds, tmp_path)
    same_models(cell, ranks, groups)
    if cell.after is not None:
        (expected,) = pool_of(worlds, 1).run(single, cell.name, str(tmp_path / "single"), ranks[0]["state"], **options)
        same_numbers(ranks, expected)


def same_numbers(ranks: list[dict[str, Any]], single: dict[str, Any]) -> None:
    for rank in ranks:
        assert rank["after"].keys() == single.keys()
        for name, value in single.items():
            assert np.allclose(rank["after"][name], value, rtol=1e-4, atol=1e-6), name


def refused(errors: list[Any], message: str) -> None:
    for error in errors:
        assert message in error.message, f"{error.type_name}: {error.message}\n{error.traceback}"


def pool_of(worlds: dict[int, list[WorkerPool]], size: int, number: int = 0) -> WorkerPool:
    pools = worlds.setdefault(size, [])
    while len(pools) <= number:
        pools.append(WorkerPool(size))
    return pools[number]


def stays_in_its_group(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        assert not rank["leaks"], f"rank {number}\n" + "\n".join(rank["leaks"][:3])
        assert rank["inside"] > 10  # FSDP's own: the record is not empty
        assert rank["rounds"] == ranks[0]["rounds"]


def alone(
    cell: Cell, size: int, ranks: list[dict[str, Any]], worlds: dict[int, list[WorkerPool]], folder: Path
) -> list[list[dict[str, Any]]]:
    """Each group as a launch of its own, both at once."""
    exchange = folder / "exchange"
    exchange.mkdir()
    group_size = size // NUM_GROUPS
    num_copies = math.prod(cell.inner.get(axis, 1) for axis in ("tp", "cp"))
    env = launch_of(cell, group_size, 1)
    pools = [pool_of(worlds, group_size, number) for number in range(NUM_GROUPS)]
    for pool in pools:
        pool.run(int)  # starts it, which changes the environment of this process for a moment

    def run(group: int) -> list[dict[str, Any]]:
        samples = samples_of_group(ranks, group, num_copies)
        return pools[group].run(
            group_alone,
            cell.name,
            str(folder / "alone"),
            str(exchange),
            group,
            samples,
            env=env,
            init_group=False,
            limit_seconds=LIMIT,
        )

    with ThreadPoolExecutor(NUM_GROUPS) as threads:
        return list(threads.map(run, range(NUM_GROUPS)))


def same_models(cell: Cell, ranks: list[dict[str, Any]], groups: list[list[dict[str, Any]]]) -> None:
    reference = groups[0][0]
    assert reference["drift"] > 0, "the groups must differ, or no averaging is shown"
    expected = [*reference["borders"], reference["state"]]
    for rank in ranks:
        found = [*rank["borders"], rank["state"]]
        assert len(found) == len(expected) > 1
        for state, first in zip(found, [*ranks[0]["borders"], ranks[0]["state"]], strict=True):
            assert all(torch.equal(value, first[name]) for name, value in state.items()), "ranks differ at a border"
    worst = 0.0
    for state, right in zip([*ranks[0]["borders"], ranks[0]["state"]], expected, strict=True):
        assert state.keys() == right.keys()
        for name, value in state.items():
            assert value.dtype == right[name].dtype
            worst = max(worst, float((value.double() - right[name].double()).abs().max()))
    moved = max(float((expected[-1][name] - value).abs().max()) for name, value in expected[0].items())
    print(f"{cell.name}: largest difference {worst:.1e}, moved {moved:.1e} in the later rounds")
    assert worst <= cell.tolerance
    assert moved > 1e-3
    assert moved > 30 * cell.tolerance
    for rank in ranks:
        assert rank["result"] == reference["result"]


def test_tables_of_the_docs(root: Path) -> None:
    """`python -m tests.combinations.table` writes them."""
    assert DOCUMENT.read_text() == document_with_tables()
    for test in OTHER_TESTS.values():
        file, _, name = test.partition("::")
        assert f"def {name}" in (root / "tests" / file).read_text()
