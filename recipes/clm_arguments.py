"""The command line of `pretrain_clm.py`: its argument groups and argument files."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from transformers import HfArgumentParser, TrainingArguments


DESCRIPTION = "Pre-trains a causal language model, federated (FL+FSDP, FL+HSDP) or synchronous (FSDP, HSDP)."
USAGE = "accelerate launch --config_file LAUNCH_FILE recipes/pretrain_clm.py [--args_file FILE] [option ...]"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
MODELS_FOLDER = Path(__file__).resolve().parent / "models"


@dataclass
class ModelArguments:
    """
    Which model is trained, and whether from scratch: exactly one of the first three arguments.

    Args:
        model_name_or_path (`str`, *optional*):
            Checkpoint to continue from, on the Hub or in a local folder.
        config_name (`str`, *optional*):
            Model configuration to start from scratch with, on the Hub or in a local folder.
        preset (`str`, *optional*):
            Name of a model configuration in `recipes/models`, to start from scratch with.
        tokenizer_name (`str`, *optional*):
            Tokenizer, on the Hub or in a local folder. Defaults to the one of `model_name_or_path` or `config_name`.
        train_tokenizer (`bool`, *optional*, defaults to `False`):
            Train a byte-level BPE tokenizer on the training texts.
        vocab_size (`int`, *optional*, defaults to 2048):
            Vocabulary of the tokenizer that is trained.
        attn_implementation (`str`, *optional*):
            Attention back end, such as `"sdpa"` or `"flash_attention_2"`.
    """

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Checkpoint to continue from: a Hub name or a local folder."}
    )
    config_name: str | None = field(
        default=None, metadata={"help": "Model configuration to train from scratch: a Hub name or a local folder."}
    )
    preset: str | None = field(
        default=None,
        metadata={
            "help": "Model configuration of recipes/models to train from scratch, such as demo or llama-3.1-8b."
        },
    )
    tokenizer_name: str | None = field(
        default=None,
        metadata={"help": "Tokenizer: a Hub name or a local folder. Default: the one of the checkpoint or config."},
    )
    train_tokenizer: bool = field(
        default=False, metadata={"help": "Train a byte-level BPE tokenizer on the training texts."}
    )
    vocab_size: int = field(default=2048, metadata={"help": "Vocabulary size of --train_tokenizer."})
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention back end, such as sdpa or flash_attention_2."}
    )

    def __post_init__(self) -> None:
        sources = {name: getattr(self, name) for name in ("model_name_or_path", "config_name", "preset")}
        given = {name: value for name, value in sources.items() if value is not None}
        if len(given) != 1:
            raise ValueError(
                f"Give exactly one of {', '.join(f'--{name}' for name in sources)}, got {given or 'none'}."
            )
        if self.train_tokenizer and self.tokenizer_name is not None:
            raise ValueError(f"--train_tokenizer and --tokenizer_name={self.tokenizer_name} exclude each other.")
        if self.preset is not None:
            known = sorted(path.parent.name for path in MODELS_FOLDER.glob("*/config.json"))
            if self.preset not in known:
                raise ValueError(f"--preset is one of {', '.join(known)}, got {self.preset!r}.")
            self.config_name = str(MODELS_FOLDER / self.preset)
        if self.config_name is not None and Path(self.config_name).is_dir():
            # Found here and not by AutoTokenizer, whose message speaks of other packages.
            has_tokenizer = any((Path(self.config_name) / name).exists() for name in TOKENIZER_FILES)
            if not (has_tokenizer or self.train_tokenizer or self.tokenizer_name):
                raise ValueError(
                    f"{self.preset or self.config_name} comes without a tokenizer. Add --train_tokenizer, which makes one"
                    " from your texts, or --tokenizer_name."
                )


@dataclass
class DataArguments:
    """
    Which texts are trained and evaluated on, and how they become blocks of tokens.

    Args:
        dataset_name (`str`, *optional*):
            Data set on the Hub, or a local folder with one.
        dataset_config_name (`str`, *optional*):
            Configuration of `dataset_name`.
        train_file (`str`, *optional*):
            Local file, in place of `dataset_name`: json, jsonl, csv, parquet or txt, also compressed.
        validation_file (`str`, *optional*):
            Local file with the texts to evaluate on.
        train_split (`str`, *optional*, defaults to `"train"`):
            Split of `dataset_name` to train on.
        validation_split (`str`, *optional*):
            Split of `dataset_name` to evaluate on.
        text_column (`str`, *optional*, defaults to `"text"`):
            Column that holds the text.
        holdout_column (`str`, *optional*):
            Column that decides which rows are held out for evaluation.
        holdout_pattern (`str`, *optional*):
            Regular expression searched in `holdout_column`: rows in which it is found are held out.
        validation_fraction (`float`, *optional*):
            Share of the rows, drawn at random, to hold out for evaluation.
        block_size (`int`, *optional*, defaults to 1024):
            Tokens in one training sequence.
        max_eval_blocks (`int`, *optional*):
            Evaluate on at most this many sequences.
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
    text_column: str = field(default="text", metadata={"help": "Column that holds the text."})
    holdout_column: str | None = field(
        default=None, metadata={"help": "Column that decides which rows are held out, such as year."}
    )
    holdout_pattern: str | None = field(
        default=None, metadata={"help": "Regular expression: rows whose --holdout_column has it are held out."}
    )
    validation_fraction: float | None = field(
        default=None, metadata={"help": "Share of the rows to hold out at random, between 0 and 1."}
    )
    block_size: int = field(default=1024, metadata={"help": "Tokens in one training sequence."})
    max_eval_blocks: int | None = field(default=None, metadata={"help": "Evaluate on at most this many sequences."})
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
            raise ValueError(f"Evaluation texts come from one source, got {' and '.join(given)}.")
        if self.validation_split is not None and self.dataset_name is None:
            raise ValueError("--validation_split belongs to --dataset_name; use --validation_file with --train_file.")
        if self.validation_fraction is not None:
            if not 0 < self.validation_fraction < 1:
                raise ValueError(f"--validation_fraction lies in (0, 1), got {self.validation_fraction}.")
            if self.streaming:
                raise ValueError("--validation_fraction needs the number of rows, which a stream does not tell.")
        if self.block_size < 2:
            raise ValueError(f"--block_size is at least 2, got {self.block_size}.")


