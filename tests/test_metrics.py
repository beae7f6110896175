"""Metrics of a round: their values, and every place where they have to arrive."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback

from hf_fedshard import RoundMetrics, Rounds
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.models import full_state
from tests.harness.pool import WorkerPool
from tests.harness.tiny_trainer import forget_meshes, tiny_trainer


HSDP = fsdp_launch_env(2, 2)
SEQUENCE = 12  # tokens of a sample of the tiny data set
NUM_STEPS, SYNC_EVERY = 7, 3
ROUNDS = [(1, 3), (2, 3), (3, 1)]


class Keeping(Trainer):
    """Keeps the loss of each of its steps, and when training work began."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.first_work = getattr(self, "first_work", None) or time.perf_counter()
        loss = super().training_step(*args, **kwargs)
        vars(self).setdefault("kept", []).append(loss.item())
        return loss


def _norm(state: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([value.double().flatten() for value in state.values()]).norm())


def _measure(folder: str) -> dict[str, Any]:
    forget_meshes()
    trainer = tiny_trainer(folder, sync_every=SYNC_EVERY, max_steps=NUM_STEPS, trainer_class=Keeping)
    borders: list[dict[str, Any]] = []
    original = Rounds.close
    outer_start = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            outer_start.append(time.perf_counter())

    def close(rounds: Rounds, *args: Any, **kwargs: Any) -> Any:
        inner = time.perf_counter() - trainer.first_work
        before = full_state(trainer.model)
        border = original(rounds, *args, **kwargs)
        held = {
            "before": before,
            "after": full_state(trainer.model),
            "losses": trainer.kept,
            "metrics": border.metrics,
        }
        held.update(inner=inner, outer=time.perf_counter() - outer_start[0])
        borders.append(held)
        trainer.kept, trainer.first_work = [], None
        outer_start.clear()
        return border

    trainer.add_callback(Clock())
    with mock.patch.object(Rounds, "close", close):
        trainer.train()
    return {"borders": borders, "history": [logs for logs in trainer.state.log_history if "fedshard/round" in logs]}


