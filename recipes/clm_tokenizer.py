"""The tokenizer of a run: a given one, or a byte-level BPE trained on the texts."""

from collections.abc import Iterable, Iterator

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from clm_arguments import ModelArguments


END_OF_TEXT = "<|endoftext|>"
# A vocabulary is settled by far fewer texts than a large corpus has.
MAX_TOKENIZER_TEXTS = 200_000


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """
    Trains a byte-level BPE tokenizer. The same texts give the same tokenizer.

    Args:
        texts (`Iterable[str]`):
            Training texts.
        vocab_size (`int`):
            Tokens in the vocabulary, the end-of-text token and the 256 bytes among them.

    Returns:
        `Tokenizer`: The trained tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(
    args: ModelArguments, train_dataset: Dataset | IterableDataset, text_column: str, block_size: int
) -> PreTrainedTokenizerBase:
    """
    Loads or trains the tokenizer of a run. Every process gets the same one.

    Args:
        args (`ModelArguments`):
            Where the tokenizer comes from.
        train_dataset (`Dataset` or `IterableDataset`):
            Texts for a tokenizer that is trained.
        text_column (`str`):
            Column of `train_dataset` that holds the text.
        block_size (`int`):
            Tokens in one training sequence, noted in a tokenizer that is trained.

    Returns:
        `PreTrainedTokenizerBase`: The tokenizer, with an end-of-text token.
    """
    if not args.train_tokenizer:
        name = args.tokenizer_name or args.model_name_or_path or args.config_name
        tokenizer = AutoTokenizer.from_pretrained(name)
        if tokenizer.eos_token_id is None:
            raise ValueError(f"The tokenizer of {name} has no end-of-text token, which packing puts between texts.")
        return tokenizer

    def texts() -> Iterator[str]:
        for row in train_dataset.select_columns(text_column).take(MAX_TOKENIZER_TEXTS):
            yield row[text_column]

    # Sent over the network, not through a file: nodes need no shared folder, and no process sees half a file.
    serialised = [train_bpe(texts(), args.vocab_size).to_str() if PartialState().is_main_process else ""]
    broadcast_object_list(serialised)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(serialised[0]),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=block_size,
    )
