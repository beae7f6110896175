"""The single-process reference, its data and its models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.harness.data import (
    BatchRecorder,
    ListDataset,
    StreamDataset,
    batches_by_step,
    collate,
    feature_samples,
    hf_stream,
    token_samples,
)
from tests.harness.models import add_lora, shard_layers, tiny_batchnorm, tiny_llama
from tests.harness.pool import WorkerPool
from tests.harness.reference import causal_lm_loss, num_label_tokens, train_reference


def test_streams_hold_the_same_samples() -> None:
    samples = token_samples(6)
    assert list(StreamDataset(samples)) == list(ListDataset(samples)) == list(hf_stream(samples, num_shards=2))
    counts = [num_label_tokens(collate([sample])) for sample in samples]
    assert len(set(counts)) > 2
    assert min(counts) >= 1


def test_models() -> None:
    tied, untied = tiny_llama(tied=True), tiny_llama()
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    assert torch.equal(tiny_llama().lm_head.weight, untied.lm_head.weight)
    lora = add_lora(tiny_llama())
    assert 0 < sum(p.requires_grad for p in lora.parameters()) < len(list(lora.parameters()))
    assert tiny_batchnorm()(**collate(feature_samples(4)))["loss"].isfinite()


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def _draws(num_steps: int, num_ranks: int = 2) -> list[list[dict[str, torch.Tensor]]]:
    samples = token_samples(num_ranks * num_steps, seed=3)
    return [[collate([samples[rank * num_steps + step]]) for step in range(num_steps)] for rank in range(num_ranks)]


def test_reference_with_one_group_is_plain_training() -> None:
    recorded = _draws(4)
    result = train_reference(tiny_llama, batches_by_step(recorded, 1), 3, _adamw, max_grad_norm=0.5)
    model = tiny_llama()
    optimizer = _adamw(model.parameters())
    for first, second in zip(*recorded, strict=True):
        batch = {key: torch.cat([first[key], second[key]]) for key in first}
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert result.borders == [3, 4]
    assert max(map(max, result.grad_norms)) > 0.5
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(result.state[name], tensor, rtol=1e-4, atol=1e-5)


def test_reference_averages_at_borders() -> None:
    recorded = _draws(5)
    result = train_reference(tiny_llama, batches_by_step(recorded, 2), 2, _adamw, learning_rate=lambda step: 1e-3)
    assert result.borders == [2, 4, 5]
    assert [len(losses) for losses in result.losses] == [2] * 5
    alone = [
        train_reference(tiny_llama, batches_by_step([draws[:2]], 1), 2, _adamw, learning_rate=lambda step: 1e-3).state
        for draws in recorded
    ]
    for name, tensor in result.border_states[0].items():
        torch.testing.assert_close(tensor, (alone[0][name] + alone[1][name]) / 2, rtol=0, atol=1e-7)
    for name, tensor in result.models[1].state_dict().items():
        assert torch.equal(tensor, result.state[name])


def test_reference_weights_and_outer() -> None:
    batches = batches_by_step(_draws(2), 2)
    only_first = train_reference(tiny_llama, batches, 2, _adamw, weights=lambda number, items: [1.0, 0.0]).state
    alone = train_reference(tiny_llama, [[step[0]] for step in batches], 2, _adamw).state
    for name, tensor in alone.items():
        assert torch.equal(tensor, only_first[name])
    stay = train_reference(tiny_llama, batches, 2, _adamw, outer=lambda previous, average, number: previous).state
    for name, tensor in tiny_llama().state_dict().items():
        assert torch.equal(tensor, stay[name])


def test_reference_buffers_belong_to_ranks() -> None:
    samples = feature_samples(16)
    recorded = [[collate(samples[4 * rank : 4 * rank + 4])] for rank in range(4)]

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor], num_items: int) -> torch.Tensor:
        return model(**batch)["loss"] / num_items

    result = train_reference(tiny_batchnorm, batches_by_step(recorded, 2), 1, _adamw, loss=loss, count=lambda batch: 1)
    means = []
    for batches in recorded:
        model = tiny_batchnorm()
        model(**batches[0])
        means.append(model.blocks[0].norm.running_mean)
    torch.testing.assert_close(result.state["blocks.0.norm.running_mean"], torch.stack(means).mean(0))


def _train_sharded(accumulation: int) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]], list[float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fed", "shard"))
    model = tiny_llama(dtype=torch.float64)
    recorder = BatchRecorder(model)
    shard_layers(model, mesh["shard"])
    optimizer = _adamw(model.parameters())
    draws, norms = _draws(4, 4)[dist.get_rank()], []
    for at in range(0, 4, accumulation):
        window = draws[at : at + accumulation]
        count = torch.tensor(sum(num_label_tokens(batch) for batch in window))
        dist.all_reduce(count, group=mesh["shard"].get_group())
        for batch in window:
            # FSDP2 takes the mean of the gradients over the ranks.
            (causal_lm_loss(model, batch, int(count)) * 2).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    for parameter in model.parameters():
        shard = parameter.detach().to_local()
        dist.all_reduce(shard, group=mesh["fed"].get_group())
        shard /= 2
    state = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    # The loss above feeds the model without labels; the reference needs them.
    batches = [dict(kept, labels=batch["labels"]) for kept, batch in zip(recorder.batches, draws, strict=True)]
    return state, batches, norms


@pytest.mark.parametrize("accumulation", [1, 2])
def test_reference_is_what_sharded_groups_compute(world4: WorkerPool, accumulation: int) -> None:
    ranks = world4.run(_train_sharded, accumulation)
    batches = batches_by_step([recorded for _, recorded, _ in ranks], 2, accumulation)
    result = train_reference(lambda: tiny_llama(dtype=torch.float64), batches, 99, _adamw, max_grad_norm=0.5)
    for rank, (state, _, norms) in enumerate(ranks):
        assert norms == pytest.approx([step[rank // 2] for step in result.grad_norms], rel=1e-6)
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, result.state[name], rtol=0, atol=1e-9, msg=name)
