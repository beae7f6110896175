"""
The matrix as the tables of `docs/combinations.md`, which hold what the tests hold: run this module to write them anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from .cell import Cell
from .cells import SECTIONS


DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "combinations.md"
HEAD = "| combination | in a script or launch config | result | |\n| --- | --- | --- | --- |\n"

# What is no change of a training run, and the test that has it.
OTHER_TESTS = {
    "Ctrl-C in a step or while saving": "test_combinations_endings.py::test_keyboard_interrupt",
    "Ctrl-C in the terminal of `accelerate launch`": "test_combinations_endings.py::test_ctrl_c_ends_a_launch",
    "a folder that cannot be written": "test_combinations_endings.py::test_read_only_output_folder",
    "`load_best_model_at_end` with early stopping": "test_isolation_requests.py::test_early_stopping_and_best_model",
    "`eval_on_start`": "test_trainer_evaluation.py::test_eval_on_start",
    "a model sharded by Transformers itself (`DistributedConfig`): refused": "test_wrong_use.py::test_model_sharded_by_transformers",
    "several Trainers in a row": "test_trainer_lifecycle.py::test_trainers_in_a_row",
    "BatchNorm": "test_trainer_equivalence.py::test_a_model_that_takes_no_count",
    "`compute_loss_func`": "test_trainer_equivalence.py::test_losses_that_take_the_count",
    "float64": "test_trainer_equivalence.py::test_is_the_reference",
    "interrupted and resumed": "test_checkpoint_resume.py",
    "LoRA averaged beside the steps, in codes and in fragments": "test_overlap_lora.py::test_is_the_reference",
    "the same, interrupted and resumed": "test_overlap_trainer.py::test_resumes_bit_for_bit",
}


def row(cell: Cell) -> str:
    """
    Args:
        cell ([`Cell`]):
            A cell.

    Returns:
        `str`: Its row.
    """
    if cell.error is not None:
        result = "error at start"
    elif cell.tolerance == 0:
        result = "same bits"
    else:
        result = f"within {cell.tolerance:.0e}"
    if cell.after is not None:
        result += ", same numbers"
    return f"| {cell.name} | {cell.how} | {result} | {cell.limit} |\n"


def tables() -> str:
    """
    Returns:
        `str`: All sections with their tables.
    """
    parts = [f"## {name}\n\n{HEAD}{''.join(map(row, cells))}" for name, cells in SECTIONS.items()]
    others = "".join(f"| {what} | `{test}` |\n" for what, test in OTHER_TESTS.items())
    parts.append(f"## In tests of their own\n\n| combination | test |\n| --- | --- |\n{others}")
    return "\n".join(parts)


def document_with_tables() -> str:
    """
    Returns:
        `str`: The document, its introduction as it is.
    """
    introduction = re.split(r"^## ", DOCUMENT.read_text(), maxsplit=1, flags=re.M)[0]
    return introduction + tables()


if __name__ == "__main__":
    DOCUMENT.write_text(document_with_tables())
