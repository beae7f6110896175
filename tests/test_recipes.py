"""The recipes on tiny models and four processes, federated and synchronous."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.folders import save_tiny_model, sentences, write_rows
from tests.harness.launch_env import launch_env
from tests.harness.pool import WorkerPool
from tests.harness.recipes import run_recipe


ROOT = Path(__file__).resolve().parent.parent
TRAINER = [
    "--use_cpu",
    "--report_to",
    "none",
    "--save_strategy",
    "no",
    "--disable_tqdm",
    "True",
    "--per_device_train_batch_size",
    "2",
]


def _run(
    world: WorkerPool,
    folder: Path,
    name: str,
    *words: str,
    wrap: str | None = None,
    record: bool = False,
    variables: dict[str, str] | None = None,
) -> Any:
    env = launch_env(ROOT / "accelerate_configs" / "cpu_fl_fsdp_4proc.yaml") | {"ACCELERATE_USE_CPU": "true"}
    env |= variables or {}
    if wrap is not None:
        env["FSDP_TRANSFORMER_CLS_TO_WRAP"] = wrap
    results = world.run(run_recipe, name, list(words), str(folder), record=record, env=env, init_group=False)
    if record:
        assert results == [[]] * 4
    return json.loads((folder / "out" / "all_results.json").read_text())


def _rounds(folder: Path) -> list[int]:
    history = json.loads((folder / "out" / "trainer_state.json").read_text())["log_history"]
    return [logs["fedshard/round"] for logs in history if "fedshard/round" in logs]


@pytest.mark.parametrize("federated", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_classification(world4: WorkerPool, tmp_path: Path, federated: bool) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    save_tiny_model(tmp_path / "model", "bert")
    rows = [{"text": text, "label": "peace" if "peace" in text else "none"} for text in sentences(160, length=6)]
    write_rows(tmp_path / "rows.jsonl", rows)
    words = ["--model_name_or_path", "model", "--train_file", "rows.jsonl", "--validation_fraction", "0.2"]
    words += ["--max_steps", "10", "--sync_every", "4", "--output_dir", "out", *TRAINER, "--logging_steps", "4"]
    words += [] if federated else ["--no_federated"]
    results = _run(world4, tmp_path, "classify_sequences", *words, wrap="BertLayer", record=federated)
    assert _rounds(tmp_path) == ([1, 2, 3] if federated else [])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert model.config.id2label == {0: "none", 1: "peace"}
    # The figures are those of the model that was saved, on the rows that were held out.
    from datasets import Dataset

    held_out = Dataset.from_list(rows).train_test_split(test_size=0.2, seed=42)["test"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        logits = model(**tokenizer(held_out["text"][:], padding=True, return_tensors="pt")).logits
    predicted, true = logits.argmax(1), torch.tensor([label == "peace" for label in held_out["label"]]).long()
    assert results["eval_accuracy"] == pytest.approx((predicted == true).double().mean().item())
    hits = (predicted & true).sum().item()
    assert results["eval_f1"] == pytest.approx(2 * hits / max((predicted.sum() + true.sum()).item(), 1))


def _chats(folder: Path) -> None:
    def row(text: str, number: int) -> dict[str, Any]:
        question = {"role": "user", "content": text}
        return {"messages": [question, {"role": "assistant", "content": f"no {number % 3}"}]}

    for name, seed in (("train", 0), ("test", 1)):
        rows = [row(text, number) for number, text in enumerate(sentences(48, seed, length=5))]
        write_rows(folder / f"{name}.jsonl", rows)


@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.slow), "lora"])
def test_chat(world4: WorkerPool, tmp_path: Path, kind: str) -> None:
    """Full and padded, LoRA and packed. Adapters merge into a model with the perplexity that was reported."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from merge_adapter import merge
    from sft_data import PadRight, encode

    save_tiny_model(tmp_path / "model")
    _chats(tmp_path)
    words = ["--model_name_or_path", str(tmp_path / "model"), "--train_file", "train.jsonl"]
    words += ["--validation_file", "test.jsonl", "--max_length", "100", "--max_steps", "12", "--sync_every", "4"]
    words += [
        "--output_dir",
        "out",
        "--learning_rate",
        "1e-2",
        "--logging_steps",
        "4",
        "--max_eval_rows",
        "26",
        *TRAINER,
    ]
    words += ["--lora", "--packing"] if kind == "lora" else []
    results = _run(world4, tmp_path, "sft_chat", *words, record=True)
    assert _rounds(tmp_path) == [1, 2, 3]
    assert results["eval_perplexity"] < 0.7 * results["start_perplexity"]
    folder = tmp_path / "out"
    if kind == "lora":
        assert not (folder / "model.safetensors").exists()
        folder = tmp_path / "merged"
        merge(tmp_path / "out", folder)
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    rows = load_dataset("json", data_files=str(tmp_path / "test.jsonl"), split="train").select(range(26))
    batch = PadRight(0)(list(encode(rows, "messages", tokenizer, 100)))
    with torch.no_grad():
        loss = model.eval()(**batch).loss
    assert results["eval_perplexity"] == pytest.approx(loss.exp().item(), rel=1e-4)


