"""What a Trainer leaves in its output folder, and what it accepts to resume from."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer

from hf_fedshard import CheckpointError, export_checkpoint
from hf_fedshard.manifest import find_damage
from hf_fedshard.tensor_store import stored_tensors
from tests.harness.checkpoint_runs import checkpoints, differences, make_trainer, state_of, train
from tests.harness.launch_env import fsdp_launch_env
from tests.harness.models import tiny_llama
from tests.harness.pool import WorkerPool
from tests.harness.tiny_trainer import forget_meshes


LIMIT = 240.0
FL_FSDP = fsdp_launch_env(2, 2)


def run(
    pool: WorkerPool, body: Any, folder: Path, *args: Any, env: dict[str, str] | None = None, **options: Any
) -> Any:
    return pool.run(body, str(folder), *args, env=env or FL_FSDP, init_group=False, limit_seconds=LIMIT, **options)


def fail(pool: WorkerPool, folder: Path, resume: Any = True, env: dict[str, str] | None = None, **options: Any) -> str:
    """Resumes, which must be refused on every rank alike."""
    errors = pool.run_failing(
        train, str(folder), resume, env=env or FL_FSDP, init_group=False, limit_seconds=LIMIT, **options
    )
    assert {error.type_name for error in errors} == {"CheckpointError"}
    assert len({error.message for error in errors}) == 1
    return errors[0].message


@pytest.fixture(scope="module")
def trained(world4: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run that has saved at steps 4 and 8, and at its end."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, run(world4, train, folder)


@pytest.fixture
def copy(trained: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of that run to be harmed."""
    return Path(shutil.copytree(trained[0], tmp_path / "copy"))


def test_what_is_on_disk(trained: tuple[Path, Any]) -> None:
    folder = trained[0]
    assert checkpoints(folder) == ["checkpoint-10", "checkpoint-4", "checkpoint-8"]
    checkpoint = folder / "checkpoint-8"
    assert find_damage(checkpoint) == []
    top = {path.name for path in checkpoint.iterdir()}
    assert top == {
        "config.json",
        "federation",
        "generation_config.json",
        "trainer_state.json",
        "training_args.bin",
        *(f"rng_state_{rank}.pth" for rank in range(4)),
    }
    weights = sum(4 * stored.shape.numel() for stored in stored_tensors(checkpoint / "federation/model").values())
    on_disk = sum(path.stat().st_size for path in (checkpoint / "federation/model").glob("*.distcp"))
    assert weights <= on_disk < 2 * weights, "the weights lie there once"
    files = sorted(path.name for path in (checkpoint / "federation/model").glob("*.distcp"))
    assert files == [f"__{rank}_0.distcp" for rank in range(4)], "all ranks have written"
    for group in range(2):
        assert len(list((checkpoint / f"federation/group_0000{group}").glob("*.distcp"))) == 2
    assert json.loads((checkpoint / "federation/federation.json").read_text())["round"] == 4
    assert not list(checkpoint.rglob(".metadata")), "the pickled index of torch"


def poisoned(folder: str) -> dict[str, Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("unpickled")

    with mock.patch("pickle.load", refuse), mock.patch("torch.distributed.checkpoint.filesystem.pickle.load", refuse):
        true_load = torch.load
        with mock.patch("torch.load", lambda *a, **k: true_load(*a, **k) if k["weights_only"] else refuse()):
            return train(folder, True)


def test_nothing_is_unpickled(world4: WorkerPool, copy: Path, trained: tuple[Path, Any]) -> None:
    shutil.rmtree(copy / "checkpoint-10")
    ranks = run(world4, poisoned, copy)
    assert not differences(ranks[0]["model"], trained[1][0]["model"])


@pytest.mark.parametrize("limit", [1, 2])
def test_rotation(world4: WorkerPool, tmp_path: Path, limit: int) -> None:
    run(world4, train, tmp_path, save_total_limit=limit, save_steps=2)
    assert checkpoints(tmp_path) == (["checkpoint-10"] if limit == 1 else ["checkpoint-10", "checkpoint-8"])


def best(folder: str, **options: Any) -> dict[str, Any]:
    forget_meshes()
    trainer = make_trainer(folder, save_steps=2, eval_strategy="steps", eval_steps=2, **options)
    losses = iter([3.0, 1.0, 2.0, 4.0, 5.0])
    original = trainer.evaluate

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) | {"eval_loss": next(losses)}

    trainer.evaluate = evaluate  # type: ignore[method-assign]
    trainer.train()
    result = {"model": state_of(trainer)["model"], "best": trainer.state.best_model_checkpoint}
    dist.barrier()
    return result


@pytest.mark.parametrize("options", [{}, {"kind": "lora"}], ids=["llama", "lora"])
def test_best_model_is_loaded_and_kept(world4: WorkerPool, tmp_path: Path, options: dict[str, Any]) -> None:
    settings = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 2}
    ranks = run(world4, best, tmp_path, **settings, **options)
    assert checkpoints(tmp_path) == ["checkpoint-10", "checkpoint-4"]
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert ranks[0]["best"] == state["best_model_checkpoint"] == str(tmp_path / "checkpoint-4")
    out = export_checkpoint(tmp_path / "checkpoint-4", tmp_path / "out")
    base = tiny_llama()
    model = PeftModel.from_pretrained(base, out) if options else AutoModelForCausalLM.from_pretrained(out)
    for rank in ranks:
        assert not differences(rank["model"], model.state_dict())


