"""Evaluation, prediction and saving of a federated Trainer, before, in and after training."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, TrainingArguments

from hf_fedshard import FederatedFSDPPlugin
from tests.harness.data import IGNORED_LABEL, ListDataset, collate, token_samples
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.models import tiny_llama
from tests.harness.pool import WorkerPool
from tests.harness.tiny_trainer import History, forget_meshes, tiny_trainer
from tests.test_trainer_lifecycle import is_one_model, num_rounds, run


NUM_EVAL = 6  # of 4 ranks: two of the second batch's are repeats, which must not count


def mean_logits(prediction: Any) -> dict[str, float]:
    return {"num": len(prediction.predictions), "mean": float(np.mean(prediction.predictions))}


def evaluate_and_predict(folder: str) -> Any:
    forget_meshes()
    trainer = tiny_trainer(
        folder, eval_samples=NUM_EVAL, max_steps=5, options={"compute_metrics": mean_logits}, eval_accumulation_steps=1
    )
    # Trainer and Accelerate cannot do this with FSDP2, with or without a federation; it must not spoil the training.
    with pytest.raises(ValueError, match="a model and optimizer must be passed together"):
        trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    predicted = trainer.predict(trainer.eval_dataset)
    trainer.save_model(folder)
    return after, predicted.metrics, predicted.predictions.shape, is_one_model(trainer), num_rounds(trainer)


@torch.no_grad()
def reference_loss(model: Any) -> float:
    """
    What Trainer reports: in each step the losses are divided by the tokens of the whole world's batch, not of a group's.
    """
    samples = token_samples(NUM_EVAL, seed=1)
    losses: list[float] = []
    for first in (0, 4):
        # The last batch is filled up with the first samples.
        batch = [samples[(first + rank) % NUM_EVAL] for rank in range(4)]
        tokens = [sum(label != IGNORED_LABEL for label in sample["labels"][1:]) for sample in batch]
        means = [float(model.eval()(**collate([sample])).loss) for sample in batch]
        losses += [4 * mean * number / sum(tokens) for mean, number in zip(means, tokens, strict=True)]
    return float(np.mean(losses[:NUM_EVAL]))


@pytest.mark.parametrize("state_dict_type", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_after_training(world4: WorkerPool, tmp_path: Path, state_dict_type: str) -> None:
    env = fsdp_launch_env(2, 2, state_dict_type=state_dict_type)
    results = run(world4, evaluate_and_predict, str(tmp_path), env=env)
    final = AutoModelForCausalLM.from_pretrained(tmp_path)
    for after, predicted, shape, one_model, rounds in results:
        assert after["eval_loss"] == pytest.approx(reference_loss(final), rel=1e-4)
        assert predicted["test_loss"] == pytest.approx(after["eval_loss"], rel=1e-6)
        assert after["eval_mean"] == pytest.approx(results[0][0]["eval_mean"], rel=1e-6)
        assert after["eval_num"] == shape[0] == NUM_EVAL
        assert one_model
        assert rounds == 2


def evaluate_on_start(folder: str) -> Any:
    forget_meshes()
    history = History()
    trainer = tiny_trainer(
        folder,
        eval_samples=NUM_EVAL,
        max_steps=5,
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=2,
        after=(history,),
    )
    trainer.train()
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    return history.evaluated, losses, is_one_model(trainer)


def test_eval_on_start(world4: WorkerPool, tmp_path: Path) -> None:
    for evaluated, losses, one_model in run(world4, evaluate_on_start, str(tmp_path)):
        assert evaluated == [0, 4, 5]
        assert losses[0] == pytest.approx(reference_loss(tiny_llama()), rel=1e-4)
        assert losses[-1] < losses[0]
        assert one_model


def arguments_with_our_config(folder: str) -> Any:
    forget_meshes()
    plugin = FederatedFSDPPlugin(num_groups=2, sync_every=4)
    trainer = tiny_trainer(
        folder, max_steps=5, save_strategy="steps", save_steps=4, parallelism_config=plugin.parallelism_config
    )
    trainer.train()
    args = trainer.args
    again = pickle.loads(pickle.dumps(args))
    return (
        is_one_model(trainer),
        num_rounds(trainer),
        again.parallelism_config.to_json(),
        copy.deepcopy(args).parallelism_config is args.parallelism_config,
        args.to_json_string() != "",
    )


def test_parallelism_config_in_the_arguments(world4: WorkerPool, tmp_path: Path) -> None:
    for one_model, rounds, sizes, same, as_json in run(world4, arguments_with_our_config, str(tmp_path)):
        assert one_model
        assert rounds == 2
        assert {name: sizes[name] for name in ("num_groups", "dp_replicate_size", "dp_shard_size")} == {
            "num_groups": 2,
            "dp_replicate_size": 2,
            "dp_shard_size": 2,
        }
        assert same
        assert as_json
    saved = torch.load(tmp_path / "checkpoint-4" / "training_args.bin", weights_only=False)
    assert isinstance(saved, TrainingArguments)
    assert saved.max_steps == 5


def cross_entropy_sum(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A `compute_loss_func`, which gets the group's count as its argument."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


def own_loss(folder: str) -> Any:
    forget_meshes()
    trainer = tiny_trainer(
        folder,
        max_steps=4,
        logging_strategy="steps",
        logging_steps=4,
        train_dataset=ListDataset(token_samples(24)),
        options={"compute_loss_func": cross_entropy_sum},
    )
    stock = tiny_trainer(folder, max_steps=4, logging_strategy="steps", logging_steps=4)
    losses = []
    for each in (trainer, stock):
        each.train()
        losses += [row["loss"] for row in each.state.log_history if "loss" in row]
    return losses, is_one_model(trainer)


def test_own_loss_function_is_the_models(world4: WorkerPool, tmp_path: Path) -> None:
    for losses, one_model in run(world4, own_loss, str(tmp_path)):
        assert len(losses) == 2
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        assert math.isfinite(losses[0])
        assert one_model
