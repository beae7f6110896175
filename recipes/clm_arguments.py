"""The command line of `pretrain_clm.py`: its argument groups and argument files."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from transformers import TrainingArguments

from recipe_arguments import FederationArguments, SourceArguments, parse_groups


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
class DataArguments(SourceArguments):
    """
    Which texts are trained and evaluated on, and how they become blocks of tokens.

    Args:
        text_column (`str`, *optional*, defaults to `"text"`):
            Column that holds the text.
        block_size (`int`, *optional*, defaults to 1024):
            Tokens in one training sequence.
        max_eval_blocks (`int`, *optional*):
            Evaluate on at most this many sequences, of each part if there are parts.
        part_column (`str`, *optional*):
            Column of numbers by which the texts are split into parts, one a federation group.
        part_bounds (`list[float]`, *optional*):
            Where a new part begins, in rising order: one bound makes two parts.
    """

    text_column: str = field(default="text", metadata={"help": "Column that holds the text."})
    block_size: int = field(default=1024, metadata={"help": "Tokens in one training sequence."})
    max_eval_blocks: int | None = field(default=None, metadata={"help": "Evaluate on at most this many sequences."})
    part_column: str | None = field(
        default=None,
        metadata={
            "help": "Column of numbers, such as year, that splits the texts into parts, one a federation group."
        },
    )
    part_bounds: list[float] | None = field(
        default=None, metadata={"help": "Where a new part begins, in rising order: one bound makes two parts."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 2:
            raise ValueError(f"--block_size is at least 2, got {self.block_size}.")
        if (self.part_column is None) != (not self.part_bounds):
            raise ValueError("--part_column and --part_bounds go together, got one of them.")
        if self.part_bounds and sorted(set(self.part_bounds)) != self.part_bounds:
            raise ValueError(f"--part_bounds rise, got {self.part_bounds}.")
        if self.part_column is not None and self.streaming:
            raise ValueError("--part_column needs texts that are not streamed.")


class RecipeArguments(NamedTuple):
    """The argument groups of one run."""

    model: ModelArguments
    data: DataArguments
    federation: FederationArguments
    training: TrainingArguments


def parse_arguments(args: Sequence[str] | None = None) -> RecipeArguments:
    """
    Parses the command line.

    Args:
        args (`Sequence[str]`, *optional*):
            Arguments in place of those of the process.

    Returns:
        `RecipeArguments`: The argument groups.
    """
    groups = (ModelArguments, DataArguments, FederationArguments, TrainingArguments)
    return RecipeArguments(*parse_groups(groups, USAGE, DESCRIPTION, args))
