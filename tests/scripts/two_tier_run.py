"""
Trains with rounds that leave the link alone for a time, and tells when.

    two_tier_run.py OUTPUT_FOLDER ROUND_SECONDS

Rank 0 touches a file in the folder at each moment that the test measures between: `round_begins`, `round_ends` (both
inside the first round), `border_begins`, `border_ends`; and waits at each until the test has taken it away.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from hf_fedshard import shutdown
from tests.harness.models import tiny_llama
from tests.harness.tiny_trainer import tiny_trainer


folder, round_seconds = Path(sys.argv[1]), float(sys.argv[2])
SYNC_EVERY = 60


def tell(name: str) -> None:
    if dist.get_rank() == 0:
        mark = folder / name
        mark.touch()
        while mark.exists():
            time.sleep(0.02)


class Marks(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            tell("round_begins")
            self.began = time.monotonic()
        elif state.global_step == SYNC_EVERY - 1:
            # Connections that keep themselves alive would show in time, not in steps.
            time.sleep(max(0.0, self.began + round_seconds - time.monotonic()))
            tell("round_ends")


class LastMarks(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == SYNC_EVERY - 1:
            tell("border_begins")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == SYNC_EVERY:
            tell("border_ends")


trainer = tiny_trainer(
    str(folder / "run"),
    sync_every=SYNC_EVERY,
    max_steps=SYNC_EVERY + 1,
    model=tiny_llama(hidden_size=128, num_layers=4),
    before=(Marks,),
    after=(LastMarks,),
    logging_strategy="steps",
    logging_steps=1,
    include_num_input_tokens_seen=True,
)
trainer.train()
if dist.get_rank() == 0:
    rounds = [row for row in trainer.state.log_history if "fedshard/bytes_sent" in row]
    elements = sum(parameter.numel() for parameter in trainer.model.parameters())
    told = {"bytes_sent": rounds[0]["fedshard/bytes_sent"], "elements": elements, "borders": len(rounds)}
    (folder / "told.json").write_text(json.dumps(told))
shutdown()
