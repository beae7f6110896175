"""The tokens, labels and samples in the batches of a Trainer's steps, for the log and the groups' weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainerState

from .config import FederationConfig
from .mesh import FederationMesh
from .rounds import Rounds
from .weights import count_batch


class BatchCounts:
    """
    Counts what this rank draws, and hands it to the rounds with each step that was made.

    Args:
        trainer (`Trainer`):
            The Trainer.
        mesh ([`FederationMesh`]):
            The federation.
        config ([`FederationConfig`]):
            Its settings.
    """

    def __init__(self, trainer: Trainer, mesh: FederationMesh, config: FederationConfig) -> None:
        self.trainer = trainer
        self.config = config
        self._tokens = self._samples = self._labels = 0.0
        inner = mesh.layout.inner
        self._num_copies = inner.get("tp", 1) * inner.get("cp", 1)
        self._counted = trainer.state.global_step

    def add(self, batches: list[Any]) -> None:
        """
        Counts this rank's samples and input tokens.

        Args:
            batches (`list`):
                The batches of the coming optimizer step.
        """
        name = getattr(self.trainer.model, "main_input_name", "input_ids")
        # By which Trainer itself counts the tokens of a loss; earlier ones take every model for a causal one.
        shifts_labels = getattr(self.trainer, "_loss_shifts_labels", True)
        for batch in batches:
            tokens = batch.get(name) if hasattr(batch, "get") else None
            # Ranks of a tensor or context parallel axis are given the same batch.
            if isinstance(tokens, torch.Tensor):
                self._tokens += tokens.numel() / self._num_copies
            samples, labels = count_batch(batch, self.config.group_weights != "uniform", shifts_labels)
            self._samples += samples / self._num_copies
            self._labels += (labels or 0) / self._num_copies

    def count_steps(self, rounds: Rounds, state: TrainerState) -> None:
        """
        Counts the steps that Trainer has made since the last call.

        Args:
            rounds ([`Rounds`]):
                Are told of each.
            state (`TrainerState`):
                Trainer's.
        """
        # By `global_step`, not by updates: a gradient scaler may skip an update in one group only.
        while self._counted < state.global_step:
            rounds.count_step(tokens=self._tokens, samples=self._samples, labels=self._labels)
            self._tokens = self._samples = self._labels = 0.0
            self._counted += 1
