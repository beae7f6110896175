"""Conversations to batches: chat template, labels on answers only, packing or padding."""

from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase


IGNORED = -100
Message = dict[str, str]
Row = dict[str, list[int]]


def encode_conversation(messages: list[Message], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Row:
    """
    Tokenises one conversation with the model's chat template. Only what the assistant says is a label.

    Args:
        messages (`list[dict[str, str]]`):
            `role` and `content`.
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer with a chat template.
        max_length (`int`):
            Tokens after which it is cut off.

    Returns:
        `dict[str, list[int]]`: `input_ids` and `labels`.
    """

    def tokens(turns: list[Message], prompt: bool) -> list[int]:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    # By what each answer adds, since most templates do not mark answers.
    ids: list[int] = []
    labels: list[int] = []
    for turn, message in enumerate(messages):
        is_answer = message["role"] == "assistant"
        # The generation prompt belongs to the question: the model is given it.
        before = tokens(messages[:turn], prompt=True) if is_answer else ids
        after = tokens(messages[: turn + 1], prompt=False)
        if after[: len(before)] != before:
            raise ValueError(
                "This chat template changes what it has written when a message is added, so the answers cannot be told "
                "from the rest. Use a template that only appends."
            )
        labels += [IGNORED] * (len(before) - len(ids))
        labels += after[len(before) :] if is_answer else [IGNORED] * (len(after) - len(before))
        ids = after
    return {"input_ids": ids[:max_length], "labels": labels[:max_length]}


def encode(
    rows: Dataset, column: str, tokenizer: PreTrainedTokenizerBase, max_length: int, num_workers: int | None = None
) -> Dataset:
    """
    Tokenises conversations; those without an answer inside `max_length` are left out.

    Args:
        rows (`Dataset`):
            Conversations.
        column (`str`):
            Where they are.
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer with a chat template.
        max_length (`int`):
            Tokens after which one is cut off.
        num_workers (`int`, *optional*):
            Processes that tokenise.

    Returns:
        `Dataset`: `input_ids` and `labels`.
    """
    encoded = rows.map(
        lambda row: encode_conversation(row[column], tokenizer, max_length),
        remove_columns=rows.column_names,
        num_proc=num_workers,
        desc="Applying the chat template",
    )
    with_answer = encoded.filter(lambda row: any(label != IGNORED for label in row["labels"][1:]))
    if len(with_answer) == 0:
        raise ValueError(f"None of the {len(rows)} conversations has an answer inside {max_length} tokens.")
    return with_answer


def pack(rows: Dataset, max_length: int) -> Dataset:
    """
    Puts as many whole conversations into each block as fit, in order.

    Args:
        rows (`Dataset`):
            Rows of [`encode`].
        max_length (`int`):
            Tokens in a block.

    Returns:
        `Dataset`: `input_ids`, `labels`, and `position_ids` that begin again with each conversation, by which attention
        is kept inside it.
    """
    blocks: list[Row] = []
    for row in rows:
        ids, labels = row["input_ids"], row["labels"]
        if not blocks or len(blocks[-1]["input_ids"]) + len(ids) > max_length:
            blocks.append({"input_ids": [], "labels": [], "position_ids": []})
        block = blocks[-1]
        block["input_ids"] += ids
        # The first token of a conversation follows another one.
        block["labels"] += [IGNORED, *labels[1:]]
        block["position_ids"] += range(len(ids))
    return Dataset.from_list(blocks)


class PadRight:
    """
    Makes a batch of conversations or blocks of unequal length.

    Args:
        pad_token_id (`int`):
            What is put behind the shorter ones.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """
        Pads.

        Args:
            rows (`list[dict]`):
                Rows of [`encode`] or [`pack`].

        Returns:
            `dict[str, torch.Tensor]`: Tensors of shape (batch, longest). Blocks come without a mask, which would hide
            from the model that `position_ids` separate conversations.
        """
        longest = max(len(row["input_ids"]) for row in rows)

        def pad(name: str, value: int) -> torch.Tensor:
            return torch.tensor([list(row[name]) + [value] * (longest - len(row[name])) for row in rows])

        batch = {"input_ids": pad("input_ids", self.pad_token_id), "labels": pad("labels", IGNORED)}
        if "position_ids" in rows[0]:
            # Padding is a conversation of its own: its positions begin again.
            padded = [[*row["position_ids"], *range(longest - len(row["position_ids"]))] for row in rows]
            return batch | {"position_ids": torch.tensor(padded)}
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        return batch | {"attention_mask": (torch.arange(longest) < lengths[:, None]).long()}
