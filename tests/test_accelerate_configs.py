"""The launch files: each one through Accelerate's own loader, key by key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_fedshard import FederationConfig


FOLDER = Path(__file__).resolve().parent.parent / "accelerate_configs"
FILES = sorted(FOLDER.glob("*.yaml"))
NAME = re.compile(
    r"(?P<where>cpu|gpu|multinode)_(?P<what>baseline_fsdp|fl_fsdp|fl_hsdp)_(?P<number>\d+)(?P<unit>proc|gpu)"
)
# The groups that the head of an FL+HSDP file and the README state; without the variable each replica is a group.
FL_HSDP_GROUPS = 2

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def _content(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text()))


def _sizes(content: dict[str, Any]) -> dict[str, int]:
    section = content["parallelism_config"]
    return {key.removeprefix("parallelism_config_").removesuffix("_size"): size for key, size in section.items()}


def _launch_args(path: Path) -> Any:
    """The file as `accelerate launch` reads it."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    args, config, _ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", str(path), "--main_process_port", "0", "script.py"])
    )
    assert config is not None
    return args


def test_every_case_has_a_file() -> None:
    assert {path.stem for path in FILES} == {
        *(f"cpu_{what}" for what in ("baseline_fsdp_4proc", "fl_fsdp_4proc", "fl_hsdp_8proc")),
        *(f"gpu_{what}_8gpu" for what in ("baseline_fsdp", "fl_fsdp", "fl_hsdp")),
        *(f"multinode_{what}_4gpu" for what in ("baseline_fsdp", "fl_fsdp", "fl_hsdp")),
    }


@each_file
def test_accelerate_loads_it(path: Path) -> None:
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    content = _content(path)
    # Raises on a key that it does not know, at the top level.
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    loaded = config.to_dict()
    for key, value in content.items():
        assert loaded[key] == value, key


@each_file
def test_every_key_reaches_the_launcher(path: Path) -> None:
    """Unknown keys of `fsdp_config` and `parallelism_config` are accepted and dropped by the loader."""
    from accelerate.commands.launch import launch_command_parser

    content = _content(path)
    known = {action.dest for action in launch_command_parser()._actions}
    args = _launch_args(path)
    for section in ("fsdp_config", "parallelism_config"):
        for key, value in content[section].items():
            assert key in known, key
            assert key.startswith("fsdp_" if section == "fsdp_config" else "parallelism_config_"), key
            # The YAML's booleans become the text of the command line's options.
            assert str(getattr(args, key)).lower() == str(value).lower(), key
    for key in ("num_processes", "num_machines", "mixed_precision"):
        assert getattr(args, key) == content[key], key
    assert args.use_fsdp
    assert args.use_parallelism_config
    assert bool(args.use_cpu) == content.get("use_cpu", False)


@each_file
def test_variables_of_its_processes(path: Path) -> None:
    from tests.harness.launch_env import launch_env

    content, variables = _content(path), launch_env(path)
    assert variables["ACCELERATE_USE_FSDP"] == variables["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    assert variables["FSDP_VERSION"] == "2"
    assert variables["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
    assert variables["ACCELERATE_MIXED_PRECISION"] == content["mixed_precision"]
    for axis, size in _sizes(content).items():
        assert variables[f"PARALLELISM_CONFIG_{axis.upper()}_SIZE"] == str(size)


@each_file
def test_content(path: Path) -> None:
    content = _content(path)
    on_cpu = path.stem.startswith("cpu")
    assert content["distributed_type"] == "FSDP"
    assert content["compute_environment"] == "LOCAL_MACHINE"
    assert content["fsdp_config"]["fsdp_version"] == 2
    # The full state is sent from one rank over the world otherwise, and persistent buffers fail.
    assert content["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] is False
    assert content["mixed_precision"] == ("no" if on_cpu else "bf16")
    state_dict_type = "FULL_STATE_DICT" if on_cpu else "SHARDED_STATE_DICT"
    assert content["fsdp_config"]["fsdp_state_dict_type"] == state_dict_type
    sizes = _sizes(content)
    assert set(sizes) == {"dp_replicate", "dp_shard"}
    assert sizes["dp_replicate"] * sizes["dp_shard"] == content["num_processes"]
    assert content["num_processes"] % content["num_machines"] == 0


@each_file
def test_name_says_what_it_is(path: Path) -> None:
    match = NAME.fullmatch(path.stem)
    assert match is not None
    content = _content(path)
    sizes, world_size = _sizes(content), content["num_processes"]
    per_node = world_size // content["num_machines"]
    where, what, number = match["where"], match["what"], int(match["number"])
    assert match["unit"] == ("proc" if where == "cpu" else "gpu")
    assert number == per_node
    assert content.get("use_cpu", False) == (where == "cpu")
    assert (content["num_machines"] > 1) == (where == "multinode")
    if what == "baseline_fsdp":
        assert sizes == {"dp_replicate": 1, "dp_shard": world_size}
        with pytest.raises(ValueError, match="one federation group"):
            FederationConfig().layout(world_size, sizes, per_node)
        return
    layout = FederationConfig(num_groups=FL_HSDP_GROUPS if what == "fl_hsdp" else None).layout(world_size, sizes)
    assert layout.algorithm == ("FL+HSDP" if what == "fl_hsdp" else "FL+FSDP")
    assert layout.num_groups == 2
    # Shards stay on a node.
    assert per_node % sizes["dp_shard"] == 0
    head = path.read_text()
    assert ("FEDSHARD_NUM_GROUPS=2" in head) == (what == "fl_hsdp")
    assert f"HSDP {sizes['dp_replicate']} x {sizes['dp_shard']}" in head


def test_no_two_files_are_equal_but_for_comments() -> None:
    contents = [repr(sorted(_content(path).items())) for path in FILES]
    assert len(set(contents)) == len(FILES)


def test_table_of_the_readme() -> None:
    rows = re.findall(
        r"^\| `(\w+)\.yaml` \| (.*?) \| (\d+) x (\d+) \| (.*) \|$", (FOLDER / "README.md").read_text(), re.M
    )
    assert [row[0] for row in rows] != []
    assert {row[0] for row in rows} == {path.stem for path in FILES}
    for stem, world, replicate, shard, purpose in rows:
        content = _content(FOLDER / f"{stem}.yaml")
        assert _sizes(content) == {"dp_replicate": int(replicate), "dp_shard": int(shard)}
        nodes = re.match(r"(\d+) nodes? of (\d+)", world)
        count = int(nodes[1]) * int(nodes[2]) if nodes else int(world.split()[0])
        assert count == content["num_processes"]
        expected = {"baseline": "baseline FSDP", "fl_fsdp": "FL+FSDP", "fl_hsdp": "FL+HSDP"}
        assert purpose.startswith(next(text for key, text in expected.items() if key in stem))
