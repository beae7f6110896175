"""What importing the package does and does not do, its public names, its versions and its layers."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hf_fedshard
from hf_fedshard import environment
from tests.harness.launch import child_env
from tests.harness.launch_env import fsdp_launch_env


CORE = (
    "collectives",
    "config",
    "environment",
    "mesh",
    "peers",
    "handshake",
    "shards",
    "tensors",
    "averaging",
    "averaged_tensors",
    "trained_parameters",
    "inner_moments",
    "exchange",
    "exchange_plan",
    "lossy_exchange",
    "wire",
    "wire_bytes",
    "residuals",
    "outer_memory",
    "initial",
    "guard",
    "metrics",
    "advancing",
    "anchors",
    "flights",
    "outcome",
    "counting",
    "round_state",
    "overlap",
    "overlapped_exchange",
    "fragment_windows",
    "overlap_limits",
    "outer_limits",
    "ranges",
    "settings",
    "snapshots",
    "fragments",
    "slow_tier",
    "rounds",
    "border",
    "closing",
    "closing_rounds",
    "periods",
    "measured_periods",
    "synchronous",
    "unified_moments",
    "course",
    "outer",
    "outer_optimizers",
    "weights",
    "moments",
    "selection",
    "proximal",
    "counters",
    "lora",
    "lora_products",
    "simulation",
)
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}


def _python(code: str, env: dict[str, str] | None = None, stdin: str = "") -> Any:
    """Runs code in a fresh interpreter without a launch around it, and reads the JSON that it prints last."""
    clean = {name: value for name, value in child_env().items() if name not in RANK}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=stdin,
        env=clean | (env or {}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_is_light() -> None:
    loaded = _python("import sys, json; import hf_fedshard; dir(hf_fedshard); print(json.dumps(sorted(sys.modules)))")
    assert "hf_fedshard.environment" in loaded
    heavy = {"torch", "accelerate", "transformers", "numpy", "datasets", "peft"}
    assert not heavy & set(loaded)


STATE = """
import json, logging, os, sys, warnings
import torch, accelerate, transformers
from transformers.trainer import DEFAULT_CALLBACKS
from accelerate.state import AcceleratorState, PartialState

def state():
    loggers = {name: (logger.level, len(logger.handlers), logger.propagate, logger.disabled)
               for name, logger in logging.root.manager.loggerDict.items() if isinstance(logger, logging.Logger)
               and not name.startswith("hf_fedshard")}
    return {
        "environment": dict(os.environ),
        "loggers": loggers,
        "root logger": (logging.root.level, len(logging.root.handlers)),
        "filters": [str(item) for item in warnings.filters],
        "torch": [str(torch.get_default_dtype()), str(torch.get_default_device()), torch.is_grad_enabled(),
                  torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(),
                  torch.get_rng_state().sum().item(), torch.get_float32_matmul_precision(),
                  torch.distributed.is_initialized(), len(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks)],
        "callbacks": [str(item) for item in DEFAULT_CALLBACKS],
        "init": AcceleratorState.__init__.__qualname__ + AcceleratorState.__init__.__module__,
        "wrapped": hasattr(AcceleratorState.__init__, "__wrapped__"),
        "shared": [str(AcceleratorState._shared_state), str(PartialState._shared_state)],
        "signals": str([__import__("signal").getsignal(n) for n in (1, 2, 15)]),
        "threads": __import__("threading").active_count(),
        "hooks": [sys.excepthook.__name__, __import__("atexit")._ncallbacks()],
    }

transformers.Trainer, transformers.TrainerCallback  # what is imported lazily is imported before
import transformers.trainer, torch.distributed.fsdp, torch.distributed.tensor, torch.testing
import accelerate.utils.fsdp_utils, accelerate.parallelism_config, datasets
before = state()
import hf_fedshard
for name in hf_fedshard.__all__:
    getattr(hf_fedshard, name)
after = state()
print(json.dumps({key: [before[key], after[key]] for key in before if before[key] != after[key]}, default=str))
"""


@pytest.mark.parametrize("world_size", [pytest.param("1", marks=pytest.mark.slow), "4"])
def test_import_changes_no_state(world_size: str) -> None:
    """Also with every public name loaded, and in a launch that asks for no FSDP."""
    assert _python(STATE, {"WORLD_SIZE": world_size}) == {}


# A child of a process that has torch and Accelerate in memory is a fresh interpreter to the package, and costs no 4 s.
INSTALLED = """
import json, os, sys
import torch, accelerate
from accelerate.state import AcceleratorState
results = []
for change in json.loads(sys.stdin.read()):
    read, write = os.pipe()
    if os.fork() == 0:
        os.environ.update(change)
        import hf_fedshard
        installed = [hasattr(AcceleratorState.__init__, "__wrapped__"), "hf_fedshard.cpu" in sys.modules]
        os.write(write, json.dumps(installed).encode())
        os._exit(0)
    os.close(write)
    os.wait()
    results.append(json.loads(os.read(read, 100)))
