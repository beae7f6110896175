"""Averaging beside the steps of a Trainer: where it makes full borders, what it sends when, and that it resumes exactly."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_fedshard import FedAvgCallback
from tests.harness.comparison import assert_matches, refer
from tests.harness.data import ListDataset, token_samples
from tests.harness.delayed import Delayed
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.marks import quick_and_slow
from tests.harness.pool import WorkerPool
from tests.harness.timeline import Timeline
from tests.harness.tiny_trainer import History, forget_meshes, tiny_trainer
from tests.test_checkpoint_resume import assert_resumes
from tests.test_isolation_requests import Ask
from tests.test_trainer_equivalence import native, run


FL_FSDP = fsdp_launch_env(2, 2)
# What the thread of the slow tier has issued, by its place in the stack of the caller.
SLOW_TIER = "slow_tier.py"


def test_is_the_reference(world4: WorkerPool, tmp_path: Path) -> None:
    """20 steps in rounds of 3 in double precision; a log after steps 6, 12 and 18 makes full borders."""
    options: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 6}
    ranks = run(world4, tmp_path, kind="double", native=True, settings={"overlap_steps": 2}, **options)
    borders = (6, 12, 18, 20)
    delayed = Delayed(3, 2, borders)
    result = refer(ranks, "double", loss=native, sync_every=borders, after_step=delayed)
    assert_matches(ranks, result, "double", 1e-12)
    assert delayed.landed == [5, 11, 17]
    logged = [row for row in ranks[0]["log"] if "fedshard/round" in row]
    assert [row["fedshard/round"] for row in logged] == list(range(1, 8))
    assert [row["step"] for row in logged if "fedshard/overlapped_seconds" in row] == [5, 11, 17]


def watched(folder: str, settings: dict[str, Any], after: tuple[Any, ...] = (), **changes: Any) -> dict[str, Any]:
    forget_meshes()
    history = History()
    callback = FedAvgCallback(num_groups=2, **settings)
    trainer = tiny_trainer(folder, federated=False, before=(callback,), after=(*after, history), **changes)
    timeline = Timeline(2)
    with timeline.of(trainer):
        trainer.train()
    inside = timeline.inside_rounds()
    return {
        "borders": timeline.borders,
        "leaks": [str(c) for c in inside if c.crosses(timeline.group_of) and SLOW_TIER not in c.stack],
        "beside": [c.num_bytes for c in inside if c.crosses(timeline.group_of) and SLOW_TIER in c.stack],
        "own": sorted((c.name, c.num_elements) for c in inside if SLOW_TIER not in c.stack),
        "logged": history.logged,
        "evaluated": history.evaluated,
        "saved": history.saved,
        "epoch_ends": history.epoch_ends,
        "steps": trainer.state.global_step,
        "rounds": [row["fedshard/round"] for row in trainer.state.log_history if "fedshard/round" in row],
        "tokens": trainer.state.num_input_tokens_seen,
    }


EVALUATION: dict[str, Any] = {"after": (partial(Ask, "should_evaluate", 2, (3,)),), "eval_samples": 8}
# The log of a round comes where its averaging is taken in, inside the next one.
EVENT = "on_log"
# Settings and arguments; the borders, and where there is logged, evaluated and saved.
CADENCES: dict[str, tuple[dict[str, Any], dict[str, Any], list[int], list[int], list[int], list[int]]] = {
    "nobody asks": ({}, {}, [14], [], [], []),
    "logging": ({}, {"logging_strategy": "steps", "logging_steps": 4}, [6, 9, 12, 14], [6, 9, 12], [], []),
    "logging, outcomes as late as can be": (
        {"overlap_steps": 3},
        {"logging_strategy": "steps", "logging_steps": 6},
        [6, 12, 14],
        [6, 12],
        [],
        [],
    ),
    "evaluation": (
        {},
        {"eval_strategy": "steps", "eval_steps": 6, "eval_samples": 8},
        [6, 12, 14],
        [],
        [6, 12, 14],
        [],
    ),
    "saving": ({}, {"save_strategy": "steps", "save_steps": 7}, [9, 14], [], [], [9, 14]),
    "epochs": ({}, {"eval_strategy": "epoch", "eval_samples": 8}, [6, 12, 14], [], [6, 12, 14], []),
    "first step": (
        {},
        {"logging_strategy": "steps", "logging_steps": 100, "logging_first_step": True},
        [3, 14],
        [3],
        [],
        [],
    ),
    # Rides on the averaging that starts after step 3, and is known at step 4 or 5.
    "one rank asks": ({}, EVALUATION, [6, 14], [], [6], []),
    "fragments": ({"num_fragments": 3, "overlap_steps": 2}, EVALUATION, [6, 14], [], [6], []),
    # Asked at step 4 it rides on the averaging that starts after step 6.
    "on the log of a round": (
        {},
        {
            "after": (
                partial(Ask, "should_log", 4, (1,), EVENT),
                partial(Ask, "should_evaluate", 4, (2,), EVENT),
                partial(Ask, "should_save", 4, (3,), EVENT),
                partial(Ask, "should_epoch_stop", 13, (0,), EVENT),
            ),
            "eval_samples": 8,
        },
        [9, 14],
        [9],
        [9],
        [9],
    ),
    "a stop on the log of a round": (
        {},
        {
            "after": (partial(Ask, "should_training_stop", 4, (1,), EVENT),),
            "train_dataset": ListDataset(token_samples(56)),
        },
        [9],
        [],
        [],
        [],
    ),
    "all stop on the log of a round": (
        {},
        {"after": (partial(Ask, "should_training_stop", 4, (0, 1, 2, 3), EVENT),)},
        [9],
        [],
        [],
        [],
    ),
}


@pytest.mark.parametrize("case", quick_and_slow(CADENCES, CADENCES.keys() - {"all stop on the log of a round"}))
def test_requests_make_full_borders(world4: WorkerPool, case: str, tmp_path: Path) -> None:
    settings, changes, *expected = CADENCES[case]
    settings = {"sync_every": 3, "overlap_steps": 1, **settings}
    changes = {"max_steps": 14, "include_num_input_tokens_seen": True, **changes}
    ranks = world4.run(watched, str(tmp_path), settings, env=FL_FSDP, limit_seconds=120, **changes)
    steps_in_epoch = len(changes.get("train_dataset", range(24))) // 4
    for rank in ranks:
        assert [rank[what] for what in ("borders", "logged", "evaluated", "saved")] == expected
        # No epoch is cut short.
        assert rank["epoch_ends"] == [*range(steps_in_epoch, rank["steps"], steps_in_epoch), rank["steps"]]
        assert not rank["leaks"], rank["leaks"][:2]
        assert rank["beside"], "what is averaged beside the steps must be on the record"
        assert rank["rounds"] == list(range(1, len(rank["rounds"]) + 1))
        assert rank["tokens"] == ranks[0]["tokens"] > 0


def test_the_steps_send_what_they_send_anyway(world4: WorkerPool, tmp_path: Path) -> None:
    """Rule 1: on the communicators of the steps there is nothing but the steps, overlapped or not."""
    runs = [
        world4.run(watched, str(tmp_path), {"sync_every": 4, **more}, env=FL_FSDP, limit_seconds=120, max_steps=8)
        for more in ({}, {"overlap_steps": 2})
    ]
    for blocking, beside in zip(*runs, strict=True):
        assert blocking["own"] == beside["own"]
        assert not blocking["beside"]


@pytest.mark.parametrize(
    "settings",
    [
        {"sync_every": 2, "overlap_steps": 1, "outer_optimizer": "nesterov"},
        # At the border one fragment has left its anchor, since it had its turn inside the round.
        {"sync_every": 3, "overlap_steps": 2, "num_fragments": 2, "outer_optimizer": "nesterov"},
        {
            "kind": "lora",
            "sync_every": 3,
            "overlap_steps": 3,
            "num_fragments": 2,
            "wire_format": "int8",
            "outer_optimizer": "nesterov",
            "offload_outer_state": True,
        },
    ],
    ids=["whole", "fragments", "adapters in codes"],
)
def test_resumes_bit_for_bit(world4: WorkerPool, settings: dict[str, Any], tmp_path: Path) -> None:
    """Saved at a full border, with nothing in flight."""
    assert_resumes(world4, tmp_path, step=6, save_steps=6, **settings)


def best(folder: str) -> tuple[str | None, list[int], list[int]]:
    forget_meshes()
    history = History()
    settings = {"sync_every": 3, "overlap_steps": 2, "num_fragments": 2, "outer_optimizer": "nesterov"}
    callback = FedAvgCallback(num_groups=2, wire_format="int8", **settings)
    schedule = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    trainer = tiny_trainer(
        folder,
        federated=False,
        before=(callback,),
        after=(history,),
        eval_samples=4,
        max_steps=9,
        load_best_model_at_end=True,
        **schedule,
    )
    trainer.train()
    return trainer.state.best_model_checkpoint, history.evaluated, history.saved


@pytest.mark.slow
def test_evaluated_saved_and_the_best_loaded(world4: WorkerPool, tmp_path: Path) -> None:
    for checkpoint, evaluated, saved in world4.run(best, str(tmp_path), env=FL_FSDP):
        assert evaluated == saved == [6, 9]
        assert checkpoint is not None and Path(checkpoint).parent == tmp_path


def preempted(folder: str) -> None:
    tiny_trainer(
        folder,
        federated=False,
        before=(FedAvgCallback(num_groups=2, sync_every=4, overlap_steps=2),),
        enable_jit_checkpoint=True,
    )


def test_preemption_is_refused(world4: WorkerPool, tmp_path: Path) -> None:
    errors = world4.run_failing(preempted, str(tmp_path), env=FL_FSDP)
    assert {error.type_name for error in errors} == {"ValueError"}
    assert all("overlap_steps=2 cannot be used with enable_jit_checkpoint=True" in error.message for error in errors)
