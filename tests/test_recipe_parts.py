"""What the recipes are made of, each against what it should be by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness.folders import save_tiny_model


METRICS = Path(__file__).resolve().parent.parent / "recipes" / "metrics"
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "who?"},
    {"role": "assistant", "content": "me"},
    {"role": "user", "content": "when?"},
    {"role": "assistant", "content": "now"},
]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("chat"))


def test_accuracy_and_f1() -> None:
    import evaluate

    accuracy = evaluate.load(str(METRICS / "accuracy"), keep_in_memory=True)
    f1 = evaluate.load(str(METRICS / "f1"), keep_in_memory=True)
    pairs = {"predictions": [0, 1, 1, 2, 2, 2], "references": [0, 1, 2, 2, 2, 0]}
    assert accuracy.compute(**pairs) == {"accuracy": pytest.approx(4 / 6)}
    # By class: 2*1/(1+2), 2*1/(2+1), 2*2/(3+3).
    assert f1.compute(average="macro", **pairs)["f1"] == pytest.approx(np.mean([2 / 3, 2 / 3, 4 / 6]))
    assert f1.compute(average="micro", **pairs)["f1"] == pytest.approx(4 / 6)
    assert f1.compute(predictions=[0, 1, 1], references=[1, 1, 0])["f1"] == pytest.approx(0.5)
    assert f1.compute(predictions=[0, 0], references=[0, 0])["f1"] == 0
    with pytest.raises(ValueError, match="average is one of"):
        f1.compute(average="weighted", **pairs)


def test_labels_are_the_answers(chat_model: Path) -> None:
    from transformers import AutoTokenizer

    from sft_data import IGNORED, encode_conversation

    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    row = encode_conversation(CHAT, tokenizer, 1000)
    text = "<|system|>be kind</s><|user|>who?</s><|assistant|>me</s><|user|>when?</s><|assistant|>now</s>"
    assert tokenizer.decode(row["input_ids"]) == text
    assert len(row["labels"]) == len(row["input_ids"])
    answers = [i for i, label in zip(row["input_ids"], row["labels"], strict=True) if label != IGNORED]
    assert tokenizer.decode(answers) == "me</s>now</s>"
    assert [label for label in row["labels"] if label != IGNORED] == answers
    cut = encode_conversation(CHAT, tokenizer, 40)
    assert len(cut["input_ids"]) == len(cut["labels"]) == 40


def test_conversations_without_an_answer_are_left_out(chat_model: Path) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer

    from sft_data import encode

    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    rows = Dataset.from_list([{"messages": CHAT}, {"messages": CHAT[:2]}])
    assert len(encode(rows, "messages", tokenizer, 1000)) == 1
    with pytest.raises(ValueError, match="None of the 2 conversations has an answer inside 20 tokens"):
        encode(rows, "messages", tokenizer, 20)


def test_packed_conversations_do_not_see_each_other(chat_model: Path) -> None:
    """Logits and loss of a block are those of its conversations, one by one."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sft_data import IGNORED, PadRight, encode, pack

    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    model = AutoModelForCausalLM.from_pretrained(chat_model).eval()
    model.config.use_cache = False  # as Trainer does: attention is told apart by positions only without a cache
    chats = [CHAT[1:3], CHAT[3:5], CHAT]
    rows = encode(Dataset.from_list([{"messages": chat} for chat in chats]), "messages", tokenizer, 128)
    lengths = [len(row["input_ids"]) for row in rows]
    blocks = pack(rows, lengths[0] + lengths[1])
    assert [len(block["input_ids"]) for block in blocks] == [lengths[0] + lengths[1], lengths[2]]
    assert sum(label != IGNORED for block in blocks for label in block["labels"]) == sum(
        label != IGNORED for row in rows for label in row["labels"]
    )
    collate = PadRight(tokenizer.pad_token_id)
    packed = collate(list(blocks))
    with torch.no_grad():
        ours = model(**packed)
        alone = [model(**collate([row])) for row in rows]
        padded = model(**collate(list(rows)))
    torch.testing.assert_close(ours.logits[0, : lengths[0]], alone[0].logits[0])
    torch.testing.assert_close(ours.logits[0, lengths[0] : lengths[0] + lengths[1]], alone[1].logits[0])
    torch.testing.assert_close(ours.logits[1, : lengths[2]], alone[2].logits[0])
    torch.testing.assert_close(padded.logits[0, : lengths[0]], alone[0].logits[0])
    torch.testing.assert_close(ours.loss, padded.loss)