print(json.dumps(results))
"""


def test_cpu_seam_is_installed_where_it_is_asked_for() -> None:
    cases: list[tuple[dict[str, str], bool]] = [
        ({}, True),
        ({"FSDP_VERSION": "1"}, False),
        ({"FSDP_VERSION": ""}, False),  # Accelerate's default is version 1
        ({"WORLD_SIZE": "1"}, False),
        ({"ACCELERATE_USE_FSDP": "false"}, False),
        ({"ACCELERATE_USE_FSDP": ""}, False),
    ]
    # ACCELERATE_USE_CPU stands for a machine without accelerators where this one has some.
    launch = {**fsdp_launch_env(2, 2), **RANK, "ACCELERATE_USE_CPU": "true"}
    results = _python(INSTALLED, stdin=json.dumps([{**launch, **change} for change, _ in cases]))
    assert results == [[installed, installed] for _, installed in cases]


INSTALL_TWICE = """
import json
from accelerate.state import AcceleratorState
from hf_fedshard import cpu
original, seen = AcceleratorState.__init__, []
for action in (cpu.uninstall, cpu.install, cpu.install, cpu.uninstall, cpu.uninstall, cpu.install, cpu.uninstall):
    action()
    seen.append(AcceleratorState.__init__ is original)
print(json.dumps([seen, AcceleratorState.__init__.__name__]))
"""


def test_install_and_uninstall() -> None:
    assert _python(INSTALL_TWICE) == [[True, False, False, True, True, False, True], "__init__"]


def test_public_names() -> None:
    assert hf_fedshard.__all__ == sorted(hf_fedshard.__all__)
    assert set(hf_fedshard.__all__) == set(hf_fedshard._MODULES)
    assert set(hf_fedshard.__all__) <= set(dir(hf_fedshard))
    for name, module in hf_fedshard._MODULES.items():
        assert getattr(hf_fedshard, name).__module__ == f"hf_fedshard.{module}"
    with pytest.raises(AttributeError, match="has no attribute 'FedAvg'"):
        _ = hf_fedshard.FedAvg


def test_static_imports_name_the_same() -> None:
    """Type checkers read the block under TYPE_CHECKING, the interpreter the table."""
    tree = ast.parse(Path(hf_fedshard.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == hf_fedshard._MODULES


def _documented_arguments(text: str) -> set[str]:
    section = re.search(r"Args:\n(.*?)(?:\n\s*\n\s*[A-Z]\w+:\n|\n\s*```|\Z)", text, re.DOTALL)
    return set(re.findall(r"^\s*(\w+) \(\[?`", section.group(1), re.MULTILINE)) if section else set()


@pytest.mark.parametrize("name", hf_fedshard.__all__)
def test_public_names_are_documented(name: str) -> None:
    member = getattr(hf_fedshard, name)
    text = inspect.getdoc(member) or ""
    assert len(text) > 20
    # A dataclass writes its signature where there is no docstring.
    assert not text.startswith(f"{name}(")
    if inspect.isclass(member) and issubclass(member, Exception):
        return
    parameters = set(inspect.signature(member).parameters)
    if name == "FederatedFSDPPlugin":  # those of its base class are documented there
        parameters -= set(inspect.signature(member.__mro__[1]).parameters)
    assert parameters <= _documented_arguments(text), parameters - _documented_arguments(text)
    for attribute, value in vars(member).items() if inspect.isclass(member) else ():
        if not attribute.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            assert inspect.getdoc(value), f"{name}.{attribute}"


def test_version_is_defined_once(root: Path) -> None:
    version = hf_fedshard.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert importlib.metadata.version("hf_fedshard") == version
    files = [*root.glob("hf_fedshard/*.py"), root / "setup.cfg", root / "pyproject.toml"]
    definitions = [path.name for path in files if re.search(r"^(__version__|version) *=", path.read_text(), re.M)]
    assert sorted(definitions) == ["__init__.py", "setup.cfg"]
    assert "version = attr: hf_fedshard.__version__" in (root / "setup.cfg").read_text()


def test_tested_versions_agree(root: Path) -> None:
    from hf_fedshard.versions import TESTED_VERSIONS, versions

    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", (root / "constraints.txt").read_text(), re.M))
    stated = dict(re.findall(r"(torch|accelerate|transformers) ([\d.]+)", TESTED_VERSIONS))
    stated_versions = re.findall(r"(torch|accelerate|transformers) (\d+\.\d+\.\d+)", (root / "README.md").read_text())
    readme = dict(reversed(stated_versions))  # the newest set is the one that is named first
    assert set(stated) == {"torch", "accelerate", "transformers"} == set(readme) == set(versions())
    for package, version in stated.items():
        assert pinned[package].startswith(version + "."), package
        assert readme[package] == pinned[package]
        assert versions()[package] == importlib.metadata.version(package)


def test_types_are_shipped(root: Path) -> None:
    assert (root / "hf_fedshard" / "py.typed").is_file()
    assert "hf_fedshard = py.typed" in (root / "setup.cfg").read_text()


CORE_ALONE = """
import importlib, json, sys
for name in ("accelerate", "transformers", "peft", "datasets", "evaluate"):
    sys.modules[name] = None  # importing it raises
for name in {names!r}:
    importlib.import_module("hf_fedshard." + name)
print(json.dumps(sorted(name.split(".")[1] for name in sys.modules if name.startswith("hf_fedshard."))))
"""


def test_core_needs_torch_alone() -> None:
    # What these import of the package is core too.
    assert set(_python(CORE_ALONE.format(names=CORE))) >= set(CORE)


def test_one_module_reads_the_environment() -> None:
    for path in Path(hf_fedshard.__file__).parent.glob("*.py"):
        reads = re.findall(r"\benviron\b|\bgetenv\b", path.read_text())
        assert bool(reads) == (path.name == Path(environment.__file__).name), path.name
