"""The demo's own command, its collectives counted between the borders of its rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.folders import WORDS
from tests.harness.launch import accelerate_launch


def write_corpus(path: Path) -> None:
    """Ten years of texts: those of the year ending in 7 are held out, as in the demo."""
    rows = []
    for number in range(120):
        text = " ".join(WORDS[(number * step + step) % len(WORDS)] for step in range(40))
        rows.append(json.dumps({"text": text, "year": 1990 + number % 10}))
    path.write_text("\n".join(rows))


@pytest.mark.parametrize("streaming", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_demo_command(root: Path, tmp_path: Path, streaming: bool) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    changes = ["--output_dir", str(tmp_path / "run"), "--train_file", str(tmp_path / "corpus.jsonl")]
    changes += [
        "--block_size",
        "32",
        "--per_device_train_batch_size",
        "2",
        "--max_steps",
        "12",
        "--logging_steps",
        "3",
    ]
    changes += ["--eval_strategy", "steps", "--eval_steps", "5", "--gradient_accumulation_steps", "2"]
    accelerate_launch(
        root / "accelerate_configs" / "cpu_fl_fsdp_4proc.yaml",
        root / "tests" / "scripts" / "record_run.py",
        str(tmp_path),
        str(root / "recipes" / "pretrain_clm.py"),
        *["--args_file", str(root / "recipes" / "presets" / "demo.yaml")],
        *changes,
        *(["--streaming"] if streaming else []),
        env={"TORCH_FR_BUFFER_SIZE": "20000"},
        cwd=root,
        limit_seconds=280,
    ).check()
    for rank in range(4):
        result = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert not result["leaks"], f"rank {rank}\n" + "\n".join(result["leaks"][:3])
        assert result["steps"] == 12
        assert result["borders"] == [8, 12]
        assert result["inside"] > 100
        assert result["crossing"] > 0
        # An epoch ends inside a round: reshuffling must not wait for the other group.
        assert any(0 < step < 20 and step not in result["borders"] for step in result["epoch_ends"])
    assert (tmp_path / "run" / "model.safetensors").exists()
