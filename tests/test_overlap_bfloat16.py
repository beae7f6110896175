"""Models in bfloat16: movements smaller than a step of that dtype in fragments, and what a checkpoint holds of an anchor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_fedshard.outer_checkpoint import take_outer_state
from tests.harness.overlap_runs import OverlapRun, block_net, make_mesh, nesterov
from tests.harness.pool import WorkerPool


ULP = 2.0**-7
"""A step of bfloat16 between 1 and 2."""
PERIOD = NUM_FRAGMENTS = 4
NUM_STEPS = 12
WHERE = ("end", "after", "instead")
"""Where full borders are made: at the end alone; after the last exchange of each round; in its place, as Trainer's log does."""


def ones() -> nn.Module:
    model = block_net(torch.bfloat16)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    return model


def walked(where: str) -> dict[str, Any]:
    """Body: group 1 moves all parameters by one step of their dtype in each step, group 0 by none: their average by half of one."""
    run = OverlapRun(
        make_mesh(),
        model=ones(),
        sync_every=PERIOD,
        overlap_steps=1,
        num_fragments=NUM_FRAGMENTS,
        outer_optimizer="nesterov",
    )
    overlap, outer = run.rounds.overlap, run.rounds.averager.outer
    assert overlap is not None
    numbers = {name: number for number, names in enumerate(overlap.fragments) for name in names or ()}
    kept = 0
    for step in range(NUM_STEPS):
        with torch.no_grad():
            for param in run.model.parameters():
                param.to_local().add_(ULP * run.mesh.group_index)  # type: ignore[attr-defined]
        overlap.wants_border = where == "instead" and step % PERIOD == PERIOD - 1
        run.rounds.step()
        if where == "after" and step % PERIOD == PERIOD - 1:
            run.rounds.close()
        if run.rounds.at_border:
            kept += sum(rest.numel() * rest.element_size() for rest in outer.apart.remainders.values())
    run.release()
    anchors: dict[int, set[float]] = {}
    for name, anchor in outer.anchors.items():
        anchors.setdefault(numbers[name], set()).update(anchor.unique().tolist())
    return {"anchors": anchors, "kept": kept, "dtypes": {rest.dtype for rest in outer.apart.remainders.values()}}


def rounded(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).bfloat16())


def refer(fragment: int, where: str, keeps_rest: bool = True) -> float:
    """The anchor of a parameter of one fragment in the end, in double precision; the groups' models are in bfloat16."""
    models, rest, had_turn = [1.0, 1.0], 0.0, False
    anchor = torch.ones((), dtype=torch.float64)
    optimizer = nesterov([anchor])
    flight: list[float] | None = None

    def outer_step(states: list[float]) -> float:
        nonlocal rest
        anchor.grad = torch.tensor(rounded(float(anchor)) - sum(states) / 2 - rest, dtype=torch.float64)
        optimizer.step()
        rest = 0.0
        return float(anchor)

    def land() -> None:
        nonlocal flight
        if flight is not None:
            new = outer_step(flight)
            models[:] = [rounded(model + new - snapshot) for model, snapshot in zip(models, flight, strict=True)]
        flight = None

    for step in range(1, NUM_STEPS + 1):
        models[1] += ULP
        land()  # it was started in the step before
        ends_round = step % PERIOD == 0
        instead = ends_round and where == "instead"
        if (step - 1) % PERIOD == fragment and not instead:
            flight, had_turn = list(models), True
        if ends_round and where != "end" or step == NUM_STEPS:
            land()
            if instead and not had_turn:
                models[:] = [rounded(outer_step(models))] * 2
            else:
                total = sum(models) / 2 + rest
                models[:] = [rounded(total)] * 2
                rest = total - models[0] if keeps_rest else 0.0
        had_turn = had_turn and not ends_round
    return float(anchor)


@pytest.mark.parametrize("where", WHERE)
def test_borders_lose_no_movement(world4: WorkerPool, where: str) -> None:
    expected = [refer(fragment, where) for fragment in range(NUM_FRAGMENTS)]
    without = [refer(fragment, where, keeps_rest=False) for fragment in range(NUM_FRAGMENTS)]
    lost = max(abs(one - other) for one, other in zip(expected, without, strict=True))
    assert (lost > ULP) == (where != "end"), "it must show"
    for rank in world4.run(walked, where):
        errors = []
        for fragment, values in rank["anchors"].items():
            assert len(values) == 1, "all elements of a fragment have moved alike"
            errors.append(abs(values.pop() - expected[fragment]))
        print(f"{where}: {max(errors):.1e} from the reference, {lost:.1e} would have been lost")
        assert len(errors) == NUM_FRAGMENTS
        # Kept to 8 bits of its own: 2^-9 of half a step, at each of three borders, and what the momentum makes of it.
        assert max(errors) < 10 * 3 * 2**-9 * ULP / 2
        assert (rank["kept"] > 0) == (where != "end") and rank["dtypes"] <= {torch.bfloat16}


def pulled_and_resumed() -> tuple[bool, bool, int]:
    """
    Body: FedProx from a border whose averaging was in flight, twice: going on, and from what a checkpoint holds of it. Whether the
    anchor is the model there, whether both runs end alike, and how many tensors of the outer loop such a checkpoint has.
    """
    run = OverlapRun(
        make_mesh(),
        torch.bfloat16,
        lambda parameters: torch.optim.SGD(parameters, lr=0.3),
        sync_every=3,
        overlap_steps=2,
        proximal_mu=2.0,
    )
    averager = run.rounds.averager
    for step in range(3):
        run.step(step)
    run.rounds.close()
    assert run.rounds.at_border
    place = run.rounds.state_dict()
    shards = averager.trained.averaged_shards()
    kept = {name: shard.clone() for name, shard in shards.items()}
    is_model = all(torch.equal(averager.outer.anchors[name], shard.float()) for name, shard in shards.items())
    ends = []
    for _ in range(2):
        for step in range(3, 8):
            run.step(step)
        ends.append({name: shard.clone() for name, shard in averager.trained.averaged_shards().items()})
        with torch.no_grad():
            for name, shard in averager.trained.averaged_shards().items():
                shard.copy_(kept[name])
        run.rounds.restore(place)
    stored = len(take_outer_state(averager).tensors)
    run.release()
    return is_model, all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items()), stored


def test_resumed_where_an_averaging_was_in_flight_is_uninterrupted(world4: WorkerPool) -> None:
    assert world4.run(pulled_and_resumed) == [(True, True, 0)] * 4
