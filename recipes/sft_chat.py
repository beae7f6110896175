"""Fine-tunes a chat model on conversations, fully or with LoRA, federated (FL+FSDP, FL+HSDP) or synchronous.

    accelerate launch --config_file accelerate_configs/cpu_fl_fsdp_4proc.yaml \
        recipes/sft_chat.py --args_file recipes/presets/sft-chat-smollm2.yaml

Uses the model's chat template, takes the loss on answers only, packs or pads, and reports the perplexity of held-out
answers before and after. `merge_adapter.py` makes an ordinary model of LoRA adapters.
"""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Trainer, set_seed

from clm_metrics import make_compute_metrics, sequence_losses
from hf_fedshard import shutdown
from recipe_data import load_rows
from recipe_run import make_callbacks, quiet_console, run
from sft_arguments import LoraArguments, RecipeArguments, parse_arguments
from sft_data import PadRight, encode, pack


def add_adapters(model: Any, args: LoraArguments) -> Any:
    """
    Freezes a model and gives it LoRA adapters. Only they are trained, averaged and saved.

    Args:
        model (`PreTrainedModel`):
            The model.
        args (`LoraArguments`):
            The adapters.

    Returns:
        `PeftModel`: The model with adapters.
    """
    config = LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=args.lora_target_modules or "all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def prepare_data(args: RecipeArguments, tokenizer: PreTrainedTokenizerBase) -> tuple[Any, Any]:
    """
    Prepares the conversations.

    Args:
        args (`RecipeArguments`):
            The arguments of the run.
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer with a chat template.

    Returns:
        `tuple[Dataset, Dataset | None]`: Training and evaluation rows.
    """
    chat = args.chat
    options = (chat.messages_column, tokenizer, chat.max_length, chat.preprocessing_num_workers)
    with args.training.main_process_first(desc="preparing the conversations"):
        train_rows, eval_rows = load_rows(chat, args.training.seed)
        train_rows = encode(train_rows, *options)
        if eval_rows is not None:
            eval_rows = eval_rows.select(range(min(len(eval_rows), chat.max_eval_rows or len(eval_rows))))
            eval_rows = encode(eval_rows, *options)
    return (pack(train_rows, chat.max_length) if chat.packing else train_rows), eval_rows


def make_trainer(args: RecipeArguments) -> Trainer:
    """
    Makes the Trainer: an ordinary one, with one callback more if the run is federated.

    Args:
        args (`RecipeArguments`):
            The arguments of the run.

    Returns:
        `Trainer`: Trainer that is ready to train.
    """
    name = args.chat.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.chat_template is None:
        raise ValueError(f"The tokenizer of {name} has no chat template: this is no chat model.")
    pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    train_rows, eval_rows = prepare_data(args, tokenizer)
    with args.training.main_process_first(desc="loading the metric"):
        compute_metrics = make_compute_metrics()
    options = {} if args.chat.attn_implementation is None else {"attn_implementation": args.chat.attn_implementation}
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **options)
    return Trainer(
        model=add_adapters(model, args.lora) if args.lora.lora else model,
        args=args.training,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        data_collator=PadRight(pad_token_id),
        processing_class=tokenizer,
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
    trainer = make_trainer(args)
    metrics = run(trainer, evaluate_first=True)
    if trainer.is_world_process_zero() and metrics:
        before, after = metrics.get("start_perplexity", float("nan")), metrics["eval_perplexity"]
        print(f"perplexity of the answers {before:.2f} before, {after:.2f} after")


if __name__ == "__main__":
    main()
    shutdown()
