"""
A script of the kind of `run_mlm.py` and `run_glue.py`, one after the other: a subclass of Trainer pre-trains with masks, a
second Trainer fine-tunes what it has saved. It knows nothing of federations, and has no `main` and no `use_cpu`.
"""

import argparse

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
)


parser = argparse.ArgumentParser()
parser.add_argument("--model_name_or_path")
parser.add_argument("--train_file")
parser.add_argument("--output_dir")
# An option of the same name as one of the runner.
parser.add_argument("--num_groups", type=int)
options = parser.parse_args()
assert options.num_groups == 7

tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path)
rows = load_dataset("json", data_files=options.train_file, split="train")
tokenized = rows.map(lambda row: tokenizer(row["text"], truncation=True, max_length=64))
shared = {"report_to": "none", "disable_tqdm": True, "logging_steps": 4, "per_device_train_batch_size": 4}


class LoggingTrainer(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        self.seen = getattr(self, "seen", 0) + len(inputs["input_ids"])
        return super().compute_loss(model, inputs, *args, **kwargs)


pretrainer = LoggingTrainer(
    model=AutoModelForMaskedLM.from_pretrained(options.model_name_or_path),
    args=TrainingArguments(f"{options.output_dir}/mlm", max_steps=6, save_strategy="no", **shared),
    train_dataset=tokenized.remove_columns(["label"]),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3),
    processing_class=tokenizer,
)
pretrainer.train()
pretrainer.save_model()
pretrainer.save_state()
pretrainer.accelerator.wait_for_everyone()
assert pretrainer.seen == 6 * 4


def compute_metrics(prediction):
    return {"accuracy": float((np.argmax(prediction.predictions, axis=1) == prediction.label_ids).mean())}


classifier = Trainer(
    model=AutoModelForSequenceClassification.from_pretrained(f"{options.output_dir}/mlm"),
    args=TrainingArguments(
        f"{options.output_dir}/classifier",
        max_steps=12,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        learning_rate=3e-3,
        **shared,
    ),
    train_dataset=tokenized,
    eval_dataset=tokenized.select(range(30)),
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=compute_metrics,
    processing_class=tokenizer,
    callbacks=[EarlyStoppingCallback(3)],
)
classifier.train()
classifier.save_state()
metrics = classifier.evaluate()
classifier.save_metrics("eval", metrics)
