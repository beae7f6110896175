"""
Turns a checkpoint of a federated run into an ordinary model folder: `python -m hf_fedshard.export CHECKPOINT OUTPUT`.
"""

from __future__ import annotations

import argparse
import logging
import shutil
from pathlib import Path
from typing import Any

import torch

from .checkpoint_layout import DESCRIPTION_NAME, read_description
from .manifest import CheckpointError, find_damage, has_manifest
from .parts import IN_PARTS, kind_of, part_name
from .stored_model import read_sources, sources_at_border, sources_in_parts


logger = logging.getLogger(__name__)

_OF_THE_RUN = ("trainer_state.json", "training_args.bin", "rng_state")
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def export_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    max_shard_size: str | int = "5GB",
    dtype: str | None = None,
    trust_remote_code: bool = False,
    group: int = 0,
) -> Path:
    """
    Writes a checkpoint as a `save_pretrained` folder: safetensors, configuration, generation configuration, tokenizer;
    of a PEFT run the adapters alone. Needs one process, whatever number trained, and holds the weights once.

    Of a checkpoint that each group saved alone, inside a round, it writes the average of the groups.

    Args:
        checkpoint (`str` or `Path`):
            A `checkpoint-<step>` folder.
        output (`str` or `Path`):
            The folder to write; must be empty or not exist.
        max_shard_size (`str` or `int`, defaults to `"5GB"`):
            Largest safetensors file, in bytes or like `"500MB"`.
        dtype (`str`, *optional*):
            Type of the exported weights, `"bfloat16"` for example. Defaults to the one they were trained in.
        trust_remote_code (`bool`, defaults to `False`):
            Whether code that lies beside the model may be run.
        group (`int`, defaults to `0`):
            The federation group whose own layers are taken, where the groups have some (`local_parameters`).

    Returns:
        `Path`: The folder, for `from_pretrained`.

    Raises:
        CheckpointError: If the checkpoint is damaged, or none of this package.
        ValueError: If an argument is wrong.

    Example:

    ```python
    export_checkpoint("runs/demo/checkpoint-200", "my-model", dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained("my-model")
    ```
    """
    checkpoint, output = Path(checkpoint), Path(output)
    _check_arguments(checkpoint, output, dtype)
    whole = not (checkpoint / DESCRIPTION_NAME).exists()
    description = {} if whole else read_description(checkpoint)
    _check_description(checkpoint, description, group)
    adapters, local = description.get("adapters", []), description.get("local", [])
    parts = []
    if kind_of(checkpoint) == IN_PARTS:
        parts = [checkpoint / part_name(index) for index in range(description["num_groups"])]
    output.mkdir(parents=True, exist_ok=True)
    # `save_only_model` wrote the weights as they are to be; PEFT wrote the adapters by its own rules.
    files = parts[0] if parts else checkpoint
    _copy_files(files, output, with_weights=whole or bool(adapters))
    if not whole and not adapters:
        sources = sources_in_parts(parts, group) if parts else sources_at_border(checkpoint, group if local else None)
        state = read_sources(sources, dtype)
        _write_weights(files, state, output, max_shard_size, trust_remote_code)
    elif dtype is not None:
        logger.warning("dtype=%s is without effect: the weights are copied as they were saved.", dtype)
    return output


def _check_arguments(checkpoint: Path, output: Path, dtype: str | None) -> None:
    """Refuses folders that cannot be read or written, before anything is."""
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, but got {dtype!r}.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists and is no empty folder. Give another one, or remove it.")
    if not has_manifest(checkpoint):
        raise CheckpointError(
            f"{checkpoint} is no checkpoint of hf_fedshard. One that Trainer saved with FULL_STATE_DICT can be loaded with "
            "from_pretrained as it is; for SHARDED_STATE_DICT use `accelerate merge-weights`."
        )
    damage = find_damage(checkpoint)
    if damage:
        raise CheckpointError(f"{checkpoint} is damaged: {'; '.join(damage[:5])}.")


