"""A run that is told to end saves in time, at a border or group by group, and resumes to the same bits."""

from __future__ import annotations

import copy
import gc
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from transformers import Trainer, TrainerCallback

from hf_fedshard import rounds
from hf_fedshard.checkpoint_choice import list_checkpoints
from hf_fedshard.manifest import find_damage
from tests.harness.checkpoint_runs import checkpoints, differences
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.marks import quick_and_slow
from tests.harness.pool import WorkerPool
from tests.harness.preemption_runs import Pause, train


LIMIT = 60.0
# Too short for any further step: the group that gets the signal gives up on the border at once.
NO_TIME = 0.01
QUICK_ALONE, QUICK_BORDER = {"outer loop"}, {"any rank"}
# Counted from where a process has begun.
OF_A_PROCESS = ("batches", "train_loss")
WHOLE: dict[str, list[dict[str, Any]]] = {}


def run(pool: WorkerPool, folder: Path, launch: dict[str, Any] | None = None, **options: Any) -> list[dict[str, Any]]:
    env = fsdp_launch_env(**{"dp_replicate": pool.world_size // 2, "dp_shard": 2, **(launch or {})})
    return pool.run(train, str(folder), env=env, init_group=False, limit_seconds=LIMIT, **options)


def uninterrupted(pool: WorkerPool, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """What a run comes to that nobody ends; once for the same options."""
    key = f"{pool.world_size} {options}"
    if key not in WHOLE:
        WHOLE[key] = run(pool, folder, **options)
    return copy.deepcopy(WHOLE[key])


def assert_same_end(whole: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    for before, after in zip(whole, resumed, strict=True):
        assert after["preempted"] is None
        drawn = len(after["batches"])
        assert 0 < drawn < len(before["batches"])
        assert not differences(before["batches"][-drawn:], after["batches"])
        assert not differences(
            {key: value for key, value in before.items() if key not in OF_A_PROCESS},
            {key: value for key, value in after.items() if key not in OF_A_PROCESS},
        )


def assert_alone(
    pool: WorkerPool, folder: Path, steps: tuple[int, int], name: str, signal_rank: int = 0, **options: Any
) -> None:
    """Ends group 0 at one step and group 1 at an earlier or later one; nobody can come to the border in time."""
    whole = uninterrupted(pool, folder / "whole", **options)
    half = pool.world_size // 2
    waits = dict.fromkeys(range(half, pool.world_size), steps[1])
    ended = run(pool, folder / "ended", ending=(signal_rank, steps[0], waits), grace_seconds=NO_TIME, **options)
    checkpoint = folder / "ended" / name
    for rank, result in enumerate(ended):
        assert result["preempted"] == {"checkpoint": str(checkpoint), "step": steps[rank // half], "code": 143}
    assert list_checkpoints(folder / "ended")[0] == checkpoint and find_damage(checkpoint) == []
    assert not list((folder / "ended").glob(".*"))
    assert_same_end(whole, run(pool, folder / "ended", resume=True, seed=7, **options))


OUTER: dict[str, Any] = {
    "outer_optimizer": "nesterov",
    "outer_schedule": "cosine",
    "outer_schedule_rounds": 3,
    "group_weights": "tokens",
    "inner_moments": "average",
    "proximal_mu": 0.5,
    "local_parameters": "lm_head.weight,*norm*",
}
# Epochs have 6 steps. Steps of group 0 and group 1, and the checkpoint: named after the first step of the round.
ALONE: dict[str, tuple[tuple[int, int], str, dict[str, Any]]] = {
    "first round": ((3, 1), "checkpoint-1", {"sync_every": 5}),
    "later round": ((6, 5), "checkpoint-5", {"sync_every": 4}),
    "at the last step": ((7, 5), "checkpoint-5", {"sync_every": 4}),
    "last and short round": ((8, 9), "checkpoint-8", {"sync_every": 7}),
    "end of an epoch": ((6, 7), "checkpoint-1", {"sync_every": 9, "eval_strategy": "epoch"}),
    "accumulation": ((4, 2), "checkpoint-1", {"sync_every": 6, "gradient_accumulation_steps": 2, "max_steps": 9}),
    "sharded": ((3, 2), "checkpoint-1", {"sync_every": 5, "launch": {"state_dict_type": "SHARDED_STATE_DICT"}}),
    "lora": ((7, 6), "checkpoint-5", {"sync_every": 4, "kind": "lora"}),
    "dropout": ((7, 6), "checkpoint-5", {"sync_every": 4, "kind": "dropout"}),
    "buffers": (
        (6, 5),
        "checkpoint-5",
        {"sync_every": 4, "kind": "batchnorm", "launch": {"wrap_cls": "TinyBlock"}, "per_device_train_batch_size": 2},
    ),
    "outer loop": ((7, 5), "checkpoint-5", {"sync_every": 4, **OUTER}),
    "outer loop in bfloat16": ((7, 6), "checkpoint-5", {"sync_every": 4, "kind": "bfloat16", **OUTER}),
    "proximal term alone": ((3, 2), "checkpoint-1", {"sync_every": 5, "proximal_mu": 0.5}),
    "between synchronous steps": (
        (5, 6),
        "checkpoint-4",
        {"sync_every": 5, "sync_steps_at_start": 3, "sync_steps_at_end": 2},
    ),
    "evaluation due": ((6, 5), "checkpoint-5", {"sync_every": 4, "eval_strategy": "steps", "eval_steps": 2}),
}


@pytest.mark.parametrize("case", quick_and_slow(ALONE, QUICK_ALONE))
def test_alone(world4: WorkerPool, tmp_path: Path, case: str) -> None:
    steps, name, options = ALONE[case]
    assert_alone(world4, tmp_path, steps, name, **options)


@pytest.mark.slow
def test_alone_fl_hsdp(world8: WorkerPool, tmp_path: Path) -> None:
    assert_alone(world8, tmp_path, (6, 5), "checkpoint-5", signal_rank=3, num_groups=2, sync_every=4)


@pytest.mark.slow
def test_alone_twice_in_one_round(world4: WorkerPool, tmp_path: Path) -> None:
    whole = run(world4, tmp_path / "whole", sync_every=5)
    for resume, steps in ((None, (3, 1)), (True, (4, 3))):
        for path in (tmp_path / "ended").glob("waiting-*"):
            path.unlink()
        waits = dict.fromkeys((2, 3), steps[1])
        ended = run(
            world4, tmp_path / "ended", resume=resume, ending=(1, steps[0], waits), grace_seconds=NO_TIME, sync_every=5
        )
        assert [result["preempted"]["step"] for result in ended] == [steps[0], steps[0], steps[1], steps[1]]
        assert checkpoints(tmp_path / "ended") == ["checkpoint-1"]
    assert_same_end(whole, run(world4, tmp_path / "ended", resume=True, seed=7, sync_every=5))


@pytest.mark.slow
def test_alone_again_before_the_first_step(world4: WorkerPool, tmp_path: Path) -> None:
    """Group 0 resumes before the last step of the round, in a new epoch, and waits there when the run is ended again."""
    options: dict[str, Any] = {"sync_every": 7, "kind": "dropout"}
    whole = uninterrupted(world4, tmp_path / "whole", **options)
    for resume, ending, steps in ((None, (0, 6, {2: 4, 3: 4}), (6, 4)), (True, (2, 5, {}), (6, 5))):
        ended = run(world4, tmp_path / "ended", resume=resume, ending=ending, grace_seconds=NO_TIME, **options)
        assert [result["preempted"]["step"] for result in ended] == [steps[0], steps[0], steps[1], steps[1]]
    assert_same_end(whole, run(world4, tmp_path / "ended", resume=True, seed=7, **options))


@pytest.mark.slow
def test_the_border_is_given_up(world4: WorkerPool, tmp_path: Path) -> None:
    """Group 1 hopes to come in time and then takes long; group 0 waits for it before its last step."""
    whole = uninterrupted(world4, tmp_path / "whole", sync_every=4)
    ended = run(
        world4,
        tmp_path / "ended",
        ending=(2, 5, {}),
        grace_seconds=10.0,  # half of it is for saving, and two steps must seem possible in the other half
        callbacks=(Pause(2, 6, 6.0),),
        sync_every=4,
    )
    assert [result["preempted"]["step"] for result in ended] == [7, 7, 6, 6]
    assert_same_end(whole, run(world4, tmp_path / "ended", resume=True, seed=7, sync_every=4))


# Rank that gets the signal, at which step, and where the run ends.
BORDER: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "first rank": (0, 5, 8, {"sync_every": 4}),
    "any rank": (3, 5, 8, {"sync_every": 4}),
    "last step of the round": (1, 8, 8, {"sync_every": 4}),
    "each step is a border": (2, 4, 4, {"sync_every": 1}),
    "never saved otherwise": (0, 1, 4, {"sync_every": 4, "save_strategy": "no"}),
    "dropout and a due evaluation": (
        0,
        3,
        4,
        {"sync_every": 4, "kind": "dropout", "eval_strategy": "steps", "eval_steps": 4},
    ),
    "plateau": (
        2,
        3,
        4,
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2, "sync_every": 2},
    ),
    "end of an epoch": (0, 5, 6, {"sync_every": 3, "eval_strategy": "epoch", "save_steps": 3}),
    "end of an epoch, one group": (2, 6, 6, {"num_groups": 1, "eval_strategy": "epoch"}),
    "one group": (2, 4, 4, {"num_groups": 1}),
    "one group, dropout and a due evaluation": (
        0,
        4,
        4,
        {"num_groups": 1, "kind": "dropout", "eval_strategy": "steps", "eval_steps": 4},
    ),
}


@pytest.mark.parametrize("case", quick_and_slow(BORDER, QUICK_BORDER))
def test_border(world4: WorkerPool, tmp_path: Path, case: str) -> None:
    rank, step, end, options = BORDER[case]
    whole = uninterrupted(world4, tmp_path / "whole", **options)
    ended = run(world4, tmp_path / "ended", ending=(rank, step, {}), grace_seconds=60, **options)
    checkpoint = tmp_path / "ended" / f"checkpoint-{end}"
    for result in ended:
        assert result["preempted"] == {"checkpoint": str(checkpoint), "step": end, "code": 143}
        assert result["evaluated"].get(end) is None
    assert list_checkpoints(tmp_path / "ended")[0] == checkpoint and find_damage(checkpoint) == []
    assert_same_end(whole, run(world4, tmp_path / "ended", resume=True, seed=7, **options))


class StopByEvaluation(TrainerCallback):
    """Stops the training by what an evaluation has found, on one rank, and asks for a save on another."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= dist.get_rank() == 3
        control.should_save |= dist.get_rank() == 1


class StopEverywhere(TrainerCallback):
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


BY_STEPS = {"eval_strategy": "steps", "eval_steps": 4, "sync_every": 4}
# Told at which step, where the run ends.
STOPS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "inside an epoch": (3, 4, {"callbacks": (StopByEvaluation,), **BY_STEPS}),
    "with the epoch": (
        5,
        6,
        {"callbacks": (StopByEvaluation,), "sync_every": 3, "eval_strategy": "epoch", "save_strategy": "epoch"},
    ),
    "one group": (4, 4, {"callbacks": (StopEverywhere,), **BY_STEPS, "num_groups": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", STOPS)
def test_the_evaluation_that_is_made_up_for_stops_the_training(world4: WorkerPool, tmp_path: Path, case: str) -> None:
    """Not a round later: the resumed run makes no step."""
    step, end, options = STOPS[case]
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "max_steps": 8}
    whole = uninterrupted(world4, tmp_path / "whole", **options)
    ended = run(world4, tmp_path / "ended", ending=(2, step, {}), grace_seconds=60, **options)
    assert [result["preempted"]["step"] for result in ended] == [end] * 4
    for before, after in zip(whole, run(world4, tmp_path / "ended", resume=True, seed=7, **options), strict=True):
        assert len(before["batches"]) == before["global_step"] == end and not after["batches"]
        assert not differences(
            {key: value for key, value in before.items() if key not in OF_A_PROCESS},
            {key: value for key, value in after.items() if key not in OF_A_PROCESS},
        )
        assert after["best"] == f"checkpoint-{end}"


@pytest.mark.slow
def test_the_last_round_comes_to_its_end(world4: WorkerPool, tmp_path: Path) -> None:
    whole = run(world4, tmp_path / "whole", sync_every=4)  # its folder is compared
    ended = run(world4, tmp_path / "ended", ending=(1, 9, {}), grace_seconds=60, sync_every=4)
    assert [result["preempted"] for result in ended] == [None] * 4
    assert not differences(whole, ended)
    assert checkpoints(tmp_path / "ended") == checkpoints(tmp_path / "whole")


@pytest.mark.parametrize("logged", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_mean_loss_is_of_the_steps_since_the_last_log(world4: WorkerPool, tmp_path: Path, logged: bool) -> None:
    options: dict[str, Any] = {"sync_every": 4, "logging_strategy": "steps" if logged else "no", "logging_steps": 4}
    whole = uninterrupted(world4, tmp_path / "whole", **options)
    run(world4, tmp_path / "ended", ending=(0, 7, {2: 6, 3: 6}), grace_seconds=NO_TIME, **options)
    resumed = run(world4, tmp_path / "ended", resume=True, seed=7, **options)
    for before, after in zip(whole, resumed, strict=True):
        step = 4 if logged else 0
        rest = 10 * before["train_loss"] - step * before["losses"].get(step, 0.0)
        assert after["train_loss"] == pytest.approx(rest / (10 - step), rel=1e-3)


class AtTheEnd(TrainerCallback):
    """Does what fits a finished run only."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if dist.get_rank() == 1:
            time.sleep(1)
        if self.what == "raise" and dist.get_rank() == 0:
            raise KeyError("no such metric")
        if self.what == "save":
            trainer_of(kwargs["model"]).save_model()


def trainer_of(model: Any) -> Any:
    return next(value for value in gc.get_objects() if isinstance(value, Trainer) and value.model is model)


@pytest.mark.parametrize("what", ["raise", pytest.param("save", marks=pytest.mark.slow)])
def test_what_fails_at_the_end_of_training_changes_nothing(world4: WorkerPool, tmp_path: Path, what: str) -> None:
    ending = (0, 3, {2: 2, 3: 2})
    ended = run(world4, tmp_path, ending=ending, grace_seconds=NO_TIME, callbacks=(AtTheEnd(what),), sync_every=5)
    for result in ended:
        assert result["preempted"]["checkpoint"] == str(tmp_path / "checkpoint-1")
    assert find_damage(tmp_path / "checkpoint-1") == []


class MidStep(TrainerCallback):
    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            trainer_of(kwargs["model"]).evaluate()


def test_a_border_inside_a_step_is_refused(world4: WorkerPool, tmp_path: Path) -> None:
    """What would be saved there, if the run is ended, are the weights after a step that counts as not made."""
    errors = world4.run_failing(
        train,
        str(tmp_path),
        env=fsdp_launch_env(2, 2),
        init_group=False,
        limit_seconds=LIMIT,
        callbacks=(MidStep(),),
        sync_every=4,
    )
    assert {error.type_name for error in errors} == {"ValueError"}
    assert all("in the middle of optimizer step 3" in error.message for error in errors)


def test_the_first_averaging_is_expected_to_take_time(world4: WorkerPool) -> None:
    """As long as the link takes for the model, before anything was averaged; then what was measured."""
    for before, inside, after in world4.run(expected, limit_seconds=LIMIT):
        assert before > 0.4 and inside == before
        assert 0 < after < 0.4


def expected() -> tuple[float, float, float]:
    from tests.harness.models import tiny_llama
    from tests.harness.two_groups import Federation, draws

    def slowly(*args: Any) -> None:
        time.sleep(0.2)
        broadcast(*args)

    broadcast = rounds.broadcast_initial_state
    with mock.patch.object(rounds, "broadcast_initial_state", slowly):
        federation = Federation(tiny_llama())
    made = federation.rounds
    before = made.border_seconds
    made.count_step(federation.train(draws(dist.get_rank())[0]))
    made.restore_inside(made.state_inside())
    inside = made.border_seconds
    made.close()
    return before, inside, made.border_seconds
