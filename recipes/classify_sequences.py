"""Fine-tunes a model to classify texts, federated (FL+FSDP, FL+HSDP) or synchronous (FSDP, HSDP).

    accelerate launch --config_file accelerate_configs/cpu_fl_fsdp_4proc.yaml \
        --fsdp_transformer_layer_cls_to_wrap BertLayer \
        recipes/classify_sequences.py --args_file recipes/presets/classify-era-minilm.yaml

Takes any encoder or decoder that `AutoModelForSequenceClassification` knows, and any data with a text and a label column;
reports accuracy and F1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import evaluate
import numpy as np
import torch
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_fedshard import shutdown
from recipe_arguments import FederationArguments, SourceArguments, parse_groups
from recipe_data import AnyDataset, load_rows
from recipe_run import make_callbacks, quiet_console, run


DESCRIPTION = "Fine-tunes a model to classify texts, federated (FL+FSDP, FL+HSDP) or synchronous (FSDP, HSDP)."
USAGE = "accelerate launch --config_file LAUNCH_FILE recipes/classify_sequences.py [--args_file FILE] [option ...]"
METRICS = Path(__file__).resolve().parent / "metrics"


@dataclass
class ClassificationArguments(SourceArguments):
    """
    Which model is fine-tuned, and where it finds texts and labels.

    Args:
        model_name_or_path (`str`):
            Model to fine-tune, on the Hub or in a local folder.
        text_column (`str`, *optional*, defaults to `"text"`):
            Column that holds the text.
        text_pair_column (`str`, *optional*):
            Column that holds a second text.
        label_column (`str`, *optional*, defaults to `"label"`):
            Column that holds the class, a name or a number.
        max_length (`int`, *optional*, defaults to 128):
            Tokens after which a text is cut off.
    """

    model_name_or_path: str = field(
        default="sentence-transformers/all-MiniLM-L6-v2",
        metadata={"help": "Model to fine-tune: a Hub name or a local folder."},
    )
    text_column: str = field(default="text", metadata={"help": "Column that holds the text."})
    text_pair_column: str | None = field(default=None, metadata={"help": "Column that holds a second text."})
    label_column: str = field(default="label", metadata={"help": "Column that holds the class."})
    max_length: int = field(default=128, metadata={"help": "Tokens after which a text is cut off."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.streaming:
            raise ValueError("--streaming does not tell which classes there are; classification reads all rows.")


class RecipeArguments(NamedTuple):
    """The argument groups of one run."""

    task: ClassificationArguments
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
    groups = (ClassificationArguments, FederationArguments, TrainingArguments)
    return RecipeArguments(*parse_groups(groups, USAGE, DESCRIPTION, args))


def encode(
    rows: AnyDataset, labels: Sequence[Any], tokenizer: PreTrainedTokenizerBase, args: ClassificationArguments
) -> AnyDataset:
    """
    Tokenises texts and numbers labels.

    Args:
        rows (`AnyDataset`):
            Texts and labels.
        labels (`Sequence`):
            The classes, in the order of their numbers.
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer.
        args (`ClassificationArguments`):
            Columns and length.

    Returns:
        `AnyDataset`: Rows of what the model takes.
    """
    numbers = {label: number for number, label in enumerate(labels)}
    columns = [args.text_column] + ([args.text_pair_column] if args.text_pair_column else [])

    def encode_batch(batch: dict[str, list[Any]]) -> dict[str, Any]:
        encoded = tokenizer(*(batch[name] for name in columns), truncation=True, max_length=args.max_length)
        unknown = sorted({str(label) for label in batch[args.label_column] if label not in numbers})
        if unknown:
            raise ValueError(f"The training rows do not have the classes {', '.join(unknown)} of the evaluation rows.")
        return {**encoded, "labels": [numbers[label] for label in batch[args.label_column]]}

    return rows.map(encode_batch, batched=True, remove_columns=rows.column_names)


def make_compute_metrics(num_labels: int) -> Callable[[EvalPrediction], dict[str, float]]:
    """
    Accuracy and F1, from the metric scripts of this repository.

    Args:
        num_labels (`int`):
            Number of classes: with two, F1 of the second, else the mean over classes.

    Returns:
        `Callable[[EvalPrediction], dict[str, float]]`: For a Trainer's `compute_metrics`.
    """
    accuracy = evaluate.load(str(METRICS / "accuracy"), keep_in_memory=True)
    f1 = evaluate.load(str(METRICS / "f1"), keep_in_memory=True)
    average = "binary" if num_labels == 2 else "macro"

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        pairs = {"predictions": np.argmax(prediction.predictions, axis=1), "references": prediction.label_ids}
        return accuracy.compute(**pairs) | f1.compute(average=average, **pairs)

    return compute_metrics


def make_trainer(args: RecipeArguments) -> Trainer:
    """
    Makes the Trainer: an ordinary one, with one callback more if the run is federated.

    Args:
        args (`RecipeArguments`):
            The arguments of the run.

    Returns:
        `Trainer`: Trainer that is ready to train.
    """
    task = args.task
    tokenizer = AutoTokenizer.from_pretrained(task.model_name_or_path)
    with args.training.main_process_first(desc="preparing the rows"):
        train_rows, eval_rows = load_rows(task, args.training.seed)
        labels = sorted(set(train_rows[task.label_column]))
        train_rows = encode(train_rows, labels, tokenizer, task)
        eval_rows = None if eval_rows is None else encode(eval_rows, labels, tokenizer, task)
        compute_metrics = make_compute_metrics(len(labels))
    model = AutoModelForSequenceClassification.from_pretrained(
        task.model_name_or_path,
        num_labels=len(labels),
        id2label={number: str(label) for number, label in enumerate(labels)},
        label2id={str(label): number for number, label in enumerate(labels)},
        dtype=torch.float32,
    )
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return Trainer(
        model=model,
        args=args.training,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
        callbacks=make_callbacks(args.federation),
    )


@record  # the launcher's last lines then show what went wrong on the first rank that failed
def main() -> None:
    """Trains, saves, evaluates."""
    args = parse_arguments()
    quiet_console()
    set_seed(args.training.seed)
    trainer = make_trainer(args)
    metrics = run(trainer)
    if trainer.is_world_process_zero() and metrics:
        print(f"accuracy {metrics['eval_accuracy']:.4f}, F1 {metrics['eval_f1']:.4f} on held-out texts")


if __name__ == "__main__":
    main()
    shutdown()
