"""What the command lines of the recipes share: the source of the data, the federation, argument files."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser


@dataclass
class SourceArguments:
    """
    Which rows are trained and evaluated on.

    Args:
        dataset_name (`str`, *optional*):
            Data set on the Hub, or a local folder with one.
        dataset_config_name (`str`, *optional*):
            Configuration of `dataset_name`.
        train_file (`str`, *optional*):
            Local file, in place of `dataset_name`: json, jsonl, csv, parquet or txt, also compressed.
        validation_file (`str`, *optional*):
            Local file with the rows to evaluate on.
        train_split (`str`, *optional*, defaults to `"train"`):
            Split of `dataset_name` to train on.
        validation_split (`str`, *optional*):
            Split of `dataset_name` to evaluate on.
        holdout_column (`str`, *optional*):
            Column that decides which rows are held out for evaluation.
        holdout_pattern (`str`, *optional*):
            Regular expression searched in `holdout_column`: rows in which it is found are held out.
        validation_fraction (`float`, *optional*):
            Share of the rows, drawn at random, to hold out for evaluation.
        streaming (`bool`, *optional*, defaults to `False`):
            Read while training in place of preparing everything first.
        preprocessing_num_workers (`int`, *optional*):
            Processes that tokenise.
    """

    dataset_name: str | None = field(default=None, metadata={"help": "Data set: a Hub name or a local folder."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of --dataset_name."})
    train_file: str | None = field(
        default=None,
        metadata={"help": "Local file to train on: json, jsonl, csv, parquet or txt, also as .xz, .gz, .bz2 or .zst."},
    )
    validation_file: str | None = field(default=None, metadata={"help": "Local file to evaluate on."})
    train_split: str = field(default="train", metadata={"help": "Split of --dataset_name to train on."})
    validation_split: str | None = field(default=None, metadata={"help": "Split of --dataset_name to evaluate on."})
    holdout_column: str | None = field(
        default=None, metadata={"help": "Column that decides which rows are held out, such as year."}
    )
    holdout_pattern: str | None = field(
        default=None, metadata={"help": "Regular expression: rows whose --holdout_column has it are held out."}
    )
    validation_fraction: float | None = field(
        default=None, metadata={"help": "Share of the rows to hold out at random, between 0 and 1."}
    )
    streaming: bool = field(default=False, metadata={"help": "Read while training. Needs --max_steps."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenise."})

    def __post_init__(self) -> None:
        if (self.dataset_name is None) == (self.train_file is None):
            raise ValueError(
                f"Give either --dataset_name or --train_file, got {self.dataset_name!r} and {self.train_file!r}."
            )
        if (self.holdout_column is None) != (self.holdout_pattern is None):
            raise ValueError("--holdout_column and --holdout_pattern go together, got one of them.")
        sources = {
            "--validation_file": self.validation_file,
            "--validation_split": self.validation_split,
            "--holdout_column": self.holdout_column,
            "--validation_fraction": self.validation_fraction,
        }
        given = [name for name, value in sources.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"Evaluation rows come from one source, got {' and '.join(given)}.")
        if self.validation_split is not None and self.dataset_name is None:
            raise ValueError("--validation_split belongs to --dataset_name; use --validation_file with --train_file.")
        if self.validation_fraction is not None:
            if not 0 < self.validation_fraction < 1:
                raise ValueError(f"--validation_fraction lies in (0, 1), got {self.validation_fraction}.")
            if self.streaming:
                raise ValueError("--validation_fraction needs the number of rows, which a stream does not tell.")


@dataclass
class FederationArguments:
    """
    How the run is federated.

    Args:
        federated (`bool`, *optional*, defaults to `True`):
            Train in federation groups. `False` runs the synchronous baseline on the same launch file.
        num_groups (`int`, *optional*):
            Federation groups. Defaults to `FEDSHARD_NUM_GROUPS`, else to the replicas of the launch file.
        sync_every (`str`, *optional*):
            Optimizer steps between two averagings, or a list of periods, `"drift"` or `"auto"`. Defaults to `FEDSHARD_SYNC_EVERY`, else to 8.
    """

    federated: bool = field(
        default=True, metadata={"help": "Train in federation groups; --no_federated runs the synchronous baseline."}
    )
    num_groups: int | None = field(
        default=None,
        metadata={"help": "Federation groups. Default: FEDSHARD_NUM_GROUPS, else the replicas of the launch file."},
    )
    # Not `int | str`: the parser tries one type only. A number in a text is taken as one by `FederationConfig`.
    sync_every: str | None = field(
        default=None,
        metadata={
            "help": "Optimizer steps between two averagings, or a list such as 8x100,16, or drift, or auto. "
            "Default: FEDSHARD_SYNC_EVERY, else 8."
        },
    )


def read_args_file(path: Path) -> dict[str, Any]:
    """
    Reads an argument file, and below it the one that it names under `inherits`, relative to itself.

    Args:
        path (`Path`):
            YAML file that maps argument names to values.

    Returns:
        `dict[str, Any]`: The arguments; those of `path` win over inherited ones.
    """
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path} should map argument names to values, got {type(content).__name__}.")
    parent = content.pop("inherits", None)
    return content if parent is None else {**read_args_file(path.parent / parent), **content}


def parse_groups(groups: Sequence[type], usage: str, description: str, args: Sequence[str] | None = None) -> list[Any]:
    """
    Parses a command line. Explicit arguments win over those of `--args_file`, which win over defaults.

    Args:
        groups (`Sequence[type]`):
            Dataclasses of arguments.
        usage (`str`):
            How the script is started.
        description (`str`):
            What it does.
        args (`Sequence[str]`, *optional*):
            Arguments in place of those of the process.

    Returns:
        `list`: An instance of each dataclass.
    """
    # Found before the main parser runs, because the file sets that parser's defaults.
    file_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    help_text = "YAML file of arguments; those on the command line win."
    file_parser.add_argument("--args_file", type=Path, default=None, help=help_text)
    args_file, remaining = file_parser.parse_known_args(args)

    parser = HfArgumentParser(groups, usage=usage, description=description, parents=[file_parser])  # type: ignore[arg-type]
    if args_file.args_file is not None:
        defaults = read_args_file(args_file.args_file)
        unknown = sorted(set(defaults) - {item.name for group in groups for item in fields(group) if item.init})
        if unknown:
            raise ValueError(f"{args_file.args_file} has unknown arguments: {', '.join(unknown)}.")
        parser.set_defaults(**defaults)
        # A required argument may come from the file.
        for action in parser._actions:
            action.required = action.required and action.dest not in defaults
    parsed = parser.parse_args_into_dataclasses(remaining, look_for_args_file=False)
    return list(parsed[: len(groups)])
