"""Every code block of the documentation is run or checked, every link resolves, and tables say what the code does."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from benchmarks.arguments import make_parser as make_benchmark_parser
from benchmarks.report import make_parser as make_report_parser
from benchmarks.statistics import mean
from benchmarks.variants import VARIANTS
from hf_fedshard import FederationConfig
from hf_fedshard.export import make_parser
from hf_fedshard.run import make_parser as make_run_parser
from tests.harness.launch_env import launch_env
from tests.harness.pool import WorkerPool


ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "recipes").rglob("README.md")),
    ROOT / "accelerate_configs" / "README.md",
    ROOT / "benchmarks" / "README.md",
]
# What a user's script has before the block: placeholders of commands, objects of scripts.
PLACEHOLDERS = {"<0 to 127>": "0", "<address of node 0>": "10.0.0.1"}
SCRIPTS_OF_THE_USER = {"script.py"}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _blocks(path: Path, language: str) -> list[str]:
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", path.read_text(), re.M | re.S)
    return [textwrap.dedent(body) for _, kind, body in found if kind == language]


def _commands(text: str) -> list[list[str]]:
    for placeholder, value in PLACEHOLDERS.items():
        text = text.replace(placeholder, value)
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def _all_commands() -> list[Any]:
    found = []
    for path in DOCUMENTS:
        for block in _blocks(path, "bash"):
            found += [pytest.param(words, id=f"{_name(path)}: {' '.join(words)[:60]}") for words in _commands(block)]
        for code in re.findall(r"`((?:python|make|accelerate launch) [^`]*)`", path.read_text()):
            if "<" not in code and "--" in code:
                found.append(pytest.param(shlex.split(code), id=f"{_name(path)}: {code[:60]}"))
    for path in sorted((ROOT / "recipes" / "presets").glob("*.yaml")):
        head = "\n".join(re.findall(r"^#   +(.*)$", path.read_text(), re.M))
        found += [pytest.param(words, id=path.name) for words in _commands(head)]
    return found


def test_no_block_escapes() -> None:
    """A fence of another language, or one that is never closed, would be checked by nothing."""
    for path in DOCUMENTS:
        fences = re.findall(r"^ *```(.*)$", path.read_text(), re.M)
        assert len(fences) % 2 == 0, path
        assert set(fences) <= {"", "text", "bash", "python", "diff"}, path
        counted = sum(len(_blocks(path, language)) for language in ("", "text", "bash", "python", "diff"))
        assert counted == len(fences) // 2, path
    assert len(_all_commands()) > 15


@pytest.mark.parametrize("words", _all_commands())
def test_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, value = words[0].split("=", 1)
        monkeypatch.setenv(name, value)
        FederationConfig.from_arguments()  # refuses what it does not know or cannot parse
        words = words[1:]
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", Path("Makefile").read_text(), re.M)
        assert re.search(r"^PYTHON \?=", Path("Makefile").read_text(), re.M) or len(words) == 2
    elif words[:2] == ["accelerate", "launch"]:
        _check_launch(words[2:])
    elif words[:3] == ["python", "-m", "hf_fedshard.export"]:
        make_parser().parse_args(words[3:])
    elif words[:3] == ["python", "-m", "benchmarks.two_tier"]:
        make_benchmark_parser().parse_args(words[3:])
    elif words[:3] == ["python", "-m", "benchmarks.report"]:
        make_report_parser().parse_args(words[3:])
    elif words[0] == "python":
        _check_script(words[1], words[2:])
    elif words[0] in ("sbatch", "recipes/launch/ssh.sh"):
        _check_start_on_several_nodes(words)
    else:
        assert words[:2] == ["pip", "install"], words
        if words[-2] == "-r":
            assert Path(words[-1]).is_file()
        else:
            extras = set(re.findall(r"\w+", words[-1]))
            section = (ROOT / "setup.cfg").read_text().split("[options.extras_require]")[1]
            assert words[-1].startswith(".")
            assert extras <= set(re.findall(r"^(\w+) =", section, re.M))


def _check_launch(words: list[str]) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    # A port that is free here; the one of a file may be taken.
    args = launch_command_parser().parse_args(["--main_process_port", "0", *words])
    assert Path(args.config_file).is_file()
    script, script_args = args.training_script, args.training_script_args
    args, _, _ = _validate_launch_command(args)
    size = int(args.parallelism_config_dp_replicate_size) * int(args.parallelism_config_dp_shard_size)
    assert size == args.num_processes
    if script == "hf_fedshard.run":
        assert args.module
        _, rest = make_run_parser().parse_args_into_dataclasses(script_args, look_for_args_file=False)
        script, script_args = rest.script, rest.script_args
    if script not in SCRIPTS_OF_THE_USER:
        _check_script(script, script_args)


def _check_start_on_several_nodes(words: list[str]) -> None:
    """The launch file comes last but one, and says how many processes the nodes must have together."""
    starter = next(word for word in words if word.startswith("recipes/launch/"))
    assert Path(starter).is_file()
    launch_file, script = words[words.index("accelerate_configs/multinode_fl_fsdp_4gpu.yaml") :]
    _check_launch(["--config_file", launch_file, script])
    if starter.endswith("ssh.sh"):
        hosts, processes = words[1].split(","), int(words[2])
        assert len(hosts) * processes == yaml.safe_load(Path(launch_file).read_text())["num_processes"]


def test_messages_of_the_guide() -> None:
    """Each message in the table of common errors is one that the package has."""
    table = (ROOT / "docs" / "guide.md").read_text().partition("## Common errors")[2]
    # Adjacent literals stand on several lines, and values in braces.
    source = re.sub(r'"\s*f?"', "", "".join(path.read_text() for path in (ROOT / "hf_fedshard").glob("*.py")))
    messages = re.findall(r"^\| `([^`]+)` \|", table, re.M)
    assert len(messages) > 8
    foreign = [m for m in messages if not all(part.strip() in source for part in m.split("..."))]
    assert not foreign


def _check_script(script: str, words: list[str]) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    assert Path(script).is_file()
    name = Path(script).stem
    if name in ("sotu_tasks", "unpack_models", "merge_adapter"):
        importlib.import_module(name).make_parser().parse_args(words)
    elif name in ("pretrain_clm", "pretrain_clm_no_trainer", "classify_sequences", "sft_chat"):
        parsers = {
            "pretrain_clm": "clm_arguments",
            "pretrain_clm_no_trainer": "loop_arguments",
            "sft_chat": "sft_arguments",
        }
        # Its own checks need the hardware that the command is for.
        with mock.patch.object(TrainingArguments, "__post_init__", lambda self: None):
            importlib.import_module(parsers.get(name, name)).parse_arguments(words)
    elif script.endswith("dry_run.py"):
        from dry_run import DryRunArguments

        (args,) = HfArgumentParser(DryRunArguments).parse_args_into_dataclasses(words)
        assert args.args_file.is_file()
    elif name == "sweep_outer":
        from sweep_outer import parse_arguments
        from sweep_settings import read_study

        assert read_study(Path(parse_arguments(words).sweep.study))
    elif name == "sweep_report":
        from sweep_report import ReportArguments

        (args,) = HfArgumentParser(ReportArguments).parse_args_into_dataclasses(words)
        assert all(Path(file).is_file() for file in (*args.results, args.document))
    else:
        raise AssertionError(f"no check for {script}")


def _python_blocks() -> list[Any]:
    import hf_fedshard

    found = []
    for path in DOCUMENTS:
        blocks = enumerate(_blocks(path, "python"))
        found += [pytest.param(body, False, id=f"{_name(path)}[{index}]") for index, body in blocks]
    for name in hf_fedshard.__all__:
        for body in re.findall(r"```python\n(.*?)```", getattr(hf_fedshard, name).__doc__ or "", re.S):
            found.append(pytest.param(textwrap.dedent(body), True, id=f"docstring of {name}"))
    return found


def _execute(code: str, folder: str, with_imports: bool = False, prepare_cpu: bool = False) -> dict[str, Any]:
    """Runs a block with the objects that it takes for granted, and tells what came of it."""
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader
    from transformers import Trainer

    import hf_fedshard
    from hf_fedshard import cpu, guard
    from tests.harness.data import ListDataset, collate, token_samples
    from tests.harness.models import tiny_llama
    from tests.harness.tiny_trainer import tiny_arguments

    guard.reset()
    if prepare_cpu:
        cpu.install()
    model, data = tiny_llama(), ListDataset(token_samples(32))
    names: dict[str, Any] = {
        "Trainer": Trainer,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "dataloader": DataLoader(data, batch_size=1, collate_fn=collate),
        "args": tiny_arguments(folder, max_steps=9),
        "train_dataset": data,
        "dataset": ListDataset([{**row, **about} for row, about in zip(token_samples(32), _addresses(), strict=True)]),
    }
    names |= _checkpoints_for(code, folder, names)
    if with_imports:
        public = {name: getattr(hf_fedshard, name) for name in hf_fedshard.__all__} | {"Accelerator": Accelerator}
        names = public | names
    here = Path.cwd()
    os.chdir(folder)
    try:
        exec(compile(code, "<documentation>", "exec"), names)
    finally:
        os.chdir(here)
    trainer = names.get("trainer")
    history = trainer.state.log_history if trainer is not None else []
    fedavg = names.get("fedavg")
    return {
        "rounds": [logs["fedshard/round"] for logs in history if "fedshard/round" in logs],
        "loop rounds": fedavg.round if fedavg is not None else None,
        "groups open": torch.distributed.is_initialized(),
    }


def _addresses() -> list[dict[str, Any]]:
    """Columns of the corpus."""
    return [{"year": 1990 + index, "party": ("Republican", "Democratic")[index // 8 % 2]} for index in range(32)]


def _checkpoints_for(code: str, folder: str, names: dict[str, Any]) -> dict[str, Any]:
    """What a block about checkpoints has before it: a run that has saved where the block looks."""
    import torch.distributed as dist
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    from hf_fedshard import FedAvgCallback, FederatedFSDPPlugin

    named = re.findall(r'"([\w/]+/checkpoint[-_]\d+)"', code)
    if "_state(" in code:
        plugin = FederatedFSDPPlugin(num_groups=2, sync_every=8)
        accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=plugin.parallelism_config)
        prepared = accelerator.prepare(names["model"], names["optimizer"], names["dataloader"])
        fedavg = plugin.federate(accelerator, prepared[0])
        if "load_state" in code:
            accelerator.save_state(str(Path(folder) / named[0]))
        return {"accelerator": accelerator, "fedavg": fedavg, "dataloader": prepared[2]}
    if "resume_from_checkpoint" not in code and "export_checkpoint(" not in code:
        return {}
    args = names["args"]
    args.save_strategy, args.save_steps = "steps", 4
    trainer = names["Trainer"](
        model=names["model"], args=args, train_dataset=names["train_dataset"], callbacks=[FedAvgCallback(2, 4)]
    )
    trainer.train()
    if dist.get_rank() == 0:
        for name in named:
            shutil.copytree(Path(folder) / "checkpoint-4", Path(folder) / name)
    dist.barrier()
    if "export_checkpoint(" in code:
        # One process exports.
        return {"AutoModelForCausalLM": AutoModelForCausalLM, "export_checkpoint": _on_rank_0}
    return {"trainer": trainer}


def _on_rank_0(*args: Any, **kwargs: Any) -> None:
    import torch.distributed as dist

    from hf_fedshard import export_checkpoint

    if dist.get_rank() == 0:
        export_checkpoint(*args, **kwargs)
    dist.barrier()


@pytest.fixture
def cpu_launch() -> dict[str, str]:
    # ACCELERATE_USE_CPU stands for a machine without accelerators where this one has some.
    return launch_env(ROOT / "accelerate_configs" / "cpu_fl_fsdp_4proc.yaml") | {"ACCELERATE_USE_CPU": "true"}


@pytest.mark.parametrize(("code", "with_imports"), _python_blocks())
def test_python_block(
    world4: WorkerPool, tmp_path: Path, cpu_launch: dict[str, str], code: str, with_imports: bool
) -> None:
    ranks = world4.run(_execute, code, str(tmp_path), with_imports, env=cpu_launch, init_group=False)
    for rank in ranks:
        if "callbacks=" in code:
            assert rank["rounds"] == [1, 2]
        elif "federate(" in code:
            assert rank["loop rounds"] == 1  # 32 samples over 4 ranks are 8 steps
        if "shutdown()" in code:
            assert not rank["groups open"]


def test_diff_of_the_readme(world4: WorkerPool, tmp_path: Path, cpu_launch: dict[str, str]) -> None:
    from transformers import AutoModelForCausalLM

    (block,) = _blocks(ROOT / "README.md", "diff")
    lines = block.splitlines()
    assert not [line for line in lines if line and line[:2] not in ("+ ", "  ")]
    with_lines = "\n".join(line[2:] for line in lines)
    without = "\n".join(line[2:] for line in lines if not line.startswith("+"))
    runs = {"with": (with_lines, [1, 2], False), "without": (without, [], True)}
    for name, (code, rounds, stays_open) in runs.items():
        folder = tmp_path / name
        folder.mkdir()
        # A script without ours has FSDP on CPU only if something asks for it, as the recipes do by their import.
        options = {"prepare_cpu": name == "without"}
        for rank in world4.run(_execute, code, str(folder), env=cpu_launch, init_group=False, **options):
            assert (rank["rounds"], rank["groups open"]) == (rounds, stays_open)
        AutoModelForCausalLM.from_pretrained(folder / "my-model")


def test_links() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?://)([^)#\s]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{_name(path)}: {target}"


def test_every_module_has_its_place() -> None:
    """The table of CONTRIBUTING names each module once, and none that is gone."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("| modules |")[2].partition("\n\n")[0]
    named = re.findall(r"`(\w+)`", section)
    assert sorted(named) == sorted(path.stem for path in (ROOT / "hf_fedshard").glob("[!_]*.py"))