def _corpus(folder: Path) -> None:
    """Two parts without a word in common, so that a model of one knows nothing of the other."""
    rows = []
    for number in range(80):
        words = ("aa bb cc dd ee" if number % 2 else "vv ww xx yy zz").split()
        text = " ".join(words[(number + step * step) % 5] for step in range(30))
        rows.append({"text": text, "year": (1800 if number % 2 else 1950) + number % 10})
    write_rows(folder / "corpus.jsonl", rows)


def test_parts_of_the_data_by_group(world4: WorkerPool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_tiny_model(tmp_path / "model")
    _corpus(tmp_path)
    words = ["--model_name_or_path", "model", "--train_file", "corpus.jsonl", "--holdout_column", "year"]
    words += ["--holdout_pattern", "[67]$", "--part_column", "year", "--part_bounds", "1900", "--block_size", "32"]
    words += ["--max_steps", "16", "--sync_every", "8", "--learning_rate", "1e-2", "--output_dir", "out", *TRAINER]
    words += ["--per_device_eval_batch_size", "2"]
    results = _run(world4, tmp_path, "pretrain_clm", *words, record=True)
    assert _rounds(tmp_path) == [1, 2]
    for group, own, other in ((0, "before_1900", "from_1900"), (1, "from_1900", "before_1900")):
        # Each group's own model knows its part better than the other one.
        mine, foreign = (results[f"group{group}_{name}_perplexity"] for name in (own, other))
        assert mine < 0.8 * foreign
        assert mine < results[f"eval_{own}_perplexity"]
        assert results[f"eval_{own}_perplexity"] < results[f"start_{own}_perplexity"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.slow
def test_an_epoch_of_parts(world4: WorkerPool, tmp_path: Path) -> None:
    """One pass over the longest part by the ranks of its group; and as many parts as groups."""
    save_tiny_model(tmp_path / "model")
    text = "aa bb cc dd ee"
    rows = [{"text": text * 8, "year": year} for year in [1800] * 24 + [1950] * 4 + [1960] * 4]
    write_rows(tmp_path / "corpus.jsonl", rows)
    words = ["--model_name_or_path", "model", "--train_file", "corpus.jsonl", "--block_size", "32"]
    words += ["--part_column", "year", "--part_bounds", "1900", "--output_dir", "out", *TRAINER]
    words += ["--num_train_epochs", "1", "--sync_every", "8", "--logging_steps", "1"]
    _run(world4, tmp_path, "pretrain_clm", *words)
    # A byte is a token, and each text ends with one more.
    blocks = 24 * (8 * len(text) + 1) // 32
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == -(-blocks // (2 * 2))
    words += ["--part_bounds", "1900", "1955"]
    env = launch_env(ROOT / "accelerate_configs" / "cpu_fl_fsdp_4proc.yaml") | {"ACCELERATE_USE_CPU": "true"}
    errors = world4.run_failing(run_recipe, "pretrain_clm", words, str(tmp_path), env=env, init_group=False)
    assert all("holds data for 3 groups, but the federation has num_groups=2" in error.message for error in errors)


WHOLE = {"FEDSHARD_OVERLAP_STEPS": "3", "FEDSHARD_WIRE_FORMAT": "int8"}
FRAGMENTS = WHOLE | {"FEDSHARD_NUM_FRAGMENTS": "3", "FEDSHARD_OUTER_OPTIMIZER": "nesterov"}


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        pytest.param({}, ["checkpoint_1", "checkpoint_2"], id="blocking", marks=pytest.mark.slow),
        pytest.param(WHOLE, ["checkpoint_1"], id="beside the steps", marks=pytest.mark.slow),
        pytest.param(FRAGMENTS, ["checkpoint_1", "checkpoint_2"], id="in fragments", marks=pytest.mark.slow),
    ],
)
def test_loop_without_trainer(world4: WorkerPool, tmp_path: Path, variables: dict[str, str], names: list[str]) -> None:
    """An epoch and a half, accumulated; a resumed run ends where the uninterrupted one does."""
    from safetensors.torch import load_file

    _corpus(tmp_path)
    words = ["--preset", "demo", "--train_tokenizer", "--vocab_size", "300", "--train_file", "corpus.jsonl"]
    words += ["--holdout_column", "year", "--holdout_pattern", "7$", "--block_size", "32", "--use_cpu"]
    words += ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2", "--learning_rate", "5e-3"]
    words += ["--max_train_steps", "14", "--sync_every", "4", "--checkpointing_rounds", "1"]

    def run(*more: str) -> Any:
        name = "pretrain_clm_no_trainer"
        return _run(world4, tmp_path, name, *words, "--output_dir", "out", *more, variables=variables)

    whole = run()
    weights = load_file(tmp_path / "out" / "model.safetensors")
    checkpoints = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert checkpoints == ["checkpoint_1", "checkpoint_2"]
    (tmp_path / "out").rename(tmp_path / "whole")
    # In the first epoch, of 9 steps, and in the second one.
    for name in names:
        assert run("--resume_from_checkpoint", str(tmp_path / "whole" / "checkpoints" / name)) == whole
        for key, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
            assert torch.equal(tensor, weights[key]), f"{key} from {name}"
        shutil.rmtree(tmp_path / "out")
    if not variables:
        synchronous = run("--no_federated", "--checkpointing_rounds", "0")
        assert synchronous["eval_num_tokens"] == whole["eval_num_tokens"]


def test_loop_without_trainer_saves_between_averagings(world4: WorkerPool, tmp_path: Path) -> None:
    """With averagings in flight at the end of each round, every second round is saved, and no border is made elsewhere."""
    from hf_fedshard.checkpoint_layout import read_description

    _corpus(tmp_path)
    words = ["--preset", "demo", "--train_tokenizer", "--vocab_size", "300", "--train_file", "corpus.jsonl"]
    words += ["--block_size", "32", "--use_cpu", "--per_device_train_batch_size", "1", "--max_train_steps", "9"]
    words += ["--sync_every", "2", "--checkpointing_rounds", "2", "--output_dir", "out"]
    env = launch_env(ROOT / "accelerate_configs" / "cpu_fl_fsdp_4proc.yaml") | {"ACCELERATE_USE_CPU": "true"}
    env |= FRAGMENTS | {"FEDSHARD_OVERLAP_STEPS": "2", "FEDSHARD_NUM_FRAGMENTS": "2"}
    world4.run(run_recipe, "pretrain_clm_no_trainer", words, str(tmp_path), env=env, init_group=False)
    folders = sorted((tmp_path / "out" / "checkpoints").iterdir())
    saved = [read_description(folder)["progress"] for folder in folders]
    assert [(progress["round"], progress["steps"]) for progress in saved] == [(2, 4), (4, 8)]
