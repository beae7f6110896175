"""One run of a study: groups one after another in this process, or one synchronous batch."""

import datetime
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, get_scheduler

from clm_metrics import sequence_losses
from hf_fedshard import RoundMetrics, Simulation
from sweep_data import StudyData, batches
from sweep_results import Result
from sweep_settings import Setting


EVAL_BATCH = 16
NUM_LAST_LOSSES = 20


def make_model(preset: str, setting: Setting, vocab_size: int) -> nn.Module:
    """
    Makes the model of a run, its weights drawn with the run's seed.

    Args:
        preset (`str`):
            Name or folder of the configuration.
        setting ([`Setting`]):
            The run.
        vocab_size (`int`):
            Tokens of the tokenizer.
    """
    config = AutoConfig.from_pretrained(preset, **setting.model)
    if vocab_size > config.vocab_size:
        raise ValueError(f"The tokenizer has {vocab_size} tokens, the model {config.vocab_size} embeddings.")
    torch.manual_seed(setting.seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def mean_loss(model: nn.Module, blocks: torch.Tensor) -> torch.Tensor:
    """
    Mean loss of a batch.

    Args:
        model (`nn.Module`):
            A causal language model.
        blocks (`torch.Tensor`):
            Tokens of shape (batch, block).
    """
    logits = model(input_ids=blocks, use_cache=False).logits
    # The last position predicts nothing; its label is ignored rather than cut off, which would copy all logits.
    labels = nn.functional.pad(blocks[:, 1:], (0, 1), value=-100)
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, blocks: torch.Tensor) -> float:
    """
    Mean loss over held-out tokens.

    Args:
        model (`nn.Module`):
            A causal language model.
        blocks (`torch.Tensor`):
            Tokens of shape (blocks, block).
    """
    total = 0.0
    for batch in blocks.split(EVAL_BATCH):
        total += float(sequence_losses(model(input_ids=batch, use_cache=False).logits, batch).double().sum())
    return total / blocks[:, 1:].numel()


class Run:
    """
    A run of a study.

    Args:
        setting ([`Setting`]):
            What to train.
        data ([`StudyData`]):
            The blocks.
        preset (`str`):
            Name or folder of the model's configuration.
        loss (`Callable[[nn.Module, torch.Tensor], torch.Tensor]`, *optional*):
            The loss, compiled say.
    """

    def __init__(
        self,
        setting: Setting,
        data: StudyData,
        preset: str,
        loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = mean_loss,
    ) -> None:
        self.setting = setting
        self.data = data
        self.loss = loss
        self.model = make_model(preset, setting, data.vocab_size)
        self.num_parameters = sum(param.numel() for param in self.model.parameters())
        self._losses: deque[float] = deque(maxlen=NUM_LAST_LOSSES)
        self._draw = batches(data.train, setting.batch_size, setting.seed)

    def train(self, tell: Callable[[int, float], None] = lambda step, loss: None) -> Result:
        """
        Trains and evaluates.

        Args:
            tell (`Callable[[int, float], None]`, *optional*):
                Told the number of steps behind and the loss of the last one.

        Returns:
            [`Result`]: What came of it.
        """
        started = time.perf_counter()
        slow_bytes = self._train_groups(tell) if self.setting.mode == "federated" else self._train_one(tell)
        eval_loss = evaluate(self.model, self.data.evaluation)
        train_loss = sum(self._losses) / len(self._losses)
        return Result(
            self.setting,
            eval_loss if math.isfinite(eval_loss) else None,
            train_loss if math.isfinite(train_loss) else None,
            slow_bytes,
            self._bytes_of_steps,
            round(time.perf_counter() - started, 1),
            self.num_parameters,
            datetime.date.today().isoformat(),
            torch.__version__,
        )

    @property
    def _bytes_of_steps(self) -> int:
        """Of synchronous steps: a ring of G sends 2N(G-1)/G of the N bytes of a gradient in each."""
        groups = self.setting.num_groups
        return 2 * 4 * self.num_parameters * (groups - 1) // groups * self.setting.max_steps

    def _train_one(self, tell: Callable[[int, float], None]) -> int:
        setting = self.setting
        alone = setting.mode == "alone"
        optimizer, scheduler = self._make_optimizer(self.model.parameters())
        for step in range(setting.max_steps):
            batch = next(self._draw)
            if alone:
                batch = batch.chunk(setting.num_groups)[0]
            loss = self.loss(self.model, batch)
            loss.backward()
            self._step(self.model, optimizer, scheduler)
            self._losses.append(float(loss.detach()))
            tell(step + 1, self._losses[-1])
        return 0 if alone else self._bytes_of_steps

    def _train_groups(self, tell: Callable[[int, float], None]) -> int:
        setting = self.setting
        schedulers = []

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            inner, scheduler = self._make_optimizer(parameters)
            schedulers.append(scheduler)
            return inner

        simulation = Simulation(self.model, setting.config(), optimizer, num_training_steps=setting.max_steps)
        sent = 0
        for step in range(setting.max_steps):
            losses = []
            for group, part in zip(simulation.groups, next(self._draw).chunk(setting.num_groups), strict=True):
                loss = self.loss(group.model, part)
                loss.backward()
                losses.append(float(loss.detach()))
            simulation.average_gradients()
            for group, scheduler in zip(simulation.groups, schedulers, strict=True):
                self._step(group.model, group.optimizer, scheduler)
                group.count_step(losses[group.index])
            metrics = simulation.step()
            sent += _bytes_sent(metrics)
            self._losses.append(sum(losses) / len(losses))
            tell(step + 1, self._losses[-1])
        return sent + _bytes_sent(simulation.finish())

    def _make_optimizer(self, parameters: Any) -> tuple[torch.optim.Optimizer, Any]:
        setting = self.setting
        optimizer = torch.optim.AdamW(
            parameters,
            lr=setting.learning_rate,
            betas=(setting.adam_beta1, setting.adam_beta2),
            weight_decay=setting.weight_decay,
            fused=True,
        )
        return optimizer, get_scheduler(setting.lr_scheduler_type, optimizer, setting.warmup_steps, setting.max_steps)

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), self.setting.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def _bytes_sent(metrics: RoundMetrics | None) -> int:
    """Of a round, and of those that were taken in with it."""
    return 0 if metrics is None else sum(each.bytes_sent for each in (*metrics.earlier, metrics))