def test_options_of_the_readme() -> None:
    section = (ROOT / "README.md").read_text().split("## Options")[1].split("##")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.M))
    fields = {item.name: item.default for item in dataclasses.fields(FederationConfig)}
    assert set(rows) == set(fields)
    assert rows["sync_every"].startswith(str(fields["sync_every"]))
    assert rows["bucket_size_bytes"] == f"{fields['bucket_size_bytes'] // 2**20} MiB"
    assert rows["log_every_rounds"] == str(fields["log_every_rounds"])


def test_clean_keeps_runs(tmp_path: Path) -> None:
    """Models and hours of measurements lie there: they go by a target of their own only."""
    removed = {}
    for target in ("clean", "clean-runs"):
        shutil.copy(ROOT / "Makefile", tmp_path)
        (tmp_path / "runs").mkdir(exist_ok=True)
        for folder in ("hf_fedshard", "recipes", "benchmarks", "tests"):
            (tmp_path / folder).mkdir(exist_ok=True)
        subprocess.run(["make", target], cwd=tmp_path, check=True, capture_output=True)
        removed[target] = not (tmp_path / "runs").exists()
    assert removed == {"clean": False, "clean-runs": True}


def _check_says(page: str, text: str, source: str) -> None:
    assert text in (ROOT / page).read_text(), f"{page} should say `{text}`: so it is in {source}"


