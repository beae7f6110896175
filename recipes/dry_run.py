"""Counts what a launch would hold and send, at any number of ranks, in one process and without a GPU.

    python recipes/dry_run.py --args_file recipes/presets/llama-3.1-8b-fl-fsdp.yaml \
        --dp_replicate_size 128 --dp_shard_size 4

Builds the model and the meshes of rank 0 in a fake world, where tensors have shapes and no values and collectives send
nothing, takes one training step, plans one averaging, and prints what it counted as JSON.
"""

import json
import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser

from clm_arguments import MODELS_FOLDER
from hf_fedshard import FederatedParallelismConfig, FederationConfig
from hf_fedshard.exchange_plan import plan_exchange
from hf_fedshard.shards import local_shards
from recipe_arguments import read_args_file


@dataclass
class DryRunArguments:
    """
    What to count.

    Args:
        args_file (`Path`):
            Argument file of `pretrain_clm.py`: model, groups, period, batch and block size.
        dp_replicate_size (`int`):
            Replicas in the world, as in the launch file.
        dp_shard_size (`int`):
            Ranks in a replica, as in the launch file.
    """

    args_file: Path = field(metadata={"help": "Argument file of pretrain_clm.py."})
    dp_replicate_size: int = field(metadata={"help": "Replicas in the world, as in the launch file."})
    dp_shard_size: int = field(metadata={"help": "Ranks in a replica, as in the launch file."})


def shard(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """
    Shards the decoder layers and the root, as Accelerate's `transformer_based_wrap` does.

    Args:
        model (`nn.Module`):
            A Transformers model, changed in place.
        mesh (`DeviceMesh`):
            The ranks over which a group shards and replicates.
        policy (`MixedPrecisionPolicy`):
            Types of computation and of gradients on the wire.
    """
    wrapped = set(getattr(model, "_no_split_modules", None) or ())
    for module in list(model.modules()):
        if type(module).__name__ in wrapped:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def count(args: DryRunArguments) -> dict[str, Any]:
    """
    Takes a step and plans an averaging in a fake world. Call it once in a process.

    Args:
        args (`DryRunArguments`):
            What to count.

    Returns:
        `dict[str, Any]`: Sizes, collectives of one step, and bytes of one averaging, all of rank 0.
    """
    run = read_args_file(args.args_file)
    if "preset" not in run and "config_name" not in run:
        raise ValueError(f"{args.args_file} names no preset and no config_name: there is no model to build.")
    world_size = args.dp_replicate_size * args.dp_shard_size
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    # A baseline is one group: plain FSDP or HSDP.
    num_groups = run.get("num_groups") if run.get("federated", True) else 1
    federation = FederationConfig(num_groups=num_groups, sync_every=run.get("sync_every", 8))
    sizes = {"dp_replicate": args.dp_replicate_size, "dp_shard": args.dp_shard_size}
    layout = federation.layout(world_size, sizes)
    parallelism = FederatedParallelismConfig(federation, layout)
    # As Accelerate takes it from its state: the axes of one group.
    fsdp_mesh = parallelism.get_device_mesh("cpu")[tuple(parallelism.fsdp_dim_names)]

    config = AutoConfig.from_pretrained(MODELS_FOLDER / run["preset"] if "preset" in run else run["config_name"])
    dtype = torch.bfloat16 if run.get("bf16") else torch.float32
    batch_size, block_size = run.get("per_device_train_batch_size", 8), run.get("block_size", 1024)
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        num_parameters = sum(param.numel() for param in model.parameters())
        shard(model, fsdp_mesh, MixedPrecisionPolicy(dtype, dtype))
        tokens = torch.zeros(batch_size, block_size, dtype=torch.int64)
        with CommDebugMode() as counter, warnings.catch_warnings():
            # The counter's module hooks warn of what they cannot see; collectives are counted below them.
            warnings.simplefilter("ignore", UserWarning)
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        shards = local_shards(model)
        plan = plan_exchange(shards, parallelism.mesh, federation.bucket_size_bytes)
    collectives = {str(name).split(".")[-1]: number for name, number in counter.get_comm_counts().items()}
    accumulation = run.get("gradient_accumulation_steps", 1)
    result = {
        "layout": str(layout) if layout.num_groups > 1 else f"synchronous: {sizes}",
        "world_size": world_size,
        "groups": layout.num_groups,
        "ranks_in_group": fsdp_mesh.size(),
        "replicas_in_group": layout.replicate_size,
        "shards_in_replica": math.prod(layout.inner.values()),
        "averaging_peers": parallelism.mesh.fed.size(),
        "sequences_in_update": batch_size * accumulation * fsdp_mesh.size(),
        "parameters": num_parameters,
        "parameters_on_rank": sum(tensor.numel() for tensor in shards.values()),
        "collectives_in_step": collectives,
        "averaging_buckets": len(plan.buckets) if layout.num_groups > 1 else 0,
        "averaging_slow_bytes": plan.slow_bytes(),
        "steps_in_round": federation.sync_every,
    }
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    parser = HfArgumentParser(DryRunArguments, description=__doc__)  # type: ignore[arg-type]
    (arguments,) = parser.parse_args_into_dataclasses()
    print(json.dumps(count(arguments), indent=2))
