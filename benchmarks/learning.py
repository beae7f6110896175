"""Loss on held-out text against steps. It depends on no rate: which average is applied when is a matter of steps."""

from __future__ import annotations

import time
from collections.abc import Callable

from .contenders import make_contender
from .records import EVALUATED, Records
from .variants import Variant
from .world import World


def learn(
    world: World,
    variant: Variant,
    num_steps: int,
    eval_every: int,
    records: Records,
    session: str,
    say: Callable[[str], None],
) -> None:
    """
    Trains a variant from its first weights, on an unlimited link, and evaluates it on the way without touching the run.
    Collective over the world.

    What it does in a second is measured elsewhere; here only what it does in a step.

    Args:
        world ([`World`]):
            Where, and with which seed.
        variant ([`Variant`]):
            Who trains.
        num_steps (`int`):
            Optimizer steps.
        eval_every (`int`):
            Steps between two evaluations, a multiple of H.
        records ([`Records`]):
            Where the curve goes.
        session (`str`):
            The run of the benchmark.
        say (`Callable`):
            Takes lines of progress.
    """
    started = time.perf_counter()
    contender = make_contender(variant, world)
    seed = world.workload.seed
    steps, losses, num_averagings = [0], [contender.evaluate()], contender.num_averagings
    for step in range(1, num_steps + 1):
        contender.step()
        if step % eval_every == 0:
            steps.append(step)
            losses.append(contender.evaluate())
            num_averagings = contender.num_averagings
            say(f"[learning, seed {seed}] {variant.name:18} step {step:4}: evaluation loss {losses[-1]:.4f}")
    contender.close()
    if world.rank == 0:
        records.append(
            "learning",
            {
                "variant": variant.name,
                "seed": seed,
                "session": session,
                "evaluated": EVALUATED,
                "steps": steps,
                "step_tokens": world.size * world.workload.step_tokens,
                "losses": losses,
                "num_averagings": num_averagings,
                "seconds": time.perf_counter() - started,
            },
        )
