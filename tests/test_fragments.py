"""How a model is divided into fragments, and when each has its turn."""

from __future__ import annotations

import pytest

from hf_fedshard.fragments import divide, starts, trained_sizes, unit_of
from tests.harness.models import add_lora, tiny_llama


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3"),
        ("base_model.model.model.layers.11.q_proj.lora_A.default.weight", "base_model.model.model.layers.11"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("model.norm.weight", "model.norm"),
        ("lm_head.weight", "lm_head"),
        ("weight", ""),
    ],
)
def test_units(name: str, unit: str) -> None:
    assert unit_of(name) == unit


def test_blocks_stay_whole_and_fragments_are_even() -> None:
    model = tiny_llama(num_layers=6)
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    fragments = divide(sizes, 3)
    assert sorted(name for names in fragments for name in names) == sorted(sizes)
    for number in range(6):
        owners = {
            index
            for index, names in enumerate(fragments)
            for name in names
            if name.startswith(f"model.layers.{number}.")
        }
        assert len(owners) == 1
    loads = [sum(sizes[name] for name in names) for names in fragments]
    assert max(loads) < 1.3 * sum(loads) / 3


def test_only_what_trains_counts() -> None:
    model = add_lora(tiny_llama(num_layers=4))
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    sizes = trained_sizes(model, trained)
    assert sum(sizes.values()) == sum(param.numel() for param in model.parameters() if param.requires_grad)
    for names in divide(sizes, 4):
        assert any(sizes[name] for name in names)


def test_what_is_unfrozen_later_lies_scattered() -> None:
    model = tiny_llama(num_layers=6)
    names = [name for name, _ in model.named_parameters()]
    trained = [name for name in names if name.startswith(("model.layers.4.", "model.layers.5.", "lm_head"))]
    sizes, whole = trained_sizes(model, trained), trained_sizes(model, names)
    fragments = divide(sizes, 2, whole)
    # What trains now lies as it would without the rest.
    alone = divide({name: sizes[name] for name in trained}, 2)
    assert [names & set(trained) for names in fragments] == alone
    for frozen in ({name for name in names if name not in trained}, set(names)):
        loads = [sum(whole[name] for name in fragment & frozen) for fragment in fragments]
        assert max(loads) < 1.5 * sum(loads) / 2, loads
    for number in range(4):
        assert sum(any(f"layers.{number}." in name for name in fragment) for fragment in fragments) == 1


def test_more_fragments_than_units() -> None:
    with pytest.raises(ValueError, match="num_fragments=6 is more than .* 5 units that train"):
        divide({name: param.numel() for name, param in tiny_llama().named_parameters()}, 6)


@pytest.mark.parametrize(
    ("period", "fragments", "places"),
    [(8, 1, [8]), (8, 2, [4, 8]), (8, 3, [2, 5, 8]), (5, 5, [1, 2, 3, 4, 5]), (100, 3, [33, 66, 100])],
)
def test_turns(period: int, fragments: int, places: list[int]) -> None:
    assert starts(period, fragments) == places
