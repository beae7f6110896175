"""Scripts that know nothing of federations, under `python -m hf_fedshard.run`."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import transformers.trainer

from hf_fedshard import FederationConfig, UpstreamChangedError
from hf_fedshard.run import describe_arguments, federate_trainers, main, make_parser
from tests.harness.folders import save_tiny_model, sentences, write_rows
from tests.harness.launch import LaunchResult, accelerate_launch, child_env


PROBE = """
import os, pickle, sys
class Here:
    pass
assert isinstance(pickle.loads(pickle.dumps(Here())), Here)
import beside
print(__name__, __file__, sys.argv, sys.path[0], sys.modules["__main__"].Here is Here, beside.VALUE, __doc__)
"""
PROBE_DOC = '"""Its docstring."""\n'


def _launch(root: Path, *words: str, cwd: Path, options: Sequence[str] = ()) -> LaunchResult:
    config = root / "accelerate_configs" / "cpu_fl_fsdp_4proc.yaml"
    return accelerate_launch(config, "hf_fedshard.run", *words, options=[*options, "-m"], cwd=cwd, limit_seconds=200)


def _history(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def test_every_setting_is_an_option() -> None:
    (options, rest) = make_parser().parse_args_into_dataclasses(
        ["--sync_every", "3", "--timeout_seconds", "1.5", "script.py", "--sync_every", "4", "-m", "--"]
    )
    given = {name: value for name, value in vars(options).items() if value is not None}
    assert given == {"sync_every": "3", "timeout_seconds": 1.5}
    assert FederationConfig.from_arguments(**given).sync_every == 3
    assert rest.script == "script.py"
    assert rest.script_args == ["--sync_every", "4", "-m", "--"]
    fields = {item.name for item in dataclasses.fields(FederationConfig)}
    assert set(vars(options)) == fields
    helps = describe_arguments(FederationConfig)
    assert set(helps) == fields
    for text in helps.values():
        assert " ".join(text.split()[:5]) in " ".join(make_parser().format_help().split())


def test_lists_and_texts_are_options() -> None:
    words = {"sync_every": "4x50,*2", "outer_optimizer": "fedavgm", "outer_options": "momentum=0.8"}
    words |= {"group_weights": "tokens", "local_parameters": "head.*,re:norm"}
    given = [word for name, text in words.items() for word in (f"--{name}", text)]
    (options, _) = make_parser().parse_args_into_dataclasses([*given, "script.py"])
    assert {name: value for name, value in vars(options).items() if value is not None} == words
    FederationConfig.from_arguments(**words)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_environment_completes_the_options(num_processes: int, capsys: pytest.CaptureFixture[str]) -> None:
    variables = {"FEDSHARD_MAX_DRIFT": "0.01", "WORLD_SIZE": str(num_processes)}
    with mock.patch.dict(os.environ, variables), pytest.raises(SystemExit):
        main(["--sync_every", "drift", "missing.py"])
    assert "there is no script 'missing.py'" in capsys.readouterr().err


def test_default_callbacks_are_put_back() -> None:
    before = list(transformers.trainer.DEFAULT_CALLBACKS)
    with pytest.raises(KeyError), federate_trainers({}):
        assert len(transformers.trainer.DEFAULT_CALLBACKS) == len(before) + 1
        raise KeyError
    assert before == transformers.trainer.DEFAULT_CALLBACKS
    with (
        mock.patch.object(transformers.trainer, "DEFAULT_CALLBACKS", ()),
        pytest.raises(UpstreamChangedError, match="tested with torch"),
        federate_trainers({}),
    ):
        pass


# A child of a process that has the runner in memory saves the 5 s of its imports.
FORK = """
import json, os, sys
import hf_fedshard.run as run
for number, words in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if child == 0:
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{number}.{name}", os.O_CREAT | os.O_WRONLY), stream)
        run.main(words)
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
BAD = {
    "chained.py": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise OSError('why') from error\n",
    "syntax.py": "x = (\n",
    "exit.py": "import sys\nsys.exit(7)\n",
}


