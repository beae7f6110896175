"""Whatever callbacks ask for inside a round, one rank alone or all, waits for the border and holds for every rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from hf_fedshard import FedAvgCallback, export_checkpoint
from tests.harness.data import ListDataset, token_samples
from tests.harness.pool import WorkerPool
from tests.harness.timeline import ROUND, Timeline
from tests.harness.tiny_trainer import History, forget_meshes, tiny_trainer
from tests.test_isolation import FL_FSDP, FL_HSDP, LIMIT, run_isolated


# What the thread of the slow tier has issued, by its place in the stack of the caller.
SLOW_TIER = "slow_tier.py"


class Ask(TrainerCallback):
    """
    Sets a flag of the control in one event.

    Args:
        flag (`str`):
            `"should_save"` and so on.
        step (`int`):
            `global_step` at which.
        ranks (`tuple[int, ...]`):
            Ranks on which.
        event (`str`, *optional*, defaults to `"on_step_end"`):
            The event.
        value (`bool`, *optional*, defaults to `True`):
            What to. `False` withdraws what has been asked for.
    """

    def __init__(
        self, flag: str, step: int, ranks: tuple[int, ...], event: str = "on_step_end", value: bool = True
    ) -> None:
        def ask(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step and dist.get_rank() in ranks:
                setattr(control, flag, value)

        setattr(self, event, ask)


@pytest.mark.parametrize("position", ["before", "after"])
def test_flags_of_single_ranks(world4: WorkerPool, tmp_path: Path, position: str) -> None:
    asks = (
        partial(Ask, "should_log", 1, (3,)),
        partial(Ask, "should_evaluate", 2, (2, 3)),
        partial(Ask, "should_save", 5, (0,)),
        partial(Ask, "should_evaluate", 7, (1,)),
        partial(Ask, "should_training_stop", 9, (2,)),
    )
    result = run_isolated(world4, str(tmp_path), max_steps=30, eval_samples=6, **{position: asks})
    assert result["borders"] == [4, 8, 12]
    assert result["steps"] == 12
    assert result["logged"] == [4]
    assert result["evaluated"] == [4, 8]
    assert result["saved"] == [8]


def test_flags_of_one_group_in_fl_hsdp(world8: WorkerPool, tmp_path: Path) -> None:
    asks = (partial(Ask, "should_save", 1, (4, 5, 6, 7)), partial(Ask, "should_training_stop", 3, (7,)))
    result = run_isolated(world8, str(tmp_path), env=FL_HSDP, max_steps=9, sync_every=2, after=asks)
    assert result["saved"] == [2]
    assert result["borders"] == [2, 4]


def test_stop_in_an_accumulation_window(world4: WorkerPool, tmp_path: Path) -> None:
    ask = partial(Ask, "should_training_stop", 2, (1,), event="on_substep_end")
    result = run_isolated(
        world4, str(tmp_path), max_steps=9, sync_every=3, gradient_accumulation_steps=2, after=(ask,)
    )
    assert result["borders"] == [3]


@pytest.mark.parametrize("step", [pytest.param(4, marks=pytest.mark.slow), 6])
@pytest.mark.parametrize("event", ["on_epoch_begin", "on_epoch_end", "on_step_begin", "on_optimizer_step"])
def test_stop_in_other_events(world4: WorkerPool, tmp_path: Path, event: str, step: int) -> None:
    # 16 samples over 4 ranks: every epoch ends at a border, where no round is running; 24: inside a round.
    ask = partial(Ask, "should_training_stop", step, (1,), event=event)
    samples = ListDataset(token_samples(4 * step))
    result = run_isolated(world4, str(tmp_path), samples, max_steps=16, after=(ask,))
    assert result["borders"] == ([4] if (event, step) == ("on_epoch_end", 4) else [4, 8])
    assert result["steps"] == result["borders"][-1]


@pytest.mark.parametrize("own_line", [False, True], ids=["log of the round", "log of the Trainer"])
def test_requests_at_a_border(world4: WorkerPool, tmp_path: Path, own_line: bool) -> None:
    """What a callback asks for on one rank while Trainer logs, evaluates and saves is done by all, before the next of them."""
    asks = (
        partial(Ask, "should_save", 2, (1,), event="on_log"),
        partial(Ask, "should_evaluate", 4, (2,), event="on_log"),
        partial(Ask, "should_log", 6, (3,), event="on_log"),
        partial(Ask, "should_evaluate", 8, (0,), event="on_log"),
        partial(Ask, "should_save", 8, (3,), event="on_evaluate"),
        partial(Ask, "should_log", 10, (1,)),
        partial(Ask, "should_evaluate", 10, (1,), event="on_log"),
        partial(Ask, "should_save", 10, (1,), event="on_prediction_step"),
        partial(Ask, "should_evaluate", 10, (2,), event="on_save"),  # too late at this border, as ever
        partial(Ask, "should_log", 12, (0, 1), event="on_save"),
    )
    log = {"logging_strategy": "steps", "logging_steps": 2} if own_line else {}
    result = run_isolated(world4, str(tmp_path), max_steps=12, sync_every=2, eval_samples=6, after=asks, **log)
    assert result["borders"] == [2, 4, 6, 8, 10, 12]
    assert result["logged"] == ([2, 4, 6, 8, 10, 12] if own_line else [6, 10])
    assert result["evaluated"] == [4, 8, 10]
    assert result["saved"] == [2, 8, 10]


def test_requests_can_be_withdrawn_at_a_border(world4: WorkerPool, tmp_path: Path) -> None:
    """A callback that has seen the log or the metrics may keep Trainer from what is due next; one rank alone may not."""
    withdraw = (
        partial(Ask, "should_evaluate", 2, (0, 1, 2, 3), event="on_log", value=False),
        partial(Ask, "should_save", 4, (0, 1, 2, 3), event="on_evaluate", value=False),
        partial(Ask, "should_save", 6, (2,), event="on_evaluate", value=False),
    )
    every = {"logging_strategy": "steps", "eval_strategy": "steps", "save_strategy": "steps"}
    every |= {"logging_steps": 2, "eval_steps": 2, "save_steps": 2, "eval_samples": 6}
    result = run_isolated(world4, str(tmp_path), max_steps=6, sync_every=2, after=withdraw, **every)
    assert result["logged"] == [2, 4, 6]
    assert result["evaluated"] == [4, 6]
    assert result["saved"] == [2, 6]


@pytest.mark.parametrize("event", ["on_log", "on_evaluate", "on_save"])
def test_stop_at_a_border(world4: WorkerPool, tmp_path: Path, event: str) -> None:
    asks = (
        partial(Ask, "should_epoch_stop", 2, (2,), event=event),
        partial(Ask, "should_training_stop", 4, (1,), event=event),
    )
    every = {"logging_strategy": "steps", "eval_strategy": "steps", "save_strategy": "steps"}
    every |= {"logging_steps": 2, "eval_steps": 2, "save_steps": 2, "eval_samples": 6}
    result = run_isolated(world4, str(tmp_path), max_steps=8, sync_every=2, after=asks, **every)
    assert result["borders"] == result["logged"] == result["evaluated"] == result["saved"] == [2, 4]
    assert result["epoch_ends"] == [2, 4]


def test_stop_of_the_epoch(world4: WorkerPool, tmp_path: Path) -> None:
    ask = partial(Ask, "should_epoch_stop", 1, (3,))
    result = run_isolated(world4, str(tmp_path), max_steps=9, sync_every=2, after=(ask,))
    # Two epochs were planned for 9 steps, and the first one was cut short.
    assert result["epoch_ends"] == [2, 8]


class CallDirectly(TrainerCallback):
    """Calls methods of the Trainer in mid-round, and notes whether the groups held one model in them."""

    def __init__(self, event: str, step: int, names: tuple[str, ...]) -> None:
        self.trainer: Any = None
        self.timeline: Any = None
        self.same: list[bool] = []
        self.met = False

        def call(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step != step or self.met:
                return
            self.met = True
            for name in names:
                given = {
                    "evaluate": {},
                    "predict": {"test_dataset": self.trainer.eval_dataset},
                    "save_model": {"output_dir": f"{args.output_dir}/direct"},
                }[name]
                getattr(self.trainer, name)(**given)
                weight = kwargs["model"].lm_head.weight
                local = (weight.to_local() if hasattr(weight, "to_local") else weight).detach()
                everywhere = [torch.empty_like(local) for _ in range(4)] if local.numel() else []
                if everywhere:
                    dist.all_gather(everywhere, local)
                    self.same.append(torch.equal(everywhere[0], everywhere[2]))
            if event not in ("on_step_end", "on_epoch_end"):
                self.timeline.mark(ROUND)  # the step goes on, and the next round with it

        setattr(self, event, call)


class NotesLosses(Trainer):
    """Keeps the loss of each step on this rank, and what each round says of it."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        losses = self.__dict__.setdefault("losses", {})
        step = self.state.global_step + 1
        losses[step] = losses.get(step, 0.0) + float(loss)
        return loss

    def rounds(self) -> tuple[list[int], list[list[float]], list[float], list[int]]:
        """
        Where there was a log of losses; for each round the losses of its steps on this rank, and the mean that the log has of
        this rank's group; the numbers of the rounds in the log.
        """
        of_steps, said, done = [], [], 0
        numbers = [row["fedshard/round"] for row in self.state.log_history if "fedshard/round" in row]
        name = f"fedshard/loss/group_{dist.get_rank() // 2}"
        for row in self.state.log_history:
            if row.get("fedshard/steps"):
                steps = range(done + 1, done + row["fedshard/steps"] + 1)
                of_steps.append([self.losses[step] for step in steps])
                said.append(row[name])
                done += len(steps)
        return [row["step"] for row in self.state.log_history if "loss" in row], of_steps, said, numbers