def _check_description(checkpoint: Path, description: dict[str, Any], group: int) -> None:
    """Refuses a group that there is not, and adapters that each group has for itself."""
    adapters, local = description.get("adapters", []), description.get("local", [])
    num_groups = description.get("num_groups", 1)
    if not 0 <= group < num_groups or (group and not local):
        raise ValueError(
            f"group={group} cannot be exported: the checkpoint is of {num_groups} groups, which have "
            f"{'layers of their own' if local else 'one model'}."
        )
    if adapters and kind_of(checkpoint) == IN_PARTS:
        raise CheckpointError(
            f"{checkpoint} holds other adapters for each group, saved inside a round. Resume the run until it saves "
            "at the end of a round, and export that."
        )
    if adapters and local:
        raise ValueError(
            f"{checkpoint} holds adapters of which each group has its own ({local[0]}, ...), and PEFT's files are of "
            "group 0 alone. Resume, or read federation/group_* with torch.distributed.checkpoint."
        )


def _copy_files(checkpoint: Path, output: Path, with_weights: bool) -> None:
    for path in sorted(checkpoint.iterdir()):
        is_weights = ".safetensors" in path.name
        if path.is_dir():
            # Further adapters of a PEFT model lie in folders of their own.
            if (path / "adapter_config.json").exists():
                shutil.copytree(path, output / path.name)
        elif not path.name.startswith(_OF_THE_RUN) and (with_weights or not is_weights):
            shutil.copy2(path, output / path.name)


def _write_weights(
    checkpoint: Path,
    state: dict[str, torch.Tensor],
    output: Path,
    max_shard_size: str | int,
    trust_remote_code: bool,
) -> None:
    model = _empty_model(checkpoint, trust_remote_code)
    if model is None:
        from huggingface_hub import save_torch_state_dict

        save_torch_state_dict(state, output, max_shard_size=max_shard_size)
        return
    # The configuration names the type of the weights.
    model.to(next(tensor.dtype for tensor in state.values() if tensor.is_floating_point()))
    # Empty: this adds the rules of the architecture, tied and renamed weights say, and no memory.
    model.save_pretrained(output, state_dict=state, max_shard_size=max_shard_size)


def _empty_model(checkpoint: Path, trust_remote_code: bool) -> Any:
    """The architecture on the meta device; `None` for a model that is not of Transformers."""
    if not (checkpoint / "config.json").exists():
        return None
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    config: Any = transformers.AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    name = (config.architectures or [""])[0]
    kind = getattr(transformers, name, None)
    if kind is None:
        references = [
            ref for ref in (getattr(config, "auto_map", None) or {}).values() if str(ref).endswith(f".{name}")
        ]
        if not references or not trust_remote_code:
            raise ValueError(
                f"{checkpoint}: the model class {name or '(none)'} is not in Transformers. If its code lies beside the "
                "model, pass trust_remote_code=True (--trust_remote_code)."
            )
        kind = get_class_from_dynamic_module(references[0], str(checkpoint))
    with torch.device("meta"):
        model = kind(config)
    if (checkpoint / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(checkpoint)
    return model


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_fedshard.export",
        description="Turn a checkpoint of a federated run into a folder for from_pretrained.",
    )
    parser.add_argument("checkpoint", help="a checkpoint-<step> folder")
    parser.add_argument("output", help="the folder to write; must be empty or not exist")
    parser.add_argument("--max_shard_size", default="5GB", help="largest safetensors file (default: %(default)s)")
    parser.add_argument("--dtype", choices=_DTYPES, help="type of the exported weights (default: as trained)")
    parser.add_argument("--group", type=int, default=0, help="whose own layers to take (default: %(default)s)")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that lies beside the model")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """
    The command line.

    Args:
        arguments (`list[str]`, *optional*):
            Defaults to those of the process.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        folder = export_checkpoint(**vars(options))
    except (CheckpointError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")
    print(f"Written to {folder}")


if __name__ == "__main__":
    main()