def test_parts() -> None:
    from datasets import Dataset

    from clm_parts import name_parts, split_parts

    assert name_parts([1900]) == ["before_1900", "from_1900"]
    assert name_parts([1, 2.5]) == ["before_1", "from_1_before_2.5", "from_2.5"]
    rows = Dataset.from_list([{"year": year} for year in (1950, 1899, 1900, 1800)])
    parts = split_parts(rows, "year", [1900])
    assert {name: part["year"][:] for name, part in parts.items()} == {
        "before_1900": [1899, 1800],
        "from_1900": [1950, 1900],
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--part_column", "year"], "--part_column and --part_bounds go together"),
        (["--part_column", "year", "--part_bounds", "3", "2"], "--part_bounds rise"),
        (["--part_column", "year", "--part_bounds", "3", "--streaming"], "not streamed"),
        (["--block_size", "1"], "--block_size is at least 2"),
        (["--holdout_column", "year"], "--holdout_column and --holdout_pattern go together"),
    ],
)
def test_wrong_arguments(words: list[str], message: str) -> None:
    from clm_arguments import parse_arguments

    with pytest.raises(ValueError, match=message):
        parse_arguments(["--preset", "demo", "--train_tokenizer", "--train_file", "a.txt", *words])


@pytest.mark.parametrize(("given", "period"), [("auto", "auto"), ("8x100,16", "8x100,16"), ("4", 4)])
def test_every_kind_of_period(given: str, period: str | int) -> None:
    from clm_arguments import parse_arguments
    from recipe_run import make_callbacks

    words = ["--preset", "demo", "--train_tokenizer", "--train_file", "a.txt", "--sync_every", given]
    (callback,) = make_callbacks(parse_arguments(words).federation)
    assert callback.config.sync_every == period


def test_which_checkpoint() -> None:
    from recipe_run import checkpoint_to_resume

    given = ["True", "true", True, "False", None, "runs/a/checkpoint-4"]
    assert [checkpoint_to_resume(argument) for argument in given] == [True, True, True, None, None, given[-1]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume_from_checkpoint", "True"], "such as out/checkpoints/checkpoint_1, got 'True'"),
        (["--resume_from_checkpoint", "out"], "such as out/checkpoints/checkpoint_1, got 'out'"),
        (["--no_federated", "--checkpointing_rounds", "2"], "Give --checkpointing_rounds 0"),
        (["--no_federated", "--resume_from_checkpoint", "a/checkpoint_1"], "no --resume_from_checkpoint"),
        (["--streaming"], "options of pretrain_clm.py"),
    ],
)
def test_wrong_arguments_of_the_loop(words: list[str], message: str) -> None:
    from loop_arguments import parse_arguments

    always = ["--preset", "demo", "--train_tokenizer", "--train_file", "a.txt", "--output_dir", "out"]
    with pytest.raises(ValueError, match=message):
        parse_arguments([*always, *words])


class _Square(torch.nn.Module):
    """Its loss is the square of a batch's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.weight * input_ids.double().mean() ** 2)


def test_the_loop_counts_all_of_a_step() -> None:
    """Five micro-batches of 1, 2, 3, 4 and 5 tokens, two in a step."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from loop_arguments import LoopArguments
    from pretrain_clm_no_trainer import train

    told: list[tuple[float, int]] = []

    class Told:
        def step(self, loss: torch.Tensor, tokens: int) -> None:
            told.append((float(loss), tokens))

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    try:
        model = _Square()
        rows = [{"input_ids": torch.full((number,), number)} for number in range(1, 6)]
        loader = torch.utils.data.DataLoader(rows, batch_size=1)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        prepared = accelerator.prepare(model, optimizer, loader, scheduler)
        train(accelerator, prepared, Told(), LoopArguments("out", max_train_steps=4))  # type: ignore[arg-type]
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    assert told == [(2.5, 3), (12.5, 7), (25.0, 5), (2.5, 3)]


def test_required_arguments_may_stand_in_the_file(tmp_path: Path) -> None:
    from loop_arguments import parse_arguments

    path = tmp_path / "a.yaml"
    path.write_text("preset: demo\ntrain_tokenizer: true\ntrain_file: a.txt\noutput_dir: there\n")
    assert parse_arguments(["--args_file", str(path)])[3].output_dir == "there"
    with pytest.raises(SystemExit):
        parse_arguments(["--preset", "demo", "--train_tokenizer", "--train_file", "a.txt"])


def test_tasks_of_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sotu_tasks

    def made(folder: Path) -> dict[str, list[dict[str, Any]]]:
        monkeypatch.setattr("sys.argv", ["sotu_tasks.py", str(folder)])
        sotu_tasks.main()
        return {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()}

    files = made(tmp_path / "a")
    assert files == made(tmp_path / "b")
    assert set(files) == {f"{task}-{split}.jsonl" for task in ("era", "chat") for split in ("train", "test")}
    assert {row["label"] for row in files["era-test.jsonl"]} == set(sotu_tasks.ERAS.values())
    # The two splits share no address, hence no year.
    years = [
        {row["messages"][1]["content"][-5:-1] for row in files[f"chat-{split}.jsonl"]} for split in ("train", "test")
    ]
    assert not years[0] & years[1]
    assert all(year.endswith("7") for year in years[1])
