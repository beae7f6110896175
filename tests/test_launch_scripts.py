"""The scripts that start a run on several nodes, with stand-ins for ssh and SLURM that run on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness.launch import free_port


ROOT = Path(__file__).resolve().parent.parent
SSH, SLURM = ROOT / "recipes/launch/ssh.sh", ROOT / "recipes/launch/slurm.sbatch"
LAUNCH_FILE = "accelerate_configs/multinode_fl_fsdp_4gpu.yaml"
ARGUMENTS = ["--name", 'it\'s a $HOME "quoted" name', "--steps=3"]

# Its last argument is the command, as ssh has it: a text for the shell of the other machine.
SSH_STAND_IN = """#!/usr/bin/env bash
for word in "$@"; do command=$word; done
if [ -n "${COMMANDS:-}" ]; then echo "command: $command"; fi
exec env -i PATH="$PATH" RECORDS="$RECORDS" bash -c "$command"
"""
SRUN_STAND_IN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
for id in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$id "$@" & done
wait
"""
ACCELERATE_STAND_IN = f"""#!{sys.executable}
import json, os, sys, time
rank = sys.argv[sys.argv.index("--machine_rank") + 1]
seen = {{name: os.environ[name] for name in os.environ if name.startswith(("FEDSHARD_", "SECRET_", "SRUN_"))}}
if "--uneven" in sys.argv and rank == "1":
    time.sleep(2)
with open(os.path.join(os.environ["RECORDS"], rank), "w") as file:
    json.dump([sys.argv[1:], seen, os.getcwd()], file)
if "--fail" in sys.argv:
    sys.exit(7) if rank == "1" else time.sleep(60)
"""


