"""TRL's trainers gather in the loss, several times a micro-step: nothing crosses, and what they log is of all groups."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.folders import save_tiny_model, sentences
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.pool import WorkerPool


pytest.importorskip("trl", reason="needs the extra `trl`")
HSDP = fsdp_launch_env(2, 2)
SYNC_EVERY = 3
NUM_STEPS = 6
BETA = 0.1


def _preferences(number: int) -> list[dict[str, str]]:
    rows = zip(sentences(number, 0, 3), sentences(number, 1, 2), sentences(number, 2, 4), strict=True)
    return [{"prompt": prompt, "chosen": " " + good, "rejected": " " + bad} for prompt, good, bad in rows]


def _make_trainer(folder: str, kind: str, model_folder: str) -> Any:
    """A trainer of TRL with the callback."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_fedshard import FedAvgCallback

    shared: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "max_steps": NUM_STEPS,
        "logging_steps": SYNC_EVERY,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_length": 64,
    }
    # As long as the loss is the mean over tokens, sentences of unequal length tell a group's count from the world's.
    texts = [text[: 10 + 7 * (number % 6)] for number, text in enumerate(sentences(64))]
    if kind == "sft":
        trainer_class: Any = trl.SFTTrainer
        args: Any = trl.SFTConfig(**shared)
        data = Dataset.from_list([{"text": text} for text in texts])
    else:
        trainer_class, args = trl.DPOTrainer, trl.DPOConfig(beta=BETA, **shared)
        data = Dataset.from_list(_preferences(64))
    return trainer_class(
        model=AutoModelForCausalLM.from_pretrained(model_folder),
        args=args,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(model_folder),
        callbacks=[FedAvgCallback(num_groups=2, sync_every=SYNC_EVERY)],
    )


def _run(folder: str, kind: str, model_folder: str) -> dict[str, Any]:
    """Trains and keeps what each rank was trained on, and the model ahead of each step."""
    from hf_fedshard import cpu
    from tests.harness.models import full_state
    from tests.harness.timeline import Timeline
    from tests.harness.tiny_trainer import forget_meshes

    forget_meshes()
    cpu.install()
    trainer = _make_trainer(folder, kind, model_folder)
    batches: list[dict[str, torch.Tensor]] = []
    states: list[dict[str, torch.Tensor]] = []
    stock = trainer.training_step

    def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        states.append(full_state(model))
        batches.append({name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)})
        return stock(model, inputs, *args, **kwargs)

    trainer.training_step = training_step
    timeline = Timeline(num_groups=2)
    with timeline.of(trainer):
        trainer.train()
    inside = timeline.inside_rounds()
    return {
        "leaks": timeline.crossing_inside_rounds(),
        "gathers": len(inside) / (2 * NUM_STEPS),
        "borders": timeline.borders,
        "logs": [logs for logs in trainer.state.log_history if "loss" in logs],
        "batches": batches,
        "states": states,
    }


def _outputs(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the next tokens, (batch, length - 1, vocabulary), the tokens, and whether each counts."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=mask).logits
    labels = batch["labels"] if "labels" in batch else batch["input_ids"]
    counted = (labels[:, 1:] != -100) & (mask[:, 1:] == 1)
    return logits[:, :-1].log_softmax(-1), batch["input_ids"][:, 1:], counted


def _sft(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """One micro-step of a group."""
    tokens, right, entropy, seen = 0, 0, 0.0, 0
    for batch in batches:
        logps, targets, counted = _outputs(model, batch)
        tokens += int(counted.sum())
        right += int(((logps.argmax(-1) == targets) & counted).sum())
        entropy += float((-(logps.exp() * logps).sum(-1) * counted).sum())
        seen += int(batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum())
    return {"mean_token_accuracy": right / tokens, "entropy": entropy / tokens, "seen": seen}


def _dpo(model: nn.Module, batches: list[dict[str, torch.Tensor]], reference: nn.Module) -> dict[str, float]:
    """One micro-step of a group: each batch holds the chosen answers, then the rejected ones."""
    found: dict[str, list[float]] = {"rewards/chosen": [], "rewards/rejected": [], "logps/chosen": []}
    seen = 0
    for batch in batches:
        half = len(batch["input_ids"]) // 2
        sums = []
        for net in (model, reference):
            logps, targets, counted = _outputs(net, batch)
            counted = counted & (batch["completion_mask"][:, 1:] == 1)
            sums.append((logps.gather(-1, targets[..., None])[..., 0] * counted).sum(1))
        reward = BETA * (sums[0] - sums[1])
        found["rewards/chosen"] += reward[:half].tolist()
        found["rewards/rejected"] += reward[half:].tolist()
        found["logps/chosen"] += sums[0][:half].tolist()
        seen += int(batch["attention_mask"].sum())
    means = {name: sum(values) / len(values) for name, values in found.items()}
    margins = [a - b for a, b in zip(found["rewards/chosen"], found["rewards/rejected"], strict=True)]
    means["rewards/margins"] = sum(margins) / len(margins)
    means["rewards/accuracies"] = sum(margin > 0 for margin in margins) / len(margins)
    return means | {"seen": seen}


@pytest.mark.parametrize("kind", ["sft", pytest.param("dpo", marks=pytest.mark.slow)])
def test_trl(world4: WorkerPool, tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_tiny_model(tmp_path / "model")
    ranks = world4.run(_run, str(tmp_path), kind, str(folder), env=HSDP, init_group=False)
    for rank in ranks:
        assert rank["leaks"] == []
        assert rank["borders"] == [3, 6]
        # The gradient's norm is the group's own, and so are some times of a round.
        for ours, first in zip(rank["logs"], ranks[0]["logs"], strict=True):
            names = [name for name in ours if name != "grad_norm" and not name.startswith("fedshard/")]
            assert [ours[name] for name in names] == [first[name] for name in names]
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    model = copy.deepcopy(reference)
    seen = 0
    for border, logs in enumerate(ranks[0]["logs"]):
        expected: dict[str, list[float]] = {}
        for step in range(2 * SYNC_EVERY * border, 2 * SYNC_EVERY * (border + 1)):
            for group in (ranks[:2], ranks[2:]):
                # TRL gives the model another class on the way; names are Llama's.
                model.load_state_dict(group[0]["states"][step], strict=False)
                micro = [rank["batches"][step] for rank in group]
                values = _sft(model, micro) if kind == "sft" else _dpo(model, micro, reference)
                seen += values.pop("seen")
                for name, value in values.items():
                    expected.setdefault(name, []).append(value)
        for name, column in expected.items():
            assert logs[name] == pytest.approx(math.fsum(column) / len(column), rel=1e-4, abs=1e-5), name
        assert logs["num_tokens"] == seen
