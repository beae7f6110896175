"""The formulas that are ours on numbers worked by hand, and which optimizers are taken."""

from __future__ import annotations

import pytest
import torch

from hf_fedshard.config import FederationConfig
from hf_fedshard.outer_optimizers import (
    ELEMENTWISE,
    OF_PAPERS,
    REFUSED,
    format_options,
    is_plain_averaging,
    make_outer_optimizer,
    parse_options,
    rate_factor,
)


def steps(name: str, gradients: list[float], rate: float | None = None, options: str = "") -> list[float]:
    anchor = torch.zeros(1, dtype=torch.float64)
    optimizer = make_outer_optimizer(name, rate, options, [anchor])
    found = []
    for gradient in gradients:
        anchor.grad = torch.full_like(anchor, gradient)
        optimizer.step()
        found.append(anchor.item())
    return found


# With beta1 = 0.5, beta2 = 0.75, tau = 0.5, rate 1 and pseudo-gradients 2, then -1. Algorithm 2 of arXiv 2003.00295:
# FedAdam   m = 1, v = 0.75 * 0.25 + 0.25 * 4 = 1.1875;           x = -1 / (sqrt(1.1875) + 0.5)
#           m = 0, v = 0.75 * 1.1875 + 0.25 * 1 = 1.140625;       x stays
# FedYogi   m = 1, v = 0.25 - 0.25 * 4 * sign(0.25 - 4) = 1.25;   x = -1 / (sqrt(1.25) + 0.5)
#           m = 0, v = 1.25 - 0.25 * 1 * sign(1.25 - 1) = 1;      x stays
# and with a third of 2:
# FedAdam   m = 1, v = 0.75 * 1.140625 + 1 = 1.85546875;          FedYogi   m = 1, v = 1 - 1 * sign(1 - 4) = 2
ADAM = [-1 / (1.1875**0.5 + 0.5)] * 2
YOGI = [-1 / (1.25**0.5 + 0.5)] * 2
BY_HAND = {
    "fedadam": [*ADAM, ADAM[1] - 1 / (1.85546875**0.5 + 0.5)],
    "fedyogi": [*YOGI, YOGI[1] - 1 / (2**0.5 + 0.5)],
}


@pytest.mark.parametrize("name", BY_HAND)
def test_server_adam_by_hand(name: str) -> None:
    found = steps(name, [2.0, -1.0, 2.0], 1.0, "beta1=0.5, beta2=0.75, tau=0.5")
    assert found == pytest.approx(BY_HAND[name], rel=1e-14)


def test_the_others_by_hand() -> None:
    # FedAdagrad, tau = 0.5: v = 0.25 + 4, then + 1.
    first = -2 / (4.25**0.5 + 0.5)
    assert steps("fedadagrad", [2.0, -1.0], 1.0, "tau=0.5") == pytest.approx([first, first + 1 / (5.25**0.5 + 0.5)])
    # Momentum 0.5: v = 2, then 0. Nesterov's step is d + 0.5 v: 3, then -1.
    assert steps("fedavgm", [2.0, -1.0], None, "momentum=0.5") == [-2.0, -2.0]
    assert steps("nesterov", [2.0, -1.0], 1.0, "momentum=0.5") == [-3.0, -2.0]
    assert steps("fedavg", [2.0, -1.0]) == [-2.0, -1.0]


def test_defaults_are_the_papers() -> None:
    assert steps("nesterov", [1.0]) == pytest.approx([-0.7 * 1.9])  # DiLoCo: 0.7 and 0.9
    assert steps("fedavgm", [1.0, 1.0]) == pytest.approx([-1.0, -2.9])


@pytest.mark.parametrize("name", [*OF_PAPERS, *ELEMENTWISE])
def test_elementwise(name: str) -> None:
    """A shard is stepped as it would be inside the whole tensor."""
    whole = torch.linspace(-1, 1, 12, dtype=torch.float64)
    parts = [whole[:5].clone(), whole[5:].clone()]
    optimizers = [make_outer_optimizer(name, None, "", [whole]), make_outer_optimizer(name, None, "", parts)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        whole.grad = torch.randn(12, generator=generator, dtype=torch.float64)
        parts[0].grad, parts[1].grad = whole.grad[:5].clone(), whole.grad[5:].clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(whole, torch.linspace(-1, 1, 12, dtype=torch.float64))


def test_every_class_of_torch_is_decided_upon() -> None:
    """A new one must be looked at: elementwise, or refused by name."""
    classes = {
        name
        for name in dir(torch.optim)
        if isinstance(getattr(torch.optim, name), type)
        and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
    } - {"Optimizer"}
    assert classes <= {*ELEMENTWISE, *REFUSED}


def test_options() -> None:
    assert parse_options("betas=(0.9, 0.95), eps=1e-6") == {"betas": (0.9, 0.95), "eps": 1e-6}
    assert parse_options("") == {}
    assert format_options({"b": 2, "a": (1, 2)}) == format_options("a=(1, 2), b=2") == "a=(1, 2), b=2"


@pytest.mark.parametrize(
    ("schedule", "warmup", "factors"),
    [
        ("constant", 0, [1.0] * 6),
        ("constant", 3, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        ("linear", 0, [1.0, 0.75, 0.5, 0.25, 0.25, 0.25]),
        ("linear", 2, [1 / 3, 2 / 3, 1.0, 0.5, 0.5, 0.5]),
        ("cosine", 0, [1.0, 0.5 + 0.5 * 0.5**0.5, 0.5, 0.5 - 0.5 * 0.5**0.5] + [0.5 - 0.5 * 0.5**0.5] * 2),
    ],
)
def test_schedules(schedule: str, warmup: int, factors: list[float]) -> None:
    found = [rate_factor(schedule, warmup, 4, step) for step in range(6)]
    assert found == pytest.approx(factors)
    assert min(found) > 0, "a step of nothing would throw a round away"


def test_plain_averaging() -> None:
    assert is_plain_averaging(FederationConfig())
    assert is_plain_averaging(FederationConfig(outer_learning_rate=1.0))
    for settings in (
        {"outer_learning_rate": 0.9},
        {"outer_optimizer": "SGD"},
        {"outer_warmup_rounds": 1},
        {"outer_max_norm": 1.0},
    ):
        assert not is_plain_averaging(FederationConfig(**settings))  # type: ignore[arg-type]
