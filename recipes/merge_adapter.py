"""Makes an ordinary model of a base model and LoRA adapters, in one process.

    python recipes/merge_adapter.py runs/sft-chat-lora runs/sft-chat-merged

The adapters are a folder that `sft_chat.py --lora` has written, or one that `python -m hf_fedshard.export` has made of a
checkpoint. They name their base model; `--model_name_or_path` says where it is, if it has moved.
"""

import argparse
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def merge(adapter: Path, output: Path, model_name_or_path: str | None = None) -> None:
    """
    Merges and saves.

    Args:
        adapter (`Path`):
            Folder of the adapters and the tokenizer.
        output (`Path`):
            Folder to write.
        model_name_or_path (`str`, *optional*):
            The base model. Defaults to the one that the adapters name.
    """
    base = model_name_or_path or PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=True)
    merged.save_pretrained(output)
    AutoTokenizer.from_pretrained(adapter).save_pretrained(output)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", type=Path, help="folder of the adapters")
    parser.add_argument("output", type=Path, help="folder to write the model into")
    parser.add_argument("--model_name_or_path", help="the base model, if it is not where the adapters say")
    return parser


def main() -> None:
    """The command line."""
    args = make_parser().parse_args()
    merge(args.adapter, args.output, args.model_name_or_path)
    print(f"Written to {args.output}")


if __name__ == "__main__":
    main()
