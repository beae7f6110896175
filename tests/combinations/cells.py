"""All cells of the matrix."""

from __future__ import annotations

from .cells_adapters import ADAPTER_CELLS
from .cells_data import DATA_CELLS
from .cells_evaluation import EVALUATION_CELLS
from .cells_loop import LOOP_CELLS
from .cells_models import MODEL_CELLS
from .cells_optimizers import OPTIMIZER_CELLS
from .cells_sharding import SHARDING_CELLS


SECTIONS = {
    "Precision, memory and sharding": SHARDING_CELLS,
    "Models": MODEL_CELLS,
    "Adapters": ADAPTER_CELLS,
    "Optimizers and schedules": OPTIMIZER_CELLS,
    "Data": DATA_CELLS,
    "The loop": LOOP_CELLS,
    "Evaluation": EVALUATION_CELLS,
}
CELLS = {cell.name: cell for cells in SECTIONS.values() for cell in cells}
assert len(CELLS) == sum(map(len, SECTIONS.values())), "two cells have one name"
