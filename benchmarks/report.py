"""
Tables in Markdown, JSON and plots of an output folder; and the tables of the results page, so that no figure is typed:

    python -m benchmarks.report runs/benchmark --page docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .content import content_of
from .results import Results
from .sections import sections
from .targets import TARGETS


SKELETON = """# Benchmarks

<!-- begin about -->
<!-- end about -->

## Targets

<!-- begin targets -->
<!-- end targets -->

## Throughput

<!-- begin throughput -->
<!-- end throughput -->

## Quality

<!-- begin learning -->
<!-- end learning -->

## Not measured

<!-- begin missing -->
<!-- end missing -->
"""


def fill_page(page: str, content: dict[str, Any]) -> str:
    """
    Replaces what stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; prose around it stays.

    Args:
        page (`str`):
            Markdown.
        content (`dict[str, Any]`):
            Of `results.json`.

    Returns:
        `str`: The page with the tables of these results.
    """
    for name, text in sections(content).items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        head, found, rest = page.partition(begin)
        _, ended, tail = rest.partition(end)
        if found and ended:
            page = f"{head}{begin}{text}\n{end}{tail}"
    return page


def write_report(folder: Path) -> dict[str, Any]:
    """
    Writes `results.json`, `results.md` and the plots of an output folder.

    Args:
        folder (`Path`):
            The folder.

    Returns:
        `dict[str, Any]`: Content of `results.json`.
    """
    results = Results(folder)
    content = content_of(results) | {"targets": [target.row(results) for target in TARGETS]}
    (folder / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / "results.md").write_text(fill_page(SKELETON, content))
    print(f"{folder / 'results.md'}, {folder / 'results.json'}")
    try:
        from .plots import draw
    except ImportError as error:
        print(f"No plots: {error}. Install the extra `benchmarks`.")
    else:
        for path in draw(content, folder):
            print(path)
    return content


def make_parser() -> argparse.ArgumentParser:
    """
    Returns:
        `argparse.ArgumentParser`: Of the command line.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="Output folder of benchmarks.two_tier.")
    parser.add_argument("--page", type=Path, help="Page to fill; made if it is not there. Its JSON goes beside it.")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """
    Writes the report of a folder and, if asked, the tables of a page.

    Args:
        words (`Sequence[str]`, *optional*):
            Command line in place of that of the process.
    """
    args = make_parser().parse_args(words)
    content = write_report(args.folder)
    if args.page is not None:
        page = args.page.read_text() if args.page.exists() else SKELETON
        args.page.write_text(fill_page(page, content))
        args.page.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
