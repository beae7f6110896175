"""Causal language model pre-training in an Accelerate loop, without Trainer, federated or synchronous.

    accelerate launch --config_file accelerate_configs/cpu_fl_fsdp_4proc.yaml recipes/pretrain_clm_no_trainer.py \
        --args_file recipes/presets/demo-no-trainer.yaml

In the style of the `*_no_trainer.py` examples of Transformers, with the data and the models of `pretrain_clm.py`. What is
ours: the plugin, `federate`, `fedavg.step`, `fedavg.finish`, `shutdown`.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, get_scheduler

from clm_arguments import DataArguments, ModelArguments
from clm_data import collate_blocks, pack
from clm_metrics import sequence_losses
from clm_tokenizer import load_tokenizer
from hf_fedshard import FederatedFSDPPlugin, RoundMetrics, Rounds, shutdown
from loop_arguments import LoopArguments, parse_arguments
from pretrain_clm import make_model
from recipe_arguments import FederationArguments
from recipe_data import load_rows
from recipe_run import quiet_console


def make_accelerator(federation: FederationArguments, args: LoopArguments) -> tuple[Accelerator, Any]:
    """
    Makes the accelerator, on the federation's mesh or on that of the launch file.

    Args:
        federation (`FederationArguments`):
            How the run is federated.
        args (`LoopArguments`):
            The loop.

    Returns:
        `tuple[Accelerator, FederatedFSDPPlugin | None]`: Accelerator, and the plugin of a federated run.
    """
    options: dict[str, Any] = {
        "cpu": args.use_cpu,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        # One step of the schedule for each optimizer step, whatever the number of ranks.
        "step_scheduler_with_optimizer": False,
        # The order of an epoch then depends on the seed and its number alone, so that a resumed run finds it again.
        "dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True),
        "project_config": ProjectConfiguration(args.output_dir, automatic_checkpoint_naming=True, total_limit=2),
    }
    if not federation.federated:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        return Accelerator(fsdp_plugin=plugin, **options), None
    ours = FederatedFSDPPlugin(num_groups=federation.num_groups, sync_every=federation.sync_every)
    return Accelerator(fsdp_plugin=ours, parallelism_config=ours.parallelism_config, **options), ours


def evaluate(accelerator: Accelerator, model: Any, dataloader: DataLoader) -> dict[str, float]:
    """
    Perplexity over all held-out tokens, each counted once. Collective over the world, at a border.

    Args:
        accelerator (`Accelerator`):
            The accelerator.
        model (`nn.Module`):
            The prepared model.
        dataloader (`DataLoader`):
            The prepared blocks.

    Returns:
        `dict[str, float]`: `eval_perplexity` and `eval_num_tokens`.
    """
    model.eval()
    losses = []
    for batch in dataloader:
        with torch.no_grad():
            logits = model(**batch).logits
        # Drops what the last batch repeats to be full on all ranks.
        losses.append(accelerator.gather_for_metrics(sequence_losses(logits, batch["labels"])).cpu())
    model.train()
    joined = torch.cat(losses).double()
    num_tokens = len(joined) * (batch["labels"].shape[1] - 1)
    return {"eval_perplexity": math.exp(joined.sum() / num_tokens), "eval_num_tokens": num_tokens}


def train(
    accelerator: Accelerator, prepared: tuple[Any, Any, Any, Any], fedavg: Rounds | None, args: LoopArguments
) -> None:
    """
    The loop.

    Args:
        accelerator (`Accelerator`):
            The accelerator.
        prepared (`tuple`):
            Model, optimizer, training blocks and schedule.
        fedavg ([`Rounds`], *optional*):
            What averages the groups; `None` in a synchronous run.
        args (`LoopArguments`):
            The loop.
    """
    model, optimizer, dataloader, scheduler = prepared
    step, epoch = 0, 0
    if args.resume_from_checkpoint is not None:
        accelerator.load_state(args.resume_from_checkpoint)
        step = scheduler.scheduler.last_epoch
        # Goes on where the checkpoint was written: in the same epoch, behind the batches that were drawn.
        per_epoch = math.ceil(len(dataloader) / args.gradient_accumulation_steps)
        epoch = step // per_epoch
        number = int(Path(args.resume_from_checkpoint).name.rsplit("_", 1)[1])
        accelerator.project_configuration.iteration = number + 1
        skipped = step % per_epoch * args.gradient_accumulation_steps
    else:
        skipped = 0
    losses: list[torch.Tensor] = []
    tokens = 0
    while step < args.max_train_steps:
        dataloader.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(dataloader, skipped) if skipped else dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            tokens += batch["input_ids"].numel()
            if not accelerator.sync_gradients:
                continue
            scheduler.step()
            step += 1
            # Of all micro-batches in the step, which the end of an epoch may cut short.
            mean_loss = torch.stack(losses).mean()
            metrics = fedavg.step(mean_loss, tokens=tokens) if fedavg is not None else None
            losses, tokens = [], 0
            if metrics is not None:
                report(accelerator, step, metrics)
            if fedavg is not None and saves_now(fedavg, args):
                if not fedavg.at_border:
                    # With `overlap_steps` the averaging of the round is still in flight, and every group holds another model.
                    report(accelerator, step, fedavg.close().report())
                accelerator.save_state()
            if step >= args.max_train_steps:
                break
        epoch, skipped = epoch + 1, 0


def saves_now(fedavg: Rounds, args: LoopArguments) -> bool:
    """
    Whether a checkpoint is due: the step that was counted last has ended a round, one of those asked for. The same on all ranks.

    Args:
        fedavg ([`Rounds`]):
            What averages the groups.
        args (`LoopArguments`):
            The loop.
    """
    every = args.checkpointing_rounds
    return every > 0 and fedavg.untouched and fedavg.round % every == 0


def report(accelerator: Accelerator, step: int, metrics: RoundMetrics) -> None:
    """
    Prints what came of a round, and of those that were taken in with it.

    Args:
        accelerator (`Accelerator`):
            The accelerator.
        step (`int`):
            Optimizer steps so far.
        metrics (`RoundMetrics`):
            From `fedavg.step()` or `fedavg.finish()`.
    """
    for each in (*metrics.earlier, metrics):
        accelerator.print(f"step {step}: {json.dumps(each.as_logs())}")


def load_blocks(
    model: ModelArguments, data: DataArguments, args: LoopArguments, accelerator: Accelerator
) -> tuple[PreTrainedTokenizerBase, Any, Any]:
    """
    The tokenizer and the blocks, prepared by the first process of each node.

    Args:
        model (`ModelArguments`):
            Which model.
        data (`DataArguments`):
            Which texts.
        args (`LoopArguments`):
            The loop.
        accelerator (`Accelerator`):
            The accelerator.

    Returns:
        `tuple`: Tokenizer, training blocks, evaluation blocks or `None`.
    """
    with accelerator.local_main_process_first():
        train_texts, eval_texts = load_rows(data, args.seed)
    tokenizer = load_tokenizer(model, train_texts, data.text_column, data.block_size)
    with accelerator.local_main_process_first():
        train_blocks = pack(train_texts, tokenizer, data, limit=None)
        eval_blocks = None if eval_texts is None else pack(eval_texts, tokenizer, data, limit=data.max_eval_blocks)
    return tokenizer, train_blocks, eval_blocks


def main() -> None:
    """Trains, evaluates, saves."""
    model_args, data_args, federation, args = parse_arguments()
    accelerator, plugin = make_accelerator(federation, args)
    quiet_console()
    set_seed(args.seed)
    tokenizer, train_blocks, eval_blocks = load_blocks(model_args, data_args, args, accelerator)
    size = args.per_device_train_batch_size
    dataloader = DataLoader(train_blocks, batch_size=size, shuffle=True, collate_fn=collate_blocks, drop_last=True)
    model = make_model(model_args, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    scheduler = get_scheduler(args.lr_scheduler_type, optimizer, args.num_warmup_steps, args.max_train_steps)
    prepared = accelerator.prepare(model, optimizer, dataloader, scheduler)
    model = prepared[0]
    fedavg = plugin.federate(accelerator, model) if plugin is not None else None
    train(accelerator, prepared, fedavg, args)
    if fedavg is not None:
        metrics = fedavg.finish()
        if metrics is not None:
            report(accelerator, args.max_train_steps, metrics)

    output = Path(args.output_dir)
    if eval_blocks is not None:
        loader = accelerator.prepare(DataLoader(eval_blocks, batch_size=4 * size, collate_fn=collate_blocks))
        results = evaluate(accelerator, model, loader)
        accelerator.print(f"perplexity {results['eval_perplexity']:.1f} on held-out texts")
        if accelerator.is_main_process:
            output.mkdir(parents=True, exist_ok=True)
            (output / "all_results.json").write_text(json.dumps(results, indent=2))
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(output, state_dict=state)
        tokenizer.save_pretrained(output)


if __name__ == "__main__":
    main()
    shutdown()