@pytest.mark.parametrize("world_size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_values(request: pytest.FixtureRequest, tmp_path: Path, world_size: int) -> None:
    pool: WorkerPool = request.getfixturevalue(f"world{world_size}")
    env = HSDP if world_size == 4 else fsdp_launch_env(4, 2)
    ranks = pool.run(_measure, str(tmp_path), env=env, init_group=False)
    size = world_size // 2
    for number, border in enumerate(ranks[0]["borders"]):
        metrics: RoundMetrics = border["metrics"]
        assert (metrics.round, metrics.steps) == ROUNDS[number]
        assert metrics.excluded == ()
        # What one group sends: a ring all-reduce among G = 2 moves 2 * theta * (G - 1) / G.
        num_bytes = 4 * sum(t.numel() for name, t in border["before"].items() if "inv_freq" not in name)
        assert metrics.bytes_sent == num_bytes
        states = [ranks[first]["borders"][number]["before"] for first in (0, size)]
        mean = {name: sum(state[name].double() for state in states) / 2 for name in states[0]}
        mean = {name: value for name, value in mean.items() if "inv_freq" not in name}
        squares = [_norm({name: state[name].double() - mean[name] for name in mean}) ** 2 for state in states]
        drift = (sum(squares) / 2) ** 0.5 / _norm(mean)
        assert drift > 1e-3
        assert metrics.drift == pytest.approx(drift, rel=1e-4)
        for group in range(2):
            held = [ranks[rank]["borders"][number] for rank in range(group * size, (group + 1) * size)]
            losses = [loss for rank in held for loss in rank["losses"]]
            assert len(losses) == size * metrics.steps
            assert metrics.losses[group] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
            tokens = SEQUENCE * size * metrics.steps
            rate = metrics.tokens_per_second[group]
            assert tokens / max(rank["outer"] for rank in held) <= rate <= tokens / min(rank["inner"] for rank in held)
        assert 0 < metrics.wait_seconds + metrics.sync_seconds < metrics.seconds
        assert metrics.sync_share == (metrics.wait_seconds + metrics.sync_seconds) / metrics.seconds
    for rank in ranks:
        same = ("round", "steps", "bytes_sent", "drift", "losses", "tokens_per_second", "excluded")
        for mine, first in zip(rank["borders"], ranks[0]["borders"], strict=True):
            assert [getattr(mine["metrics"], key) for key in same] == [getattr(first["metrics"], key) for key in same]
        logged = [(logs["fedshard/round"], logs["fedshard/steps"]) for logs in rank["history"]]
        assert logged == ROUNDS
    first_logs, first = ranks[0]["history"][0], ranks[0]["borders"][0]["metrics"]
    assert {key: first_logs[key] for key in first.as_logs()} == first.as_logs()


NAMES = {"round", "steps", "sync_seconds", "wait_seconds", "sync_share", "bytes_sent", "drift"}


def test_names() -> None:
    metrics = RoundMetrics(3, 8, 2.0, 0.5, 0.5, 96, 0.0123456, (1.5, float("nan")), (0.0, 7.25), excluded=(1,))
    logs = metrics.as_logs()
    optional = {"loss/group_0", "tokens_per_second/group_1", "excluded_groups"}
    assert set(logs) == {f"fedshard/{name}" for name in NAMES | optional}
    assert logs["fedshard/sync_share"] == 0.5
    assert logs["fedshard/drift"] == 0.01235
    assert logs["fedshard/excluded_groups"] == 1
    assert RoundMetrics(1, 1, 0.0, 0.0, 0.0, 0, 0.0, (), ()).sync_share == 0.0


def test_names_are_documented(root: Path) -> None:
    text = (root / "docs" / "training.md").read_text()
    for name in NAMES | {"loss/group_<g>", "tokens_per_second/group_<g>", "excluded_groups"}:
        assert f"`fedshard/{name}`" in text, name


class Reporter(TrainerCallback):
    """Stands for a tracker's callback, which Trainer puts ahead of those of the user."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, Any]]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append((state.global_step, dict(logs)))


def _report(folder: str, **changes: Any) -> dict[str, Any]:
    from transformers.trainer import DEFAULT_CALLBACKS

    forget_meshes()
    DEFAULT_CALLBACKS.append(Reporter)
    trainer = tiny_trainer(folder, sync_every=SYNC_EVERY, max_steps=NUM_STEPS, **changes)
    trainer.train()
    kinds = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
    reporter = next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Reporter))
    assert kinds.index("Reporter") < kinds.index("FedAvgCallback")
    return {"seen": reporter.seen, "history": trainer.state.log_history}


def _kinds(logs: dict[str, Any]) -> str:
    return "+".join(name for name in ("loss", "fedshard/round", "train_runtime") if name in logs)


@pytest.mark.parametrize(
    ("every", "changes", "expected"),
    [
        # A line of Trainer's own that falls on the border takes the metrics along; where none does there is one for them.
        ("1", {"logging_strategy": "steps", "logging_steps": 3}, {3: ["both"], 6: ["both"], 7: ["round"]}),
        ("1", {"logging_strategy": "no"}, {3: ["round"], 6: ["round"], 7: ["round"]}),
        # Asked for inside a round, it moves to the border: steps 1-3 in one line.
        ("1", {"logging_strategy": "steps", "logging_steps": 1}, {3: ["both"], 6: ["both"], 7: ["both"]}),
        ("2", {"logging_strategy": "steps", "logging_steps": 3}, {3: ["loss"], 6: ["both"]}),
        ("0", {"logging_strategy": "no"}, {}),
    ],
)
def test_one_line_a_round(
    world4: WorkerPool, tmp_path: Path, every: str, changes: dict[str, Any], expected: dict[int, list[str]]
) -> None:
    env = HSDP | {"FEDSHARD_LOG_EVERY_ROUNDS": every}
    names = {"both": "loss+fedshard/round", "round": "fedshard/round", "loss": "loss"}
    for rank in world4.run(_report, str(tmp_path), env=env, init_group=False, **changes):
        seen: dict[int, list[str]] = {}
        for step, logs in rank["seen"]:
            if "train_runtime" not in logs:
                seen.setdefault(step, []).append(_kinds(logs))
        assert seen == {step: [names[kind] for kind in kinds] for step, kinds in expected.items()}
        logged = [(logs["step"], _kinds(logs)) for logs in rank["history"] if "train_runtime" not in logs]
        assert logged == [(step, kind) for step, kinds in seen.items() for kind in kinds]


class AddsToLogs(Trainer):
    """Logs something of its own, as TRL's trainers do."""

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log({**logs, "mine": float(dist.get_rank())}, *args, **kwargs)


class LogsAlone(TrainerCallback):
    """Logs on the main process alone, in every event that comes at a border."""

    trainer: Trainer

    def on_step_end(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and "alone" not in (logs or {}):
            self.trainer.log({"alone": 1.0})

    on_log = on_evaluate = on_save = on_epoch_end = on_train_end = on_step_end


def _logs_alone(folder: str) -> list[dict[str, Any]]:
    forget_meshes()
    callback = LogsAlone()
    every = {f"{name}_{what}": value for name in ("logging", "eval", "save") for what, value in SCHEDULE.items()}
    trainer = tiny_trainer(
        folder, trainer_class=AddsToLogs, after=(callback,), sync_every=3, max_steps=6, eval_samples=4, **every
    )
    callback.trainer = trainer
    trainer.train()
    return list(trainer.state.log_history)


SCHEDULE: dict[str, Any] = {"strategy": "steps", "steps": 3}


def test_what_one_rank_logs_is_no_business_of_the_others(world4: WorkerPool, tmp_path: Path) -> None:
    for rank, history in enumerate(world4.run(_logs_alone, str(tmp_path), env=HSDP, limit_seconds=30)):
        alone = [row["mine"] for row in history if "alone" in row]
        # In an epoch of 6 steps: 6 steps, 2 borders with 2 logs, an evaluation and a save, the end twice and its log.
        assert alone == ([0.0] * 17 if rank == 0 else [])
        # What all log is of all ranks.
        assert [row["mine"] for row in history if "loss" in row or "eval_loss" in row] == [1.5] * 4


def test_tensorboard(world4: WorkerPool, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    changes = {"report_to": "tensorboard", "logging_strategy": "steps", "logging_steps": 3}
    env = HSDP | {"TENSORBOARD_LOGGING_DIR": str(tmp_path / "board")}
    ranks = world4.run(_report, str(tmp_path), env=env, init_group=False, **changes)
    files = list(tmp_path.rglob("events.out.tfevents.*"))
    assert len(files) == 1, "only the main process writes"
    events = EventAccumulator(str(files[0])).Reload()
    scalars = {tag: [(item.step, item.value) for item in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert scalars["train/fedshard/round"] == [(3, 1.0), (6, 2.0), (7, 3.0)]
    assert scalars["train/fedshard/steps"] == [(3, 3.0), (6, 3.0), (7, 1.0)]
    logged = [logs for logs in ranks[0]["history"] if "fedshard/round" in logs]
    groups = {f"{name}/group_{group}" for name in ("loss", "tokens_per_second") for group in (0, 1)}
    for name in NAMES | groups:
        expected = [(logs["step"], pytest.approx(logs[f"fedshard/{name}"])) for logs in logged]
        assert scalars[f"train/fedshard/{name}"] == expected, name