def test_figures_of_the_benchmark() -> None:
    """What the pages say of it in prose is what its results say."""
    source = "docs/benchmarks.json"
    content = json.loads((ROOT / source).read_text())
    targets = {row["what"]: row for row in content["targets"]}
    shares = {
        (block["shape"], block["rate"], row["variant"]): 100 * row["share_of_ceiling"]["median"]
        for block in content["blocks"]
        for row in block["rows"]
        if row["share_of_ceiling"]
    }
    last = {curve["variant"]: [run[-1] for run in curve["runs"]] for curve in content["curves"]}
    excess = {
        name: mean([100 * (loss / fp32 - 1) for loss, fp32 in zip(losses, last["fp32"], strict=True)])
        for name, losses in last.items()
    }

    # Of those whose loss is known too, the fastest.
    fsdp, hsdp = shares["2x2", 50, "fsdp"], shares["2x4", 50, "hsdp"]
    known = [name for name in excess if VARIANTS[name].overlapped]
    fastest = max(known, key=lambda name: shares["2x2", 50, name])
    share = shares["2x2", 50, fastest]
    wire_format = VARIANTS[fastest].settings.get("wire_format", "fp32")
    speed = f"{share / fsdp:.0f} times as fast as FSDP2 and {share:.0f} % as fast as groups"
    _check_says("README.md", f"averaging in {wire_format} every 8 steps beside the steps was {speed}", source)
    loss = f"{excess[fastest].value:.1f} % (standard error {max(excess[fastest].error, 0.1):.1f})"
    _check_says("README.md", f"its loss was {loss} above that of", source)

    late = {VARIANTS[name].settings["overlap_steps"]: excess[name] for name in excess if VARIANTS[name].overlapped}
    first, second, third = sorted(late)
    losses = f"{late[first].value:.1f}, {late[second].value:.1f} and {late[third].value:.1f} %"
    errors = f"standard errors of up to {max(found.error or 0 for found in late.values()):.1f} %"
    steps = f"{first}, {second} and {third} steps late"
    _check_says("docs/overlap.md", f"{losses} higher with outcomes that came {steps}", source)
    _check_says("docs/overlap.md", errors, source)
    _check_says("docs/benchmarks.md", f"leaves {losses} ({errors}) after these", source)
    int8, int4 = excess["int8"], excess["int4"]
    below, above = f"{-int8.value:.2f} ± {int8.error:.2f} % below", f"{int4.value:.2f} ± {int4.error:.2f} % above"
    _check_says("docs/wire.md", f"{below} that of `fp32` and that of `int4` {above}", source)
    short = f"int8 ends {-int8.value:.2f} % below fp32 and int4 {int4.value:.2f} % above"
    _check_says("docs/benchmarks.md", short, source)

    slow = f"FSDP2 has {fsdp:.1f} % of the ceiling's speed at 50 Mbit/s, and HSDP on 2 x 4 ranks {hsdp:.1f} %"
    most = f"nothing that averages can be more than {100 / fsdp:.1f} and {100 / hsdp:.1f} times as fast"
    _check_says("docs/benchmarks.md", f"{slow}, so {most}", source)
    with_replicas = targets["FL+HSDP against HSDP, 2 x 4 ranks, 50 Mbit/s"]["variant"].split(" / ")[0]
    best = targets["FL+FSDP against FSDP2, 50 Mbit/s"]["variant"].split(" / ")[0]
    reached = f"{shares['2x2', 50, best]:.0f} % and {shares['2x4', 50, with_replicas]:.0f} % are reached"
    _check_says("docs/benchmarks.md", f"Of the ceiling {reached}", source)


