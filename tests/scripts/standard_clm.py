"""
A script of the kind that Transformers ships as `run_clm.py`: dataclasses of arguments, a data set, a Trainer, metrics. It
knows nothing of federations.
"""

import logging
import math
import sys
from dataclasses import dataclass, field
from itertools import chain

import datasets
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "Checkpoint to start from."})


@dataclass
class DataTrainingArguments:
    train_file: str
    validation_file: str
    block_size: int = 32


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()

    logging.basicConfig(format="%(asctime)s - %(message)s", handlers=[logging.StreamHandler(sys.stdout)])
    transformers.utils.logging.set_verbosity(training_args.get_process_log_level())
    logger.warning(f"Process rank: {training_args.local_process_index}, device: {training_args.device}")
    set_seed(training_args.seed)

    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    raw_datasets = datasets.load_dataset("text", data_files=files)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)

    def tokenize_function(examples):
        return tokenizer(examples["text"])

    def group_texts(examples):
        joined = {key: list(chain(*examples[key])) for key in examples}
        total = len(joined["input_ids"]) // data_args.block_size * data_args.block_size
        result = {
            key: [tokens[i : i + data_args.block_size] for i in range(0, total, data_args.block_size)]
            for key, tokens in joined.items()
        }
        result["labels"] = result["input_ids"].copy()
        return result

    with training_args.main_process_first(desc="dataset map tokenization"):
        tokenized = raw_datasets.map(tokenize_function, batched=True, remove_columns=["text"])
        lm_datasets = tokenized.map(group_texts, batched=True)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=lm_datasets["train"] if training_args.do_train else None,
        eval_dataset=lm_datasets["validation"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )

    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        metrics = train_result.metrics
        metrics["train_samples"] = len(lm_datasets["train"])
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    trainer.create_model_card(model_name=model_args.model_name_or_path, tasks="text-generation")


def _mp_fn(index):
    main()


if __name__ == "__main__":
    main()
