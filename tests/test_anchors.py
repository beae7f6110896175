"""One set of anchors in all groups, also where their outer steps round differently."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from hf_fedshard import guard
from hf_fedshard.anchors import anchors_differ
from hf_fedshard.averaging import ModelAverager
from hf_fedshard.initial import checksum
from tests.harness.models import full_state
from tests.harness.outer_runs import GROUP_SIZE, NUM_RANKS, Run, double, make_mesh
from tests.harness.overlap_runs import NUM_STEPS, OverlapRun
from tests.harness.overlap_runs import make_mesh as make_overlap_mesh
from tests.harness.pool import WorkerPool


ERROR = 1e-9
CASES: dict[str, dict[str, Any]] = {
    "nesterov": {"outer_optimizer": "nesterov"},
    "AdamW": {"outer_optimizer": "AdamW", "outer_learning_rate": 0.1},
    "offloaded": {"outer_optimizer": "fedyogi", "offload_outer_state": True},
    # No outer optimizer, but every border adds differences to the anchors.
    "int8": {"wire_format": "int8"},
}


def round_differently(averager: ModelAverager, unlike: bool) -> list[dict[str, torch.Tensor]]:
    """
    Makes the hardware of group 1 unlike, by an error that is larger than that of rounding. The anchors of this rank ahead of
    each exchange are put into the list.
    """
    started: list[dict[str, torch.Tensor]] = []
    settle, exchange = averager.settle, averager.exchange

    def settling(held: Any, *args: Any, **kwargs: Any) -> Any:
        outcome = settle(held, *args, **kwargs)
        if unlike and averager.mesh.group_index == 1:
            for name in held.means:
                anchor = averager.outer.anchors[name].mul_(1 + ERROR)
                # Beside the steps the model is given the way that the anchor has gone, later.
                if name in held.shards:
                    held.shards[name].copy_(anchor)
        return outcome

    def exchanging(*args: Any, **kwargs: Any) -> Any:
        started.append({name: anchor.clone() for name, anchor in averager.outer.anchors.items()})
        return exchange(*args, **kwargs)

    averager.settle, averager.exchange = settling, exchanging  # type: ignore[method-assign]
    return started


def _runs() -> dict[str, Any]:
    mesh, found = make_mesh(), {}
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_fedshard.anchors").addHandler(handler)
    for name, settings in CASES.items():
        for unlike in (False, True):
            run = Run(mesh, double(), **settings)
            warnings.clear()
            started = round_differently(run.rounds.averager, unlike)
            metrics = [run.train(step) for step in (0, 1, 2, 3, 0, 1, 2, 3)]
            found[name, unlike] = {
                "started": started,
                "state": full_state(run.model),
                "sent": [each.bytes_sent for each in metrics if each is not None],
                "anchors": run.rounds.averager.tensors.plan("anchors", run.rounds.averager.outer.anchors).slow_bytes(),
                "warnings": list(warnings),
            }
            run.rounds.finish()
            guard.detach(run.rounds)
    logging.getLogger("hf_fedshard.anchors").removeHandler(handler)
    return found


@pytest.fixture(scope="module")
def runs(world8: WorkerPool) -> list[dict[str, Any]]:
    return world8.run(_runs, limit_seconds=240)


@pytest.mark.parametrize("case", CASES)
def test_all_groups_average_from_one_set_of_anchors(runs: list[dict[str, Any]], case: str) -> None:
    for rank, found in enumerate(runs):
        first = runs[rank % GROUP_SIZE][case, True]["started"]
        for number, anchors in enumerate(found[case, True]["started"]):
            for name, anchor in anchors.items():
                assert torch.equal(anchor, first[number][name]), (name, number)
        assert len(first) == 4


@pytest.mark.parametrize("case", ["nesterov", "AdamW", "offloaded"])
def test_an_error_does_not_grow(runs: list[dict[str, Any]], case: str) -> None:
    """The steps of four rounds end where they would on like hardware."""
    for found in runs:
        for name, tensor in found[case, True]["state"].items():
            torch.testing.assert_close(tensor, found[case, False]["state"][name], rtol=0, atol=100 * ERROR)


@pytest.mark.parametrize("case", CASES)
def test_only_what_differs_is_sent(runs: list[dict[str, Any]], case: str) -> None:
    """At the first border nothing has been stepped yet; a warning says it once."""
    more = sum(found[case, True]["anchors"] for found in runs[:GROUP_SIZE])
    alike, unlike = runs[0][case, False]["sent"], runs[0][case, True]["sent"]
    assert len(set(alike)) == 1 and more > 0
    assert unlike == [alike[0], *(alike[0] + more for _ in range(3))]
    told = [len(found[case, unlike]["warnings"]) for unlike in (False, True) for found in runs]
    assert told == [0] * NUM_RANKS + [1] + [0] * (NUM_RANKS - 1)
    assert "All have taken group 0's" in runs[0][case, True]["warnings"][0]


def _overlapped(settings: dict[str, Any], saves: bool = False) -> Any:
    """
    Body: the anchors ahead of each exchange, where full borders were made, and the anchors ahead of the last exchange of each that
    the loop asked for: one that saves after every round, as docs/overlap.md shows it.
    """
    run = OverlapRun(make_overlap_mesh(), sync_every=3, outer_optimizer="nesterov", **settings)
    started = round_differently(run.rounds.averager, unlike=True)
    borders, saved = [], []
    for step in range(NUM_STEPS):
        run.step(step)
        if saves and run.rounds.untouched and not run.rounds.at_border:
            run.rounds.close()
            saved.append(started[-1])
        borders += [step + 1] if run.rounds.at_border else []
    run.release()
    return started, borders, saved


@pytest.mark.parametrize("settings", [{"overlap_steps": 1}, {"overlap_steps": 1, "num_fragments": 2}])
def test_beside_the_steps_a_full_border_follows(world4: WorkerPool, settings: dict[str, Any]) -> None:
    """What is in flight reads the anchors, so they are made one at a border: that of the round after the difference is seen."""
    ranks = world4.run(_overlapped, settings)
    for rank, (started, borders, _) in enumerate(ranks):
        assert borders == ranks[0][1] and borders, "without a difference there is none"
        first, last = ranks[rank % 2][0][-1], started[-1]
        assert all(torch.equal(anchor, first[name]) for name, anchor in last.items())


def test_a_border_after_each_round_makes_them_one(world4: WorkerPool) -> None:
    """What was in flight there is the model, but was formed with the difference in the anchors."""
    ranks = world4.run(_overlapped, {"overlap_steps": 2}, True)
    for rank, (started, borders, saved) in enumerate(ranks):
        assert borders == [3, 6, 9] and len(saved) == 3
        # The first one ends with what was in flight: no outcome has told of a difference yet.
        assert len(started) == 3 + 2 + 1
        for anchors, first in zip(saved, ranks[rank % 2][2], strict=True):
            assert all(torch.equal(anchor, first[name]) for name, anchor in anchors.items())


def test_one_bit_of_a_checksum_tells() -> None:
    """Also of the upper half of a word of 8 bytes, and where two errors cancel in the sum."""
    anchors = {"a": torch.randn(1000), "b": torch.randn(7, 3)}

    def told() -> float:
        return float(checksum(anchors, torch.device("cpu"))[1].remainder(2**32 - 5).double())

    before = told()
    assert 0 <= before < 2**32 and before == int(before)
    for index in (0, 1, 998, 999):
        words = anchors["a"].view(torch.int32)
        words[index] += 1
        assert told() != before
        words[(index + 2) % 1000] -= 1
        assert told() != before
        words[index] -= 1
        words[(index + 2) % 1000] += 1
        assert told() == before


def test_rows_without_anchors_do_not_differ() -> None:
    assert not anchors_differ({"steps": [1.0, 2.0]})
    assert not anchors_differ({"anchors": [7.0, 7.0, 7.0]})
    assert anchors_differ({"anchors": [7.0, 7.0, 8.0]})
