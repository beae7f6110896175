"""How often the thread that trains walks over a model, at the start of an averaging beside the steps and where its outcome is taken in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

from hf_fedshard import guard
from hf_fedshard.overlap import OverlappedAveraging
from hf_fedshard.shards import find_parameters, local_shards, reshard
from tests.harness.overlap_runs import OverlapRun, block_net, make_mesh
from tests.harness.pool import WorkerPool


NUM_STEPS = 12


def counted(settings: dict[str, Any]) -> dict[str, Any]:
    """Body: walks over the modules, and shards that were asked for, in each start and landing; parameters of each fragment."""
    run = OverlapRun(make_mesh(), sync_every=4, overlap_steps=1, **settings)
    seen: Counter[str] = Counter()
    found: dict[str, Any] = {"start": [], "land": []}
    named_modules, to_local = nn.Module.named_modules, DTensor.to_local

    def walks(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen["walks"] += module is run.model and not args  # not where it calls itself
        return named_modules(module, *args, **kwargs)

    def asks(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        seen["shards"] += 1
        return to_local(tensor, *args, **kwargs)

    def watched(name: str) -> Callable[..., Any]:
        original = getattr(OverlappedAveraging, name)

        def call(overlap: OverlappedAveraging, *args: Any) -> Any:
            fragment = args[0] if name == "start" else overlap._flights[0].fragment
            if name == "land":
                overlap._flights[0].future.result()  # the other thread counts too
            seen.clear()
            with mock.patch.object(nn.Module, "named_modules", walks), mock.patch.object(DTensor, "to_local", asks):
                result = original(overlap, *args)
            found[name].append((fragment, dict(seen)))
            return result

        return call

    with mock.patch.multiple(OverlappedAveraging, start=watched("start"), land=watched("land")):
        for step in range(NUM_STEPS):
            run.step(step % 11)
    found["sizes"] = [
        len(names) if names else len(list(run.model.parameters())) for names in run.rounds.overlap.fragments
    ]  # type: ignore[union-attr]
    run.release()
    return found


SETTINGS: list[dict[str, Any]] = [{}, {"num_fragments": 3}, {"num_fragments": 3, "outer_optimizer": "nesterov"}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_walk_serves_all(world4: WorkerPool, settings: dict[str, Any]) -> None:
    for found in world4.run(counted, settings):
        sizes = found["sizes"]
        assert sum(sizes) == 10
        assert len(found["start"]) == 3 * len(sizes) and len(found["land"]) >= 2 * len(sizes)
        for fragment, seen in found["start"]:
            # To reshard, for the parameters, and for the buffers, which are the last fragment's.
            last = fragment == len(sizes) - 1
            assert seen["walks"] <= 2 + 2 * last, "and one begins for the device of the anchors"
            assert seen["shards"] == sizes[fragment]
        for fragment, seen in found["land"]:
            assert "walks" not in seen
            assert seen["shards"] == sizes[fragment]


def test_parameters_are_found_behind_wrappers() -> None:
    """Of activation checkpointing, inside and around the whole model: there PyTorch leaves them out of names."""
    inside, around = block_net(), checkpoint_wrapper(block_net())
    inside.layers[1] = checkpoint_wrapper(inside.layers[1])  # type: ignore[index, operator]
    for model in (block_net(), inside, around):
        parameters = dict(model.named_parameters())
        found = find_parameters(model, dict(model.named_modules()), parameters)
        assert list(found) == list(parameters)
        assert all(found[name] is param for name, param in parameters.items())


def gathered() -> Any:
    """Body: shards as they are, and through the dispatcher of DTensor; they are the parameters' memory."""
    run = OverlapRun(make_mesh(), sync_every=4, overlap_steps=1)
    reshard(run.model)
    shards = local_shards(run.model)
    plain = {name: param.detach().to_local() for name, param in run.model.named_parameters()}  # type: ignore[attr-defined]
    same = all(
        shard.data_ptr() == plain[name].data_ptr()
        and shard.shape == plain[name].shape
        and not shard.requires_grad
        and not isinstance(shard, nn.Parameter)
        for name, shard in shards.items()
    )
    with torch.no_grad():
        shards["head.bias"].fill_(3.0)
    whole = run.model.head.bias.full_tensor()  # type: ignore[union-attr, operator]
    guard.detach(run.rounds)
    return same, list(shards) == list(plain), whole.unique().tolist()


def test_shards_are_the_parameters_memory(world4: WorkerPool) -> None:
    assert world4.run(gathered) == [(True, True, [3.0])] * 4


def left_gathered(num_fragments: int) -> dict[str, torch.Tensor]:
    """Body: a forward without backward, right ahead of each step's averaging, leaves the model gathered."""
    run = OverlapRun(make_mesh(), sync_every=3, overlap_steps=1, num_fragments=num_fragments)
    run.model.set_reshard_after_forward(False)  # type: ignore[operator]
    for step in range(8):
        loss = run.train(step)
        with torch.no_grad():
            run.model(run.batches[step]["inputs"].double())
        assert not isinstance(next(run.model.parameters()), DTensor)
        run.rounds.step(loss)
    return run.release()


@pytest.mark.parametrize("num_fragments", [1, 3])
def test_what_was_left_gathered(world4: WorkerPool, num_fragments: int) -> None:
    """Is read from and written to the shards all the same."""
    ranks = world4.run(left_gathered, num_fragments)
    expected = world4.run(resharded, num_fragments)
    for rank, other in zip(ranks, expected, strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in rank.items())


def resharded(num_fragments: int) -> dict[str, torch.Tensor]:
    run = OverlapRun(make_mesh(), sync_every=3, overlap_steps=1, num_fragments=num_fragments)
    for step in range(8):
        run.step(step)
    return run.release()