@pytest.mark.slow
def test_as_plain_python(tmp_path: Path) -> None:
    """Output, traceback and exit code are those of `python script.py`; a script without a Trainer is an error."""
    folder = tmp_path / "real"
    folder.mkdir()
    (folder / "beside.py").write_text("VALUE = 5")
    (folder / "probe.py").write_text(PROBE_DOC + PROBE)
    # A link's own folder is not where plain python looks for modules.
    (tmp_path / "link.py").symlink_to(folder / "probe.py")
    for name, code in BAD.items():
        (tmp_path / name).write_text(code)

    def python(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *words], cwd=tmp_path, env=child_env(), capture_output=True, text=True)

    probe = ["link.py", "--num_groups", "a b"]
    cases = [["--num_groups", "2", *probe], ["gone.py"], ["--sync_every", "0", "link.py"], *([name] for name in BAD)]
    (tmp_path / "fork.py").write_text(FORK)
    forked = python("fork.py", json.dumps(cases))
    codes = [int(line) for line in forked.stdout.split()]
    outputs = [[(tmp_path / f"{i}.{name}").read_text() for name in ("stdout", "stderr")] for i in range(len(cases))]

    plain = python(*probe)
    assert plain.returncode == 0, plain.stderr
    assert outputs[0] == [plain.stdout, mock.ANY]
    assert "link.py built no Trainer, so nothing was federated" in outputs[0][1]
    assert "there is no script 'gone.py'" in outputs[1][1]
    assert "sync_every must be an integer of at least 1, a list" in outputs[2][1]
    assert codes[:3] == [1, 2, 2]
    for name, code, output in zip(BAD, codes[3:], outputs[3:], strict=True):
        plain = python(name)
        assert [code, *output] == [plain.returncode, plain.stdout, plain.stderr]


def test_a_standard_script(root: Path, tmp_path: Path) -> None:
    """The kind of `run_clm.py`; the model that is evaluated, saved and loaded is the average of the groups."""
    save_tiny_model(tmp_path / "model")
    for name, seed in (("train", 0), ("validation", 1)):
        (tmp_path / f"{name}.txt").write_text("\n".join(sentences(80, seed)))
    script = root / "tests" / "scripts" / "standard_clm.py"
    arguments = "--model_name_or_path model --train_file train.txt --validation_file validation.txt --output_dir out"
    arguments += (
        " --do_train --do_eval --max_steps 10 --per_device_train_batch_size 2 --logging_steps 5 --report_to none"
    )
    arguments += " --eval_strategy steps --eval_steps 4 --save_steps 8 --learning_rate 1e-2"
    options = ["--num_groups", "2", "--sync_every", "4", "--bucket_size_bytes", "4096"]
    _launch(root, *options, str(script), *arguments.split(), cwd=tmp_path).check()
    history = _history(tmp_path / "out")
    assert [logs["fedshard/round"] for logs in history if "fedshard/round" in logs] == [1, 2, 3]
    assert all(logs["fedshard/drift"] > 0 for logs in history if "fedshard/round" in logs)
    evaluated = {logs["step"]: logs["eval_loss"] for logs in history if "eval_loss" in logs}
    assert list(evaluated) == [4, 8, 10]
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert results["perplexity"] < 100
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded(**tokenizer(sentences(1), return_tensors="pt")).logits.isfinite().all()


@pytest.mark.slow
def test_several_trainers_in_one_script(root: Path, tmp_path: Path) -> None:
    """The kinds of `run_mlm.py` and `run_glue.py`, without `use_cpu`, with an option named like one of the runner."""
    save_tiny_model(tmp_path / "model", "distilbert")
    rows = [{"text": text, "label": int("peace" in text)} for text in sentences(60)]
    write_rows(tmp_path / "rows.jsonl", rows)
    script = root / "tests" / "scripts" / "standard_two_trainers.py"
    arguments = "--model_name_or_path model --train_file rows.jsonl --output_dir out --num_groups 7"
    layers = ["--fsdp_transformer_layer_cls_to_wrap", "TransformerBlock"]
    words = ["--sync_every", "4", str(script), *arguments.split()]
    _launch(root, *words, options=layers, cwd=tmp_path).check()
    for name, rounds in (("mlm", [1, 2]), ("classifier", [1, 2, 3])):
        logs = _history(tmp_path / "out" / name)
        assert [line["fedshard/round"] for line in logs if "fedshard/round" in line] == rounds
    assert "eval_accuracy" in json.loads((tmp_path / "out" / "classifier" / "all_results.json").read_text())
