"""A checkpoint that each group saved alone: when it is whole, what it is refused for, and what is made of it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_fedshard import CheckpointError, export_checkpoint, group_checkpoint
from hf_fedshard.checkpoint_choice import list_checkpoints
from hf_fedshard.checkpoint_folder import SAVING, clean_up, put_in_place, rotate
from hf_fedshard.checkpoint_layout import DESCRIPTION_NAME, FORMAT, read_description
from hf_fedshard.config import FederationConfig
from hf_fedshard.layout import FederationLayout
from hf_fedshard.manifest import MANIFEST_NAME, find_damage, write_json
from hf_fedshard.parts import all_there, check_same_run, complete, describe_course, refuse
from tests.harness.checkpoint_runs import differences
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.pool import WorkerPool
from tests.harness.preemption_runs import train


LIMIT = 60.0
ENDING = (0, 7, {2: 6, 3: 6})


def run(pool: WorkerPool, folder: Path, **options: Any) -> list[dict[str, Any]]:
    env = fsdp_launch_env(2, 2)
    return pool.run(train, str(folder), env=env, init_group=False, limit_seconds=LIMIT, **{"sync_every": 4, **options})


def fail(pool: WorkerPool, folder: Path, resume: Any = True, **options: Any) -> str:
    errors = pool.run_failing(
        train,
        str(folder),
        resume,
        env=fsdp_launch_env(2, 2),
        init_group=False,
        limit_seconds=LIMIT,
        **{"sync_every": 4, **options},
    )
    assert {error.type_name for error in errors} == {"CheckpointError"}
    assert len({error.message for error in errors}) == 1
    return errors[0].message


@pytest.fixture(scope="module")
def ended(world4: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run that was ended in its second round; its checkpoints are those of steps 4 and, in parts, 5."""
    folder = tmp_path_factory.mktemp("ended")
    return folder, run(world4, folder, ending=ENDING, grace_seconds=0.01)