def test_save_only_model(world4: WorkerPool, tmp_path: Path) -> None:
    ranks = run(world4, train, tmp_path, save_only_model=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-10")
    assert not differences(loaded.state_dict(), ranks[0]["model"])
    assert "save_only_model" in fail(world4, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(export_checkpoint(tmp_path / "checkpoint-10", tmp_path / "out"))
    assert not differences(again.state_dict(), ranks[0]["model"])


HARMS: dict[str, Any] = {
    "federation/model/__2_0.distcp": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "federation/group_00001/__0_0.distcp": Path.unlink,
    "federation/group_00000/state.json": lambda path: path.write_bytes(path.read_bytes().replace(b"0.9", b"0.8")),
    "federation/manifest.json": Path.unlink,
    "rng_state_3.pth": Path.unlink,
    "federation/group_00000/__7_0.distcp": Path.touch,
}


@pytest.mark.parametrize("name", HARMS)
def test_damage_is_named(world4: WorkerPool, copy: Path, name: str) -> None:
    HARMS[name](copy / "checkpoint-10" / name)
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    for resume in (True, str(copy / "checkpoint-10")):
        message = fail(world4, copy, resume)
        assert f"{copy}/checkpoint-10" in message and name in message
        assert f"resume_from_checkpoint='{copy}/checkpoint-8'" in message
    shutil.rmtree(copy / "checkpoint-8")
    (copy / "checkpoint-4" / "trainer_state.json").unlink()
    assert "holds no other checkpoint" in fail(world4, copy)
    assert {path for path in before if "checkpoint-10" in str(path)} == set((copy / "checkpoint-10").rglob("*")) | {
        copy / "checkpoint-10"
    }


def stock(folder: str) -> None:
    """Federated training with the checkpoints of Trainer itself."""
    forget_meshes()
    trainer = make_trainer(folder, max_steps=4)
    for name in ("_save_checkpoint", "_save_optimizer_and_scheduler", "_save_scaler", "save_model"):
        setattr(trainer, name, getattr(Trainer, name).__get__(trainer))
    trainer.train()
    dist.barrier()


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_stock_checkpoint_is_recognised(world4: WorkerPool, tmp_path: Path, kind: str) -> None:
    run(world4, stock, tmp_path, env=fsdp_launch_env(2, 2, state_dict_type=kind))
    message = fail(world4, tmp_path)
    assert "checkpoint-4" in message and "optimizer is refused" in message and "from_pretrained" in message


def test_there_is_nothing(world4: WorkerPool, tmp_path: Path) -> None:
    assert "there is no such folder" in fail(world4, tmp_path, str(tmp_path / "checkpoint-3"))
    errors = world4.run_failing(train, str(tmp_path), True, env=FL_FSDP, init_group=False, limit_seconds=LIMIT)
    assert "No valid checkpoint found" in errors[0].message


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "optimizer": ({"optim": "sgd"}, "AdamW.* steps with SGD"),
    "parameters": ({"kind": "frozen"}, "model.embed_tokens.weight are trained in the checkpoint only"),
    "model": ({"kind": "lora"}, "is of another model"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_run_is_refused_by_name(world4: WorkerPool, trained: tuple[Path, Any], case: str) -> None:
    import re

    options, text = OTHERS[case]
    assert re.search(text, fail(world4, trained[0], **options), re.DOTALL)


def unreadable(folder: str, module: str, name: str) -> None:
    """One rank fails in what it reads by itself, with an error that is not of this package."""
    with contextlib.ExitStack() as stack:
        if os.environ["RANK"] == "1":
            broken = mock.Mock(side_effect=KeyError("last_epoch"))
            stack.enter_context(mock.patch.object(importlib.import_module(module), name, broken))
        train(folder, True, ddp_timeout=20)


@pytest.mark.parametrize(
    "where",
    ["trainer_resuming.load_model", "trainer_resuming.load_group_state", "outer_checkpoint.load_outer_state"],
)
def test_one_rank_that_cannot_read(world4: WorkerPool, trained: tuple[Path, Any], where: str) -> None:
    module, name = f"hf_fedshard.{where}".rsplit(".", 1)
    errors = world4.run_failing(
        unreadable, str(trained[0]), module, name, env=FL_FSDP, init_group=False, limit_seconds=60
    )
    for error in errors:
        assert error.type_name == "CheckpointError", error
        assert "Resuming failed. On rank 1: KeyError: 'last_epoch'" in error.message


def failing(folder: str) -> Any:
    """Rank 3 cannot write its part of the optimizer, in its group alone."""
    forget_meshes()
    trainer = make_trainer(folder)
    if dist.get_rank() == 3:
        from hf_fedshard import checkpoint

        true_save = checkpoint.save_tensors

        def save_tensors(tensors: Any, target: Path, group: Any) -> Any:
            if "group_" in str(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text("a file where a folder should be")
            return true_save(tensors, target, group)

        with mock.patch.object(checkpoint, "save_tensors", save_tensors):
            trainer.train()
    trainer.train()


def test_a_rank_that_cannot_write(world4: WorkerPool, tmp_path: Path) -> None:
    errors = world4.run_failing(failing, str(tmp_path), env=FL_FSDP, init_group=False, limit_seconds=LIMIT)
    for error in errors:
        assert error.type_name == "CheckpointError" and "Saving a checkpoint failed" in error.message
    assert checkpoints(tmp_path) == [".saving-checkpoint-4"]
    run(world4, train, tmp_path)
    assert checkpoints(tmp_path) == ["checkpoint-10", "checkpoint-4", "checkpoint-8"]


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, "a")), unk_token="a")


class CardTrainer(Trainer):
    """As TRL's trainers do: a file more in each checkpoint."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.is_world_process_zero():
            run = Path(self._get_output_dir(trial=trial))
            (run / f"checkpoint-{self.state.global_step}" / "card.md").write_text("card")


def with_tokenizer(folder: str, **options: Any) -> dict[str, Any]:
    forget_meshes()
    trainer = make_trainer(folder, processing_class=tokenizer(), trainer_class=CardTrainer, max_steps=4, **options)
    trainer.train()
    dist.barrier()
    return state_of(trainer)


@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_export(world4: WorkerPool, tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    ranks = run(world4, with_tokenizer, tmp_path, kind=kind)
    checkpoint = tmp_path / "checkpoint-4"
    assert (checkpoint / "card.md").exists() and find_damage(checkpoint) == []
    out = export_checkpoint(checkpoint, tmp_path / "out", max_shard_size="40KB")
    assert len(list(out.glob("model-*.safetensors"))) > 2 and (out / "generation_config.json").exists()
    model = AutoModelForCausalLM.from_pretrained(out)
    assert not differences(model.state_dict(), ranks[0]["model"])
    assert AutoTokenizer.from_pretrained(out).get_vocab() == {"a": 0, "b": 1}
    half = AutoModelForCausalLM.from_pretrained(export_checkpoint(checkpoint, tmp_path / "half", dtype="bfloat16"))
    assert {param.dtype for param in half.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="no empty folder"):
        export_checkpoint(checkpoint, out)
    (checkpoint / "federation/model/index.json").unlink()
    with pytest.raises(CheckpointError, match="index.json is missing"):
        export_checkpoint(checkpoint, tmp_path / "third")


def test_export_of_adapters(world4: WorkerPool, tmp_path: Path) -> None:
    ranks = run(world4, with_tokenizer, tmp_path, kind="lora")
    out = export_checkpoint(tmp_path / "checkpoint-4", tmp_path / "out")
    assert {path.name for path in out.glob("*.safetensors")} == {"adapter_model.safetensors"}
    model = PeftModel.from_pretrained(tiny_llama(), out)
    assert not differences(model.state_dict(), ranks[0]["model"])


def test_export_command(trained: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hf_fedshard.export import main

    main([str(trained[0] / "checkpoint-8"), str(tmp_path / "out")])
    assert "Written to" in capsys.readouterr().out
    with pytest.raises(SystemExit) as raised:
        main([str(trained[0]), str(tmp_path / "out2")])
    assert raised.value.code == 1
    assert "no checkpoint of hf_fedshard" in capsys.readouterr().err


class LocalHub:
    """Stands in for the Hub: keeps the names of what is uploaded."""

    def __init__(self) -> None:
        self.uploads: list[tuple[str, str, list[str]]] = []

    def create_repo(self, repo_id: str, **kwargs: Any) -> Any:
        return mock.Mock(repo_id=repo_id)

    def upload_folder(self, folder_path: str, path_in_repo: str = "", **kwargs: Any) -> Any:
        files = sorted(path.relative_to(folder_path).as_posix() for path in Path(folder_path).rglob("*"))
        self.uploads.append((str(folder_path), path_in_repo, files))
        return mock.Mock(done=lambda: True)


def pushing(folder: str) -> list[tuple[str, str, list[str]]]:
    hub = LocalHub()
    with mock.patch("transformers.trainer.hf_api", lambda: hub):
        with_tokenizer(folder, push_to_hub=True, hub_model_id="a/b", hub_strategy="checkpoint", hub_always_push=True)
    return hub.uploads


def test_push_to_hub(world4: WorkerPool, tmp_path: Path) -> None:
    uploads = run(world4, pushing, tmp_path)
    assert [len(rank) for rank in uploads] == [2, 0, 0, 0]
    model, checkpoint = uploads[0]
    assert model[0] == str(tmp_path) and {"config.json", "model.safetensors", "tokenizer.json"} <= set(model[2])
    assert checkpoint[:2] == (str(tmp_path / "checkpoint-4"), "last-checkpoint")
    assert {"federation/manifest.json", "model.safetensors", "card.md"} <= set(checkpoint[2])
    assert find_damage(tmp_path / "checkpoint-4") == []
    run(world4, train, tmp_path, True, processing_class=None)
