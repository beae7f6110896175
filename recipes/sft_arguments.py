"""The command line of `sft_chat.py`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from transformers import TrainingArguments

from recipe_arguments import FederationArguments, SourceArguments, parse_groups


DESCRIPTION = "Fine-tunes a chat model on answers, fully or with LoRA, federated or synchronous."
USAGE = "accelerate launch --config_file LAUNCH_FILE recipes/sft_chat.py [--args_file FILE] [option ...]"


@dataclass
class ChatArguments(SourceArguments):
    """
    Which chat model is fine-tuned, and on which conversations.

    Args:
        model_name_or_path (`str`, *optional*):
            Model with a chat template, on the Hub or in a local folder.
        messages_column (`str`, *optional*, defaults to `"messages"`):
            Column of conversations: lists of messages with `role` and `content`.
        max_length (`int`, *optional*, defaults to 1024):
            Tokens after which a conversation is cut off; with `packing`, tokens in a block.
        packing (`bool`, *optional*, defaults to `False`):
            Put several conversations into one block in place of padding each.
        max_eval_rows (`int`, *optional*):
            Evaluate on at most this many conversations.
        attn_implementation (`str`, *optional*):
            Attention back end.
    """

    model_name_or_path: str = field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        metadata={"help": "Model with a chat template: a Hub name or a local folder."},
    )
    messages_column: str = field(default="messages", metadata={"help": "Column of conversations."})
    max_length: int = field(default=1024, metadata={"help": "Tokens of a conversation, with --packing of a block."})
    packing: bool = field(default=False, metadata={"help": "Several conversations in a block, in place of padding."})
    max_eval_rows: int | None = field(default=None, metadata={"help": "Evaluate on at most this many conversations."})
    attn_implementation: str | None = field(default=None, metadata={"help": "Attention back end, such as sdpa."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.streaming:
            raise ValueError(
                "--streaming is an option of pretrain_clm.py; conversations are prepared before training."
            )


@dataclass
class LoraArguments:
    """
    Whether adapters are trained in place of the whole model.

    Args:
        lora (`bool`, *optional*, defaults to `False`):
            Train LoRA adapters.
        lora_r (`int`, *optional*, defaults to 16):
            Their rank.
        lora_alpha (`int`, *optional*, defaults to 32):
            Their scale.
        lora_dropout (`float`, *optional*, defaults to 0.0):
            Their dropout.
        lora_target_modules (`list[str]`, *optional*):
            Layers that get one. Defaults to all linear layers but the output.
    """

    lora: bool = field(default=False, metadata={"help": "Train LoRA adapters in place of the whole model."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of the adapters."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout of the adapters."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Layers that get one. Default: all linear layers but the output."}
    )


class RecipeArguments(NamedTuple):
    """The argument groups of one run."""

    chat: ChatArguments
    lora: LoraArguments
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
    groups = (ChatArguments, LoraArguments, FederationArguments, TrainingArguments)
    return RecipeArguments(*parse_groups(groups, USAGE, DESCRIPTION, args))