@pytest.fixture
def machines(tmp_path: Path) -> dict[str, str]:
    """An environment in which other machines are this one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    stand_ins = {
        "ssh": SSH_STAND_IN,
        "srun": SRUN_STAND_IN,
        "scontrol": "#!/bin/sh\nprintf 'node-a\\nnode-b\\n'\n",
        "accelerate": ACCELERATE_STAND_IN,
    }
    for name, text in stand_ins.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    records = tmp_path / "records"
    records.mkdir()
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "RECORDS": str(records),
        "FEDSHARD_SYNC_EVERY": "16",
        "SECRET_OF_THIS_MACHINE": "1",
    }


def run(*command: Any, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], env=env, cwd=ROOT, capture_output=True, text=True, timeout=200)


def check_records(env: dict[str, str], main_node: str, num_processes: int, shard: int) -> None:
    """Both machines were told the same and their own rank, and the launcher accepts it."""
    from accelerate.commands.launch import launch_command_parser

    for rank in range(2):
        words, seen, folder = json.loads((Path(env["RECORDS"]) / str(rank)).read_text())
        assert Path(folder) == ROOT
        assert seen["FEDSHARD_SYNC_EVERY"] == "16"
        args = launch_command_parser().parse_args(words[1:])
        assert words[0] == "launch"
        assert (args.num_machines, args.machine_rank, args.num_processes) == (2, rank, num_processes)
        assert (args.main_process_ip, args.config_file) == (main_node, LAUNCH_FILE)
        assert (args.training_script, args.training_script_args) == ("train.py", ARGUMENTS)
        assert num_processes == 2 * shard


def test_ssh(machines: dict[str, str]) -> None:
    result = run(SSH, "10.0.0.1,10.0.0.2", 4, LAUNCH_FILE, "train.py", *ARGUMENTS, env=machines)
    assert result.returncode == 0, result.stderr
    check_records(machines, "10.0.0.1", 8, 4)
    assert "SECRET" not in (Path(machines["RECORDS"]) / "1").read_text()


def test_ssh_keeps_the_token(machines: dict[str, str]) -> None:
    """Command lines can be read by everybody on a machine. Where the token lies is no secret."""
    secret = {"HF_TOKEN": "hf_secret", "HF_TOKEN_PATH": "/home/me/token", "COMMANDS": "1"}
    result = run(SSH, "a,b", 4, LAUNCH_FILE, "train.py", env={**machines, **secret})
    assert result.returncode == 0
    assert result.stderr.startswith("HF_TOKEN is not handed on")
    for host in ("a", "b"):
        command = next(line for line in result.stdout.splitlines() if line.startswith(f"[{host}] command: "))
        assert "HF_TOKEN_PATH=/home/me/token" in command
        assert "hf_secret" not in command


def test_ssh_ends_when_one_machine_fails(machines: dict[str, str]) -> None:
    start = time.monotonic()
    result = run(SSH, "a,b", 4, LAUNCH_FILE, "train.py", "--fail", env=machines)
    assert result.returncode == 7
    assert time.monotonic() - start < 30


def test_ssh_waits_for_the_slowest_machine(machines: dict[str, str]) -> None:
    result = run(SSH, "a,b", 4, LAUNCH_FILE, "train.py", "--uneven", env=machines)
    assert (result.returncode, result.stderr) == (0, "")
    assert (Path(machines["RECORDS"]) / "1").exists()


@pytest.mark.parametrize("cpus", ["32", None])
def test_slurm_hands_on_the_cpus_of_a_task(machines: dict[str, str], cpus: str | None) -> None:
    job = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_ID": "1"}
    env = {**machines, **job} | ({} if cpus is None else {"SLURM_CPUS_PER_TASK": cpus})
    result = run("bash", SLURM, LAUNCH_FILE, "train.py", env=env)
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        seen = json.loads((Path(machines["RECORDS"]) / str(rank)).read_text())[1]
        assert seen.get("SRUN_CPUS_PER_TASK") == cpus


def test_slurm(machines: dict[str, str]) -> None:
    job = {
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_ID": "123456",
    }
    result = run("bash", SLURM, LAUNCH_FILE, "train.py", *ARGUMENTS, env={**machines, **job})
    assert result.returncode == 0, result.stderr
    check_records(machines, "node-a", 8, 4)
    words = json.loads((Path(machines["RECORDS"]) / "0").read_text())[0]
    assert words[words.index("--main_process_port") + 1] == "23456"


def test_slurm_without_gpus(machines: dict[str, str]) -> None:
    job = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_ID": "1"}
    result = run("bash", SLURM, LAUNCH_FILE, "train.py", env={**machines, **job})
    assert result.returncode != 0
    assert "set PROCESSES_PER_NODE" in result.stderr


@pytest.mark.parametrize("script", [SSH, SLURM], ids=["ssh", "slurm"])
def test_usage(script: Path, machines: dict[str, str]) -> None:
    result = run("bash", script, "a,b", env=machines)
    assert result.returncode == 2
    assert result.stderr.startswith("usage: ")


@pytest.mark.slow
def test_a_real_run_over_ssh(machines: dict[str, str], tmp_path: Path) -> None:
    """Two launchers with two processes each meet, and train one model."""
    bin_folder = Path(machines["PATH"].split(":")[0])
    (bin_folder / "accelerate").unlink()
    env = {**machines, "PATH": f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env |= {"HF_HUB_OFFLINE": "1", "MASTER_PORT": str(free_port()), "FEDSHARD_SYNC_EVERY": "8"}
    output = tmp_path / "a run"
    script = ["recipes/pretrain_clm.py", "--args_file", "recipes/presets/demo.yaml", "--max_steps", 8]
    small = ["--max_eval_blocks", 8, "--output_dir", output]
    launch_file = "accelerate_configs/cpu_fl_fsdp_4proc.yaml"
    result = run(SSH, "127.0.0.1,localhost", 2, launch_file, *script, *small, env=env)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert json.loads((output / "all_results.json").read_text())["eval_perplexity"] > 1
    assert (output / "model.safetensors").is_file()


@pytest.mark.parametrize("script", [SSH, SLURM, ROOT / ".ci/run"], ids=["ssh", "slurm", "ci"])
def test_linter(script: Path) -> None:
    linter = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert linter, "shellcheck is missing: pip install -e '.[dev]'"
    result = subprocess.run([linter, str(script)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
