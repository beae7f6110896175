"""Causal language model pre-training, federated (FL+FSDP, FL+HSDP) or synchronous (FSDP, HSDP).

    accelerate launch --config_file accelerate_configs/cpu_fl_fsdp_4proc.yaml recipes/pretrain_clm.py \
        --args_file recipes/presets/demo.yaml

Trains a configuration from scratch, or goes on from a checkpoint, on any text data set of the Hub or of the local disk,
saves a model that `AutoModelForCausalLM.from_pretrained` loads, and reports the perplexity on held-out texts.
`recipes/README.md` lists the options and the presets.
"""

import warnings
from typing import Any

import datasets
import torch
import transformers
from accelerate import PartialState
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    set_seed,
)

from clm_arguments import ModelArguments, RecipeArguments, parse_arguments
from clm_data import AnyDataset, collate_blocks, load_texts, pack
from clm_metrics import make_compute_metrics, sequence_losses
from clm_tokenizer import load_tokenizer
from hf_fedshard import FedAvgCallback, shutdown


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


def quiet_console() -> None:
    """Leaves progress bars to one process a node, and drops a warning that no user can act on."""
    if not PartialState().is_local_main_process:
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
    # Accelerate slices its own mesh in a way that PyTorch is about to change.
    warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh")


def prepare_data(args: RecipeArguments) -> tuple[PreTrainedTokenizerBase, AnyDataset, AnyDataset | None]:
    """
    Prepares the tokenizer and the blocks. The first process of each node fills the cache that the others read, all of it
    before training: inside a round no group may wait for another.

    Args:
        args (`RecipeArguments`):
            The arguments of the run.

    Returns:
        `tuple[PreTrainedTokenizerBase, AnyDataset, AnyDataset | None]`: Tokenizer, training and evaluation blocks.
    """
    with args.training.main_process_first(desc="loading the texts"):
        train_texts, eval_texts = load_texts(args.data, args.training.seed)
    tokenizer = load_tokenizer(args.model, train_texts, args.data.text_column, args.data.block_size)
    with args.training.main_process_first(desc="packing the blocks"):
        train_blocks = pack(train_texts, tokenizer, args.data, limit=None)
        eval_blocks = None
        if eval_texts is not None:
            eval_blocks = pack(eval_texts, tokenizer, args.data, limit=args.data.max_eval_blocks)
    return tokenizer, train_blocks, eval_blocks


def make_trainer(args: RecipeArguments) -> Trainer:
    """
    Makes the Trainer: an ordinary one, with one callback more if the run is federated.

    Args:
        args (`RecipeArguments`):
            The arguments of the run.

    Returns:
        `Trainer`: Trainer that is ready to train.
    """
    tokenizer, train_blocks, eval_blocks = prepare_data(args)
    with args.training.main_process_first(desc="loading the metric"):
        compute_metrics = make_compute_metrics()
    callbacks: list[TrainerCallback] = []
    if args.federation.federated:
        callbacks.append(FedAvgCallback(num_groups=args.federation.num_groups, sync_every=args.federation.sync_every))
    return Trainer(
        model=make_model(args.model, tokenizer),
        args=args.training,
        train_dataset=train_blocks,
        eval_dataset=eval_blocks,
        data_collator=collate_blocks,
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=sequence_losses,
        callbacks=callbacks,
    )


def save_full_model(trainer: Trainer) -> None:
    """
    Saves the model in one piece, and its tokenizer, whatever kind of state dict the checkpoints of the run have.

    Args:
        trainer (`Trainer`):
            Trainer at the end of training.
    """
    # Trainer writes nothing, and says nothing, if the state dict type is a sharded one.
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()


@record  # the launcher's last lines then show what went wrong on the first rank that failed
def main() -> None:
    """Trains, saves, evaluates."""
    args = parse_arguments()
    quiet_console()
    set_seed(args.training.seed)
    trainer = make_trainer(args)

    result = trainer.train(resume_from_checkpoint=args.training.resume_from_checkpoint)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    save_full_model(trainer)

    if trainer.eval_dataset is not None:
        metrics = trainer.evaluate()
        trainer.save_metrics("eval", metrics)
        if trainer.is_world_process_zero():
            print(f"perplexity {metrics['eval_perplexity']:.1f} on {metrics['eval_num_tokens']:,} held-out tokens")


if __name__ == "__main__":
    main()
    shutdown()
