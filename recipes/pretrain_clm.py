"""Causal language model pre-training, federated (FL+FSDP, FL+HSDP) or synchronous (FSDP, HSDP).

    accelerate launch --config_file accelerate_configs/cpu_fl_fsdp_4proc.yaml recipes/pretrain_clm.py \
        --args_file recipes/presets/demo.yaml

Trains a configuration from scratch, or goes on from a checkpoint, on any text data set of the Hub or of the local disk,
saves a model that `AutoModelForCausalLM.from_pretrained` loads, and reports the perplexity on held-out texts.
`recipes/README.md` lists the options and the presets.
"""

from dataclasses import dataclass
from typing import Any

import torch
from datasets import concatenate_datasets
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    set_seed,
)

from clm_arguments import ModelArguments, RecipeArguments, parse_arguments
from clm_data import collate_blocks, pack
from clm_metrics import make_compute_metrics, sequence_losses
from clm_parts import OwnPerplexity, split_parts
from clm_tokenizer import load_tokenizer
from hf_fedshard import GroupData, group_dataset, shutdown
from recipe_data import AnyDataset, load_rows
from recipe_run import make_callbacks, quiet_console, run


def make_model(args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """
    Makes the model: random weights for a configuration, or the weights of a checkpoint.

    Args:
        args (`ModelArguments`):
            Which model.
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer, which has to fit the vocabulary of the model.

    Returns:
        `PreTrainedModel`: The model, with float32 weights.
    """
    # float32 whatever the checkpoint holds: weights, moments and averages stay float32, `--bf16` computes in bfloat16.
    options: dict[str, Any] = {"dtype": torch.float32}
    if args.attn_implementation is not None:
        options["attn_implementation"] = args.attn_implementation
    if args.model_name_or_path is not None:
        model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, **options)
    else:
        assert args.config_name is not None, "ModelArguments asks for exactly one source"
        special_tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        config = AutoConfig.from_pretrained(args.config_name, **special_tokens)
        model = AutoModelForCausalLM.from_config(config, **options)
    vocab_size = model.config.vocab_size
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} tokens, the model {vocab_size} embeddings. Choose another"
            " tokenizer, or a configuration with a vocab_size that is large enough."
        )
    return model


@dataclass
class Blocks:
    """
    The data of a run.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer.
        train (`AnyDataset` or [`GroupData`]):
            Blocks to train on; of each group its own if there are parts.
        evaluation (`AnyDataset` or `dict[str, Dataset]`, *optional*):
            Blocks to evaluate on; by part if there are parts.
    """

    tokenizer: PreTrainedTokenizerBase
    train: AnyDataset | GroupData
    evaluation: Any


def prepare_data(args: RecipeArguments) -> Blocks:
    """
    Prepares the tokenizer and the blocks. The first process of each node fills the cache that the others read, all of it
    before training: inside a round no group may wait for another.

    Args:
        args (`RecipeArguments`):
            The arguments of the run.

    Returns:
        `Blocks`: Tokenizer, training and evaluation blocks.
    """
    data = args.data
    with args.training.main_process_first(desc="loading the texts"):
        train_texts, eval_texts = load_rows(data, args.training.seed)
    tokenizer = load_tokenizer(args.model, train_texts, data.text_column, data.block_size)

    def pack_parts(texts: Any, limit: int | None) -> dict[str, Any]:
        assert data.part_column is not None and data.part_bounds is not None, "DataArguments asks for both"
        parts = split_parts(texts, data.part_column, data.part_bounds)
        return {name: pack(part, tokenizer, data, limit) for name, part in parts.items()}

    with args.training.main_process_first(desc="packing the blocks"):
        if data.part_column is None:
            train = pack(train_texts, tokenizer, data, limit=None)
            evaluation = None if eval_texts is None else pack(eval_texts, tokenizer, data, limit=data.max_eval_blocks)
            return Blocks(tokenizer, train, evaluation)
        train_parts = pack_parts(train_texts, None)
        eval_parts = None if eval_texts is None else pack_parts(eval_texts, data.max_eval_blocks)
    if not args.federation.federated:
        return Blocks(tokenizer, concatenate_datasets(list(train_parts.values())), eval_parts)
    return Blocks(tokenizer, group_dataset(list(train_parts.values())), eval_parts)


def make_trainer(args: RecipeArguments, blocks: Blocks) -> Trainer:
    """
    Makes the Trainer: an ordinary one, with one callback more if the run is federated.

    Args:
        args (`RecipeArguments`):
            The arguments of the run.
        blocks (`Blocks`):
            Its data.

    Returns:
        `Trainer`: Trainer that is ready to train.
    """
    with args.training.main_process_first(desc="loading the metric"):
        compute_metrics = make_compute_metrics()
    return Trainer(
        model=make_model(args.model, blocks.tokenizer),
        args=args.training,
        train_dataset=blocks.train,
        eval_dataset=blocks.evaluation,
        data_collator=collate_blocks,
        processing_class=blocks.tokenizer,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=sequence_losses,
        callbacks=make_callbacks(args.federation),
    )


@record  # the launcher's last lines then show what went wrong on the first rank that failed
def main() -> None:
    """Trains, saves, evaluates."""
    args = parse_arguments()
    quiet_console()
    set_seed(args.training.seed)
    blocks = prepare_data(args)
    trainer = make_trainer(args, blocks)
    own = None
    if args.data.part_column is not None and args.federation.federated and blocks.evaluation is not None:
        own = OwnPerplexity(blocks.evaluation, args.training.per_device_eval_batch_size)
        own.trainer = trainer
        trainer.add_callback(own)
    metrics = run(trainer, evaluate_first=args.model.model_name_or_path is not None)
    if own is not None:
        results = own.results()
        trainer.save_metrics("own", results)
        metrics |= results
    if trainer.is_world_process_zero():
        for name, value in metrics.items():
            if name.endswith("perplexity"):
                print(f"{name.removesuffix('_perplexity')}: perplexity {value:.1f}")


if __name__ == "__main__":
    main()
    shutdown()