@dataclass
class FederationArguments:
    """
    How the run is federated.

    Args:
        federated (`bool`, *optional*, defaults to `True`):
            Train in federation groups. `False` runs the synchronous baseline on the same launch file.
        num_groups (`int`, *optional*):
            Federation groups. Defaults to `FEDSHARD_NUM_GROUPS`, else to the replicas of the launch file.
        sync_every (`int`, *optional*):
            Optimizer steps between two averagings. Defaults to `FEDSHARD_SYNC_EVERY`, else to 8.
    """

    federated: bool = field(
        default=True, metadata={"help": "Train in federation groups; --no_federated runs the synchronous baseline."}
    )
    num_groups: int | None = field(
        default=None,
        metadata={"help": "Federation groups. Default: FEDSHARD_NUM_GROUPS, else the replicas of the launch file."},
    )
    sync_every: int | None = field(
        default=None,
        metadata={"help": "Optimizer steps between two averagings. Default: FEDSHARD_SYNC_EVERY, else 8."},
    )


class RecipeArguments(NamedTuple):
    """The argument groups of one run."""

    model: ModelArguments
    data: DataArguments
    federation: FederationArguments
    training: TrainingArguments


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


def parse_arguments(args: Sequence[str] | None = None) -> RecipeArguments:
    """
    Parses the command line. Explicit arguments win over those of `--args_file`, which win over defaults.

    Args:
        args (`Sequence[str]`, *optional*):
            Arguments in place of those of the process.

    Returns:
        `RecipeArguments`: The argument groups.
    """
    # Found before the main parser runs, because the file sets that parser's defaults.
    file_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    help_text = "YAML file of arguments; those on the command line win."
    file_parser.add_argument("--args_file", type=Path, default=None, help=help_text)
    args_file, remaining = file_parser.parse_known_args(args)

    groups = (ModelArguments, DataArguments, FederationArguments, TrainingArguments)
    parser = HfArgumentParser(groups, usage=USAGE, description=DESCRIPTION, parents=[file_parser])  # type: ignore[arg-type]
    if args_file.args_file is not None:
        defaults = read_args_file(args_file.args_file)
        unknown = sorted(set(defaults) - {item.name for group in groups for item in fields(group) if item.init})
        if unknown:
            raise ValueError(f"{args_file.args_file} has unknown arguments: {', '.join(unknown)}.")
        parser.set_defaults(**defaults)
    model, data, federation, training, *_ = parser.parse_args_into_dataclasses(remaining, look_for_args_file=False)
    return RecipeArguments(model, data, federation, training)