def call_directly(folder: str, event: str, step: int, names: tuple[str, ...], **changes: Any) -> Any:
    forget_meshes()
    history, caller = History(), CallDirectly(event, step, names)
    trainer = tiny_trainer(folder, after=(caller, *changes.pop("after", ()), history), eval_samples=6, **changes)
    caller.trainer, caller.timeline = trainer, Timeline(2)
    with caller.timeline.of(trainer):
        trainer.train()
    found = caller.timeline.crossing_inside_rounds()
    losses = trainer.rounds() if isinstance(trainer, NotesLosses) else None
    return found, caller.timeline.borders, caller.same, history.evaluated, history.saved, losses


NAMES = ("evaluate", "predict", "save_model")


@pytest.mark.parametrize(
    ("event", "step", "names", "rounds", "logged"),
    [
        ("on_step_end", 2, NAMES, [2, 4, 1], [2, 6]),
        ("on_step_end", 2, NAMES[1:], [2, 4, 1], [2, 6]),
        ("on_substep_end", 2, NAMES[1:], [2, 4, 1], [6]),
        ("on_optimizer_step", 2, NAMES, [2, 4, 1], [6]),
        ("on_optimizer_step", 4, NAMES, [4, 3], [4, 7]),  # the first step of a round
    ],
)
def test_direct_calls(
    world4: WorkerPool,
    tmp_path: Path,
    event: str,
    step: int,
    names: tuple[str, ...],
    rounds: list[int],
    logged: list[int],
) -> None:
    results = world4.run(
        call_directly,
        str(tmp_path),
        event,
        step,
        names,
        trainer_class=NotesLosses,
        max_steps=7,
        gradient_accumulation_steps=2,
        logging_strategy="steps",
        logging_steps=2,
        env=FL_FSDP,
        limit_seconds=LIMIT,
    )
    for rank, (found, borders, same, evaluated, _, losses) in enumerate(results):
        assert not found, found[0]
        assert step in borders
        assert borders[-1] == 7
        assert same == [True] * len(names)
        assert evaluated == ([step] if "evaluate" in names else [])
        # Trainer counts its losses from where it has logged last; the rounds count theirs by themselves.
        assert losses[0] == logged
        assert losses[3] == list(range(1, losses[3][-1] + 1))
        assert [len(of_round) for of_round in losses[1]] == rounds
        for mine, others, said in zip(losses[1], results[rank ^ 1][-1][1], losses[2], strict=True):
            assert said == pytest.approx(sum(mine + others) / (2 * len(mine)), rel=1e-4)
    assert (tmp_path / "direct" / "model.safetensors").exists()