@pytest.fixture
def copy(ended: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of that run to be harmed."""
    return Path(shutil.copytree(ended[0], tmp_path / "copy"))


def test_what_is_on_disk(ended: tuple[Path, Any]) -> None:
    checkpoint = ended[0] / "checkpoint-5"
    assert find_damage(checkpoint) == []
    assert {path.name for path in checkpoint.iterdir()} == {"federation", "group_00000", "group_00001"}
    for group, ranks in enumerate(((0, 1), (2, 3))):
        part = checkpoint / f"group_0000{group}"
        assert find_damage(part) == []
        assert {path.name for path in part.iterdir()} == {
            "config.json",
            "federation",
            "generation_config.json",
            "trainer_state.json",
            *(f"rng_state_{rank}.pth" for rank in ranks),
        }
        assert len(list((part / "federation/model").glob("*.distcp"))) == 2, "both ranks of the group have written"


def back_to_staging(folder: Path) -> Path:
    """As if the processes had been killed before the checkpoint got its name."""
    aside = folder / f"{SAVING}checkpoint-5"
    aside.mkdir()
    (folder / "checkpoint-5").rename(aside / "checkpoint-5")
    for name in (DESCRIPTION_NAME, MANIFEST_NAME):
        (aside / "checkpoint-5" / name).unlink()
    return aside / "checkpoint-5"


@pytest.mark.parametrize("claimed", [False, True])
def test_killed_before_the_rename(copy: Path, claimed: bool) -> None:
    aside = back_to_staging(copy)
    if claimed:
        (aside.parent / "claimed").mkdir()
    clean_up(copy)
    assert [path.name for path in list_checkpoints(copy)] == ["checkpoint-5", "checkpoint-4"]
    assert find_damage(copy / "checkpoint-5") == [] and not list(copy.glob(".*"))


@pytest.mark.parametrize("when", ["the look", "the claim", "the clearing"])
def test_another_group_finishes_meanwhile(copy: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """It has found all parts too, and is ahead by so much."""
    aside, final = back_to_staging(copy), copy / "checkpoint-5"

    def finish() -> None:
        assert complete(aside)
        put_in_place(aside, final)
        if when != "the clearing":
            shutil.rmtree(aside.parent)

    def look(folder: Path) -> bool:
        if when == "the look":
            finish()
            read_description(folder / "group_00000")
        assert all_there(folder)
        finish()
        return True

    monkeypatch.setattr(group_checkpoint, "all_there", look)
    group_checkpoint._finish(aside.parent, final)
    assert find_damage(final) == [] and not list(copy.glob(".*"))


def test_a_part_that_cannot_be_looked_at_is_an_error(copy: Path) -> None:
    aside = back_to_staging(copy)
    (aside / "group_00000" / DESCRIPTION_NAME).unlink()
    with pytest.raises(CheckpointError):
        group_checkpoint._finish(aside.parent, copy / "checkpoint-5")


@pytest.mark.parametrize("harm", ["missing", "unnamed", "damaged"])
def test_without_the_part_of_a_group_it_is_never_used(
    world4: WorkerPool, ended: tuple[Path, Any], copy: Path, harm: str
) -> None:
    part = back_to_staging(copy) / "group_00001"
    if harm == "missing":
        shutil.rmtree(part)
    elif harm == "unnamed":
        part.rename(part.with_name(".writing-group_00001"))
    else:
        (part / "trainer_state.json").write_text("{}")
    clean_up(copy)
    assert [path.name for path in list_checkpoints(copy)] == ["checkpoint-4"] and not list(copy.glob(".*"))


def test_damage_is_named(world4: WorkerPool, copy: Path) -> None:
    file = "group_00001/federation/progress/00002.json"
    (copy / "checkpoint-5" / file).unlink()
    message = fail(world4, copy)
    assert file in message and f"resume_from_checkpoint='{copy}/checkpoint-4'" in message


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one group": ({"num_groups": 1}, "same federation.*1 groups x 2 replicas.*hf_fedshard.export"),
    "another period": ({"sync_every": 8}, "sync_every=4, this is 8"),
    # Those would be synchronous at some groups' steps only, and wait for the others.
    "synchronous at the start": ({"sync_steps_at_start": 6}, "sync_steps_at_start=0, this is 6"),
    "synchronous at the end": ({"sync_steps_at_end": 4}, "sync_steps_at_end=0, this is 4"),
    "a part": ({"resume": "checkpoint-5/group_00001"}, "is the part of one group"),
    "fewer steps": ({"max_steps": 7}, "stands at step 7, 3 steps into a round, and the run ends at step 7"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_run_is_refused_by_name(world4: WorkerPool, ended: tuple[Path, Any], case: str) -> None:
    options, text = REFUSED[case]
    resume = options.get("resume", "checkpoint-5")
    message = fail(world4, ended[0], **{**options, "resume": str(ended[0] / resume)})
    assert re.search(text, message, re.DOTALL)


def test_another_length_with_synchronous_steps_at_the_end(world4: WorkerPool, tmp_path: Path) -> None:
    run(world4, tmp_path, ending=ENDING, grace_seconds=0.01, sync_steps_at_end=2)
    message = fail(world4, tmp_path, sync_steps_at_end=2, max_steps=9)
    assert "max_steps=10, this is 9" in message


AUTO = {"sync_every": "auto", "max_sync_share": 0.1, "min_sync_every": 2, "max_sync_every": 64}


@pytest.mark.parametrize(
    ("settings", "changed", "text"),
    [
        (AUTO, {}, None),
        (AUTO, {"max_sync_share": 0.2}, "max_sync_share=0.1, this is 0.2"),
        (AUTO, {"min_sync_every": 3}, "min_sync_every=2, this is 3"),
        (AUTO, {"max_sync_every": 32}, "max_sync_every=64, this is 32"),
        # With "drift" all groups are in a period that they have agreed on, and bound it alike; a fixed one has no bounds.
        ({"sync_every": "drift", "max_drift": 0.1}, {"max_sync_every": 32}, None),
        ({"sync_every": 8}, {"max_sync_every": 32, "max_sync_share": 0.2}, None),
    ],
)
def test_bounds_of_a_measured_period_are_refused_where_they_changed_inside_a_round(
    tmp_path: Path, settings: dict[str, Any], changed: dict[str, Any], text: str | None
) -> None:
    """Each rank would choose again from what it has measured itself, and the groups would end the round at other steps."""
    layout = FederationLayout(2, 1, {"dp_shard": 2})
    course = describe_course(FederationConfig(2, **settings), max_steps=10)
    shape = {"num_groups": 2, "replicate_size": 1, "inner": layout.inner}
    write_json(tmp_path / DESCRIPTION_NAME, {"format": FORMAT, "global_step": 5, **shape, **course})
    config = FederationConfig(2, **{**settings, **changed})
    if text is None:
        check_same_run(tmp_path, layout, config)
        return
    with pytest.raises(CheckpointError, match=text):
        check_same_run(tmp_path, layout, config)


def test_rotation_counts_it(copy: Path) -> None:
    rotate(copy, 1, [])
    assert [path.name for path in list_checkpoints(copy)] == ["checkpoint-5"]


def test_export_is_the_average_of_the_groups(ended: tuple[Path, Any], tmp_path: Path) -> None:
    folder, ranks = ended
    out = export_checkpoint(folder / "checkpoint-5", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out)
    for name, value in model.state_dict().items():
        mean = (ranks[0]["model"][name] + ranks[2]["model"][name]) / 2
        torch.testing.assert_close(value, mean, rtol=0, atol=0)
    assert differences(ranks[0]["model"], ranks[2]["model"]), "the groups must differ"


def test_export_takes_a_groups_own_layers(world4: WorkerPool, tmp_path: Path) -> None:
    settings = {"outer_optimizer": "nesterov", "local_parameters": "lm_head.weight"}
    ranks = run(world4, tmp_path, ending=ENDING, grace_seconds=0.01, kind="small", **settings)
    checkpoint = tmp_path / "checkpoint-5"
    for group in range(2):
        out = export_checkpoint(checkpoint, tmp_path / f"out{group}", group=group)
        for name, value in AutoModelForCausalLM.from_pretrained(out).state_dict().items():
            both = [ranks[0]["model"][name], ranks[2]["model"][name]]
            expected = both[group] if name == "lm_head.weight" else (both[0] + both[1]) / 2
            assert torch.equal(value, expected), name
    assert not torch.equal(ranks[0]["model"]["lm_head.weight"], ranks[2]["model"]["lm_head.weight"])
    with pytest.raises(ValueError, match="group=2 cannot be exported"):
        export_checkpoint(checkpoint, tmp_path / "out2", group=2)
    for other, text in (
        ({**settings, "outer_optimizer": "fedadam"}, "outer optimizer is nesterov, this run's fedadam"),
        ({"local_parameters": "lm_head.weight"}, "outer optimizer is nesterov, this run's fedavg as plain averaging"),
    ):
        assert text in fail(world4, tmp_path, kind="small", **other)


def test_export_of_adapters_is_refused(world4: WorkerPool, tmp_path: Path) -> None:
    run(world4, tmp_path, ending=ENDING, grace_seconds=0.01, kind="lora")
    with pytest.raises(CheckpointError, match="other adapters for each group"):
        export_checkpoint(tmp_path / "checkpoint-5", tmp_path / "out")


def test_a_loop_refuses_it(ended: tuple[Path, Any]) -> None:
    refuse(ended[0] / "checkpoint-4", "a loop")
    with pytest.raises(CheckpointError, match="saved by each group alone.*cannot be used for a loop"):
        refuse(ended[0] / "checkpoint-5", "a loop")
    with pytest.raises(CheckpointError, match="part of one group"):
        refuse(ended[0] / "checkpoint-5" / "group_00000", "a loop")
