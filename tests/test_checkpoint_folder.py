"""Where checkpoints lie, without processes: what is found damaged, what is deleted, what a kill leaves."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_fedshard.checkpoint_choice import list_checkpoints
from hf_fedshard.checkpoint_folder import clean_up, rotate
from hf_fedshard.manifest import MANIFEST_NAME, find_damage, write_manifest
from hf_fedshard.reshape import nearest_group
from hf_fedshard.state_values import decode, encode


def make(folder: Path, age: int = 0) -> Path:
    """A folder that looks like a checkpoint."""
    (folder / "federation" / "model").mkdir(parents=True)
    (folder / "federation" / "model" / "__0_0.distcp").write_bytes(bytes(range(200)))
    (folder / "trainer_state.json").write_text('{"global_step": 4}')
    write_manifest(folder, {})
    stamp = 1_700_000_000 - 100 * age
    os.utime(folder / MANIFEST_NAME, (stamp, stamp))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


DATA = "federation/model/__0_0.distcp"


def test_whole(tmp_path: Path) -> None:
    folder = make(tmp_path / "checkpoint-4")
    assert find_damage(folder) == []
    (folder / "README.md").write_text("a card, added later")
    assert find_damage(folder) == []


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("name", [DATA, "trainer_state.json", MANIFEST_NAME])
@pytest.mark.parametrize("harm", [truncate, change, Path.unlink])
def test_damage_is_named(tmp_path: Path, name: str, harm: object) -> None:
    folder = make(tmp_path / "checkpoint-4")
    harm(folder / name)  # type: ignore[operator]
    assert any(name in line for line in find_damage(folder))
    if harm is not change:
        assert find_damage(folder, 0, 0), "seen without reading contents"


def test_foreign_file_is_named(tmp_path: Path) -> None:
    folder = make(tmp_path / "checkpoint-4")
    (folder / "federation" / "model" / "__9_0.distcp").touch()
    assert find_damage(folder) == ["federation/model/__9_0.distcp does not belong to the checkpoint"]


def test_ranks_share_the_reading(tmp_path: Path) -> None:
    folder = make(tmp_path / "checkpoint-4")
    change(folder / DATA)
    assert sum(bool(find_damage(folder, part, 5)) for part in range(5)) == 1


def test_rotation_counts_whole_ones(tmp_path: Path) -> None:
    for age, step in enumerate([8, 6, 4, 2]):
        make(tmp_path / f"checkpoint-{step}", age)
    (tmp_path / "checkpoint-6" / "trainer_state.json").unlink()
    rotate(tmp_path, 2, [tmp_path / "checkpoint-8"])
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]


def test_rotation_goes_by_time_and_spares_the_best(tmp_path: Path) -> None:
    # 100 is of an earlier run in the same folder.
    for age, step in [(0, 8), (1, 4), (2, 2), (3, 100)]:
        make(tmp_path / f"checkpoint-{step}", age)
    rotate(tmp_path, 2, [tmp_path / "checkpoint-8", tmp_path / "checkpoint-2"])
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-8"]
    rotate(tmp_path, 1, [tmp_path / "checkpoint-8", tmp_path / "checkpoint-2"])
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-8"]
    rotate(tmp_path, 1, [tmp_path / "checkpoint-8"])
    assert names(tmp_path) == ["checkpoint-8"]
    for limit in (None, 0, 1):
        rotate(tmp_path, limit, [tmp_path / "checkpoint-8"])
    assert names(tmp_path) == ["checkpoint-8"]


def test_clean_up(tmp_path: Path) -> None:
    make(tmp_path / ".saving-checkpoint-8" / "checkpoint-8")  # killed before the rename
    make(tmp_path / ".removing-checkpoint-8")
    make(tmp_path / ".removing-checkpoint-2")  # killed during rotation
    make(tmp_path / "checkpoint-4")
    half = make(tmp_path / ".saving-checkpoint-6" / "checkpoint-6")
    (half / MANIFEST_NAME).unlink()
    broken = make(tmp_path / ".saving-checkpoint-10" / "checkpoint-10")
    truncate(broken / DATA)
    clean_up(tmp_path)
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-8"]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-8", "checkpoint-4"]
    clean_up(tmp_path / "not there")


def test_nearest_group() -> None:
    def nearest(num_groups: int, stored: int) -> list[int]:
        return [nearest_group(index, num_groups, stored) for index in range(num_groups)]

    assert nearest(4, 2) == [0, 0, 1, 1]
    assert nearest(2, 4) == [1, 3]
    assert nearest(3, 3) == [0, 1, 2]
    assert nearest(1, 4) == [2]
    assert nearest(4, 1) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 3, 3]),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)],
            milestones=[2],
        ),
    ],
)
def test_schedules_survive_json(make_scheduler: object) -> None:
    def run(optimizer: torch.optim.Optimizer, scheduler: object, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([1.0] if plateau else []))  # type: ignore[attr-defined]
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    first, second = (torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1) for _ in range(2))
    one, other = make_scheduler(first), make_scheduler(second)  # type: ignore[operator]
    run(first, one, 3)
    text = json.dumps(encode({"s": one.state_dict(), "o": first.state_dict()["param_groups"]}, "schedule"))
    state = decode(json.loads(text))
    assert str(state["s"]) == str(one.state_dict())
    other.load_state_dict(state["s"])
    second.load_state_dict({"state": {}, "param_groups": state["o"]})
    assert run(first, one, 5) == run(second, other, 5)


def test_what_json_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"schedule\['fn'\]\[0\] is a .*Linear"):
        encode({"fn": [nn.Linear(1, 1)]}, "schedule")