@pytest.mark.parametrize("event", ["on_step_end", "on_substep_end", "on_epoch_end"])
def test_requests_outlive_a_border_on_demand(world4: WorkerPool, tmp_path: Path, event: str) -> None:
    # A save was asked for at step 1 by one rank; the border at step 2 comes from a direct call, at the end of an epoch perhaps.
    asks = (partial(Ask, "should_save", 1, (3,)), partial(Ask, "should_evaluate", 2, (1,)))
    if event == "on_epoch_end":
        asks = (partial(Ask, "should_save", 1, (3,)), partial(Ask, "should_evaluate", 2, (1,), event))
    results = world4.run(
        call_directly,
        str(tmp_path),
        event,
        2,
        ("evaluate",),
        max_steps=6,
        gradient_accumulation_steps=2,
        train_dataset=ListDataset(token_samples(16)),
        after=asks,
        env=FL_FSDP,
        limit_seconds=LIMIT,
    )
    for found, borders, _, evaluated, saved, _ in results:
        assert not found, found[0]
        # In the middle of a step the call itself is the evaluation asked for before; the save waits for the next border.
        assert evaluated == ([2] if event == "on_substep_end" else [2, 2])
        assert saved == ([6] if event == "on_substep_end" else [2])
        assert borders == [2, 6]


