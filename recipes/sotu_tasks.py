"""Makes two fine-tuning tasks from the vendored corpus: eras to classify, and questions to answer.

    python recipes/sotu_tasks.py runs/sotu

Writes `era-train.jsonl` and `era-test.jsonl` (`text`, `label`: the era in which a passage was spoken) and
`chat-train.jsonl` and `chat-test.jsonl` (`messages`: who spoke a passage, and when). The years that end in 7 are for testing.
The corpus is in the public domain, and so are the tasks.
"""

import argparse
import json
import lzma
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any


CORPUS = Path(__file__).resolve().parent / "data" / "sotu.jsonl.xz"
ERAS = {1900: "1790-1899", 2100: "1900-2021"}
QUESTION = "Which president spoke these words to Congress, and in which year?\n\n{passage}"
ANSWER = "{president}, in {year}."


def passages(text: str, num_words: int, number: int, draw: random.Random) -> Iterator[str]:
    """
    Cuts passages out of a text.

    Args:
        text (`str`):
            An address.
        num_words (`int`):
            Words in a passage.
        number (`int`):
            How many; they may overlap in a short text.
        draw (`random.Random`):
            Where they begin. The first words, a form of address, are left out.
    """
    words = text.split()
    for _ in range(number):
        start = draw.randrange(min(60, len(words) // 2), max(len(words) - num_words, 61))
        yield " ".join(words[start : start + num_words])


def era_rows(row: dict[str, Any], draw: random.Random) -> list[dict[str, Any]]:
    """
    Rows of the classification task.

    Args:
        row (`dict`):
            An address.
        draw (`random.Random`):
            Source of chance.

    Returns:
        `list[dict]`: `text` and `label`.
    """
    label = next(name for end, name in ERAS.items() if row["year"] < end)
    return [{"text": passage, "label": label} for passage in passages(row["text"], 24, 24, draw)]


def chat_rows(row: dict[str, Any], draw: random.Random) -> list[dict[str, Any]]:
    """
    Rows of the chat task.

    Args:
        row (`dict`):
            An address.
        draw (`random.Random`):
            Source of chance.

    Returns:
        `list[dict]`: `messages`, a question and its answer.
    """
    found = []
    for passage in passages(row["text"], 24, 6, draw):
        question = {"role": "user", "content": QUESTION.format(passage=passage)}
        answer = {"role": "assistant", "content": ANSWER.format(**row)}
        found.append({"messages": [question, answer]})
    return found


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder to write")
    return parser


def main() -> None:
    """Writes the four files. The same seed gives the same files."""
    args = make_parser().parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    with lzma.open(CORPUS, "rt", encoding="utf-8") as file:
        corpus = [json.loads(line) for line in file]
    for task, make in (("era", era_rows), ("chat", chat_rows)):
        for split in ("train", "test"):
            draw = random.Random(f"{task} {split}")
            rows = [made for row in corpus if (row["year"] % 10 == 7) == (split == "test") for made in make(row, draw)]
            draw.shuffle(rows)
            path = args.output / f"{task}-{split}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
