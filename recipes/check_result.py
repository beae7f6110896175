"""Checks the results of a run against limits, and fails if one is broken.

python recipes/check_result.py runs/demo/all_results.json --max eval_perplexity=250
"""

import argparse
import json
import sys
from pathlib import Path


def parse_limit(text: str) -> tuple[str, float]:
    """
    Parses one limit.

    Args:
        text (`str`):
            `NAME=VALUE`.

    Returns:
        `tuple[str, float]`: Name of the metric and the largest value allowed.
    """
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"a limit has the form NAME=VALUE, got {text!r}")
    return name, float(value)


def main() -> int:
    """
    Prints each limited metric next to its limit.

    Returns:
        `int`: 0 if all limits hold, else 1.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="all_results.json in the output folder of a run")
    parser.add_argument("--max", type=parse_limit, action="append", default=[], metavar="NAME=VALUE", dest="limits")
    args = parser.parse_args()

    results = json.loads(args.results.read_text(encoding="utf-8"))
    all_hold = True
    for name, limit in args.limits:
        # Not `value > limit`: NaN breaks every limit.
        holds = results[name] <= limit
        all_hold &= holds
        print(f"{'ok' if holds else 'FAILED'}: {name} is {results[name]:.4g}, at most {limit:.4g} allowed")
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