def _row_of_study(steps: int, setting: str, column: int, value: str) -> tuple[float, int]:
    """Perplexity and seeds of the best row that matches, in the first table of runs of so many steps."""
    table = re.search(rf"<!-- table: runs {steps} .*?-->\n(.*?)<!-- end", (ROOT / "docs/study.md").read_text(), re.S)
    assert table is not None, f"docs/study.md has no table of runs of {steps} steps"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[1].splitlines()[2:]]
    rows = [row for row in rows if re.fullmatch(setting, row[0]) and row[column] == value]
    assert rows, f"docs/study.md has no row of {setting} among the runs of {steps} steps"
    row = min(rows, key=lambda row: float(row[3]))
    return float(row[3]), int(row[7])


def test_figures_of_the_study() -> None:
    seeds_in_words = {1: "one seed", 2: "two seeds", 3: "three seeds", 4: "four seeds", 5: "five seeds"}
    found = []
    for steps in (400, 1600):
        tuned, _ = _row_of_study(steps, "synchronous.*", 5, "+0.0%")
        averaged, seeds = _row_of_study(steps, r"(adam_beta\d=[\d.]+, )*sync_every=4", 1, "4")
        found.append((f"{tuned:.0f}", f"{averaged:.0f}", seeds_in_words[seeds]))
    (tuned, averaged, seeds), (tuned_later, averaged_later, seeds_later) = found
    short = f"ended at perplexity {tuned} and averaging every 4 steps at {averaged} (400 steps, {seeds})"
    text = f"{short}, and at {tuned_later} and {averaged_later} four times as long ({seeds_later})"
    _check_says("README.md", text, "docs/study.md")


def test_figures_of_the_demo() -> None:
    row = re.search(
        r"^\| `fp32` \| ([\d.]+) \|", (ROOT / "docs/wire.md").read_text().split("How much quality")[1], re.M
    )
    assert row is not None
    _check_says("recipes/README.md", f"perplexity {row[1]} on the held-out years after 200 steps", "docs/wire.md")
    limit = re.search(r"^DEMO_MAX_PERPLEXITY := (\d+)", (ROOT / "Makefile").read_text(), re.M)
    assert limit is not None and float(row[1]) < float(limit[1])
    _check_says("README.md", f"below perplexity {limit[1]}", "Makefile")