class SkipOneStep(TrainerCallback):
    """In group 0 the optimizer is not called in one step, as under a gradient scaler that has found infinite gradients."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.held: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and dist.get_rank() < 2:
            inner = kwargs["optimizer"].optimizer
            self.held, inner.step = inner.step, lambda *args, **kwargs: None

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.held is not None:
            kwargs["optimizer"].optimizer.step, self.held = self.held, None


class RoundsInOrder(TrainerCallback):
    """Every round is logged once, with a number of its own and with steps."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, int]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "fedshard/round" in logs:
            self.rounds.append((logs["fedshard/round"], logs["fedshard/steps"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert [number for number, _ in self.rounds] == list(range(1, len(self.rounds) + 1)), self.rounds
        assert all(steps > 0 for _, steps in self.rounds), self.rounds
        assert sum(steps for _, steps in self.rounds) == state.global_step, self.rounds


@pytest.mark.parametrize(
    "settings",
    [{}, {"overlap_steps": 2}, {"group_weights": "samples"}],
    ids=["blocking", "beside the steps", "weights"],
)
def test_a_border_in_a_step_that_one_group_skips(world4: WorkerPool, tmp_path: Path, settings: dict[str, Any]) -> None:
    """The first step of a round: what the optimizers have done is not the same in both groups."""
    results = world4.run(
        call_directly,
        str(tmp_path),
        "on_optimizer_step",
        3,
        ("evaluate", "predict"),
        max_steps=7,
        federated=False,
        before=(partial(FedAvgCallback, num_groups=2, sync_every=3, **settings), partial(SkipOneStep, 3)),
        after=(RoundsInOrder,),
        ddp_timeout=20,
        env=FL_FSDP,
        limit_seconds=LIMIT,
    )
    for found, borders, same, evaluated, *_ in results:
        leaks = [leak for leak in found if SLOW_TIER not in leak]
        assert not leaks, leaks[0]
        assert borders == ([3, 7] if "overlap_steps" in settings else [3, 3, 6, 7])
        assert same == [True] * 2
        assert evaluated == [3]


def test_a_schedule_that_falls_due_in_a_step_with_a_border(world4: WorkerPool, tmp_path: Path) -> None:
    """A save is due after step 4, in which a callback makes a border: the first round to end after it ends with one too."""
    results = world4.run(
        call_directly,
        str(tmp_path),
        "on_optimizer_step",
        3,
        ("evaluate",),
        max_steps=14,
        federated=False,
        before=(partial(FedAvgCallback, num_groups=2, sync_every=3, overlap_steps=2),),
        save_strategy="steps",
        save_steps=4,
        env=FL_FSDP,
        limit_seconds=LIMIT,
    )
    for _, borders, _, evaluated, saved, _ in results:
        assert evaluated == [3]
        assert borders == [3, 6, 9, 12, 14]
        assert saved[:3] == [6, 9, 12]


def test_early_stopping_and_best_model(world4: WorkerPool, tmp_path: Path) -> None:
    results = world4.run(train_to_best, str(tmp_path), env=FL_FSDP, limit_seconds=LIMIT)
    for leaks, borders, steps, best, difference, evaluated in results:
        assert not leaks, leaks[0]
        assert best == results[0][3]
        assert steps < 40
        assert borders[-1] == steps
        assert evaluated == borders  # due every 3 steps, in rounds of 4
        assert difference == 0.0


def train_to_best(folder: str) -> Any:
    from safetensors.torch import load_file

    forget_meshes()
    history = History()
    trainer = tiny_trainer(
        folder,
        after=(partial(EarlyStoppingCallback, early_stopping_patience=1), history),
        eval_samples=6,
        max_steps=40,
        learning_rate=0.3,  # overshoots: the loss gets worse
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=False,
    )
    timeline = Timeline(2)
    with timeline.of(trainer):
        trainer.train()
    best = trainer.state.best_model_checkpoint
    if dist.get_rank() == 0:
        export_checkpoint(best, f"{folder}/exported")
    dist.barrier()
    saved = load_file(f"{folder}/exported/model.safetensors")
    held = {name: parameter.full_tensor() for name, parameter in trainer.model.named_parameters()}
    difference = max(float((held[name].detach() - saved[name]).abs().max()) for name in saved)
    state = trainer.state
    return timeline.crossing_inside_rounds(), timeline.borders, state.global_step, best, difference, history.evaluated
