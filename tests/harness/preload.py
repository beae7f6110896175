"""Imported once by the fork server: everything a training run would otherwise import lazily in every worker."""

import gc

import accelerate  # noqa: F401
import accelerate.utils.fsdp_utils  # noqa: F401
import datasets  # noqa: F401
import peft  # noqa: F401
import torch
import torch._dynamo  # noqa: F401
import torch.distributed.checkpoint.state_dict  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import torch.distributed.tensor  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401
import transformers.trainer  # noqa: F401


torch.set_num_threads(1)
# Workers collect garbage after each body: without this every collection walks through all of the above (0.1 s), and
# copies its pages.
gc.collect()
gc.freeze()
