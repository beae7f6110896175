"""Averages of low-rank adapters: how wrong each is, and that it is what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from hf_fedshard.config import FederationConfig
from hf_fedshard.lora import adapter_pairs, refactor, trained_pairs
from hf_fedshard.rounds import Rounds
from hf_fedshard.shards import reshard
from tests.harness.models import add_lora, tiny_llama
from tests.harness.outer_runs import GROUP_SIZE, Run, adapted, double, full_state, make_mesh
from tests.harness.pool import WorkerPool


FIRST, SECOND = "hidden.lora_A.default.weight", "hidden.lora_B.default.weight"
CASES: dict[str, dict[str, Any]] = {
    "factors": {},
    "product": {"lora_average": "product", "group_weights": "samples"},
    "uniform": {"lora_average": "product"},
    "freeze_a": {"lora_average": "freeze_a"},
}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def _runs() -> dict[str, Any]:
    """One round: the adapters of this group ahead of the border, and after it."""
    mesh, found = make_mesh(), {}
    for name, settings in CASES.items():
        run = Run(mesh, adapted(), sgd, **settings)
        start = full_state(run.model)
        run.train(0)
        close, own = run.rounds.close, {}

        def keeping(*args: Any, run: Any = run, close: Any = close, own: Any = own) -> Any:
            own.update(full_state(run.model))
            return close(*args)

        run.rounds.close = keeping  # type: ignore[method-assign]
        metrics = run.train(1)
        found[name] = {"start": start, "own": own, "after": full_state(run.model), "metrics": metrics}
        run.rounds.release()
    return found


@pytest.fixture(scope="module")
def runs(world8: WorkerPool) -> list[dict[str, Any]]:
    return world8.run(_runs, limit_seconds=240)


def product(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return state[SECOND] @ state[FIRST]


def error_of(runs: list[dict[str, Any]], case: str, shares: tuple[float, float] = (0.5, 0.5)) -> float:
    """Distance of the new product from the mean product, relative to what a round has changed in it."""
    groups = [runs[0][case], runs[GROUP_SIZE][case]]
    mean = sum(share * product(group["own"]) for share, group in zip(shares, groups, strict=True))
    return float((product(groups[0]["after"]) - mean).norm() / (mean - product(groups[0]["start"])).norm())


def test_error_of_each(runs: list[dict[str, Any]]) -> None:
    """The figures of docs/outer.md."""
    errors = {case: error_of(runs, case) for case in ("factors", "uniform", "freeze_a")}
    print({case: f"{error:.1e}" for case, error in errors.items()})
    assert errors["freeze_a"] < 1e-14
    assert 1e-14 < errors["uniform"] < errors["factors"]
    best = runs[0]["uniform"]["metrics"].lora_error
    groups = [runs[0]["uniform"]["own"], runs[GROUP_SIZE]["uniform"]["own"]]
    mean = (product(groups[0]) + product(groups[1])) / 2
    values = torch.linalg.svdvals(mean)
    assert best == pytest.approx(float(values[2:].norm() / values.norm()), rel=1e-9), "the best of rank 2"
    assert runs[0]["uniform"]["metrics"].as_logs()["fedshard/lora_error"] == pytest.approx(best, rel=1e-3)


def test_weights_count_in_products(runs: list[dict[str, Any]]) -> None:
    weighted, uniform = error_of(runs, "product", (0.25, 0.75)), error_of(runs, "product")
    assert weighted < 0.5 * uniform


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_hold_the_same_bits(runs: list[dict[str, Any]], case: str) -> None:
    for rank in runs:
        for name, tensor in rank[case]["after"].items():
            assert torch.equal(tensor, runs[0][case]["after"][name]), name
        assert rank[case]["metrics"].drift == runs[0][case]["metrics"].drift > 0
    moved = {
        name
        for name, tensor in runs[0][case]["after"].items()
        if not torch.equal(tensor, runs[0][case]["start"][name])
    }
    assert moved == ({SECOND} if case == "freeze_a" else {FIRST, SECOND})


def test_traffic(runs: list[dict[str, Any]]) -> None:
    """A product takes the factors of both groups; a frozen factor does not travel."""
    sent = {case: runs[0][case]["metrics"].bytes_sent for case in CASES}
    assert sent["uniform"] == pytest.approx(2 * sent["factors"], rel=0.1)  # each padded to its buckets
    assert sent["freeze_a"] == pytest.approx(sent["factors"] / 2, rel=0.1)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_refactor_of_one_first_factor_is_exact() -> None:
    first, second = draw(3, 7), [draw(9, 3), draw(9, 3) + 1, draw(9, 3) * 2]
    shares = [0.5, 0.25, 0.25]
    a, b, error = refactor([first] * 3, second, shares)
    mean = sum(share * own for share, own in zip(shares, second, strict=True))
    assert error < 1e-14
    torch.testing.assert_close(a, first)
    torch.testing.assert_close(b, mean)


@pytest.mark.parametrize("shape", [(9, 7, 3), (4, 20, 2), (20, 4, 2), (5, 5, 4)])
def test_refactor_is_the_best_of_its_rank(shape: tuple[int, int, int]) -> None:
    m, n, r = shape
    first, second = [draw(r, n), draw(r, n) + 0.3], [draw(m, r), draw(m, r) - 0.2]
    a, b, error = refactor(first, second, [0.5, 0.5])
    mean = (second[0] @ first[0] + second[1] @ first[1]) / 2
    values = torch.linalg.svdvals(mean)
    assert (a.shape, b.shape) == ((r, n), (m, r))
    assert float((b @ a - mean).norm()) == pytest.approx(float(values[r:].norm()), rel=1e-8, abs=1e-12)
    assert error == pytest.approx(float(values[r:].norm() / values.norm()), rel=1e-8, abs=1e-12)


def test_refactor_where_nothing_can_be_kept() -> None:
    a, b, error = refactor([draw(2, 5)] * 2, [torch.zeros(4, 2, dtype=torch.float64)] * 2, [0.5, 0.5])
    assert torch.equal(a, draw(2, 5)) and not b.any() and error == 0
    # The mean of the first factors is zero: it has no direction, and the product is divided evenly.
    first = draw(2, 5)
    a, b, error = refactor([first, -first], [draw(4, 2), -draw(4, 2)], [0.5, 0.5])
    torch.testing.assert_close(b @ a, draw(4, 2) @ first)
    assert float(a.norm()) == pytest.approx(float(b.norm())) and error < 1e-14


def test_pairs_of_peft() -> None:
    model = add_lora(tiny_llama())
    pairs = trained_pairs(model)
    assert len(pairs) == 4  # two projections in two layers
    assert all(second == first.replace("lora_A", "lora_B") for first, second in pairs)
    assert adapter_pairs(["x.lora_embedding_A.default", "x.lora_embedding_B.default", "y.lora_A.default.weight"]) == [
        ("x.lora_embedding_A.default", "x.lora_embedding_B.default")
    ]


def _evaluated_before() -> bool:
    """FSDP2 has made its whole parameters, which ask for gradients, before A is frozen."""
    mesh = make_mesh()
    model = fully_shard(adapted(), mesh=mesh.fsdp)
    with torch.no_grad():
        model(torch.zeros(1, 8, dtype=torch.float64))
    reshard(model)
    run = Run.__new__(Run)
    run.mesh, run.model, run.max_grad_norm = mesh, model, None
    run.optimizer = sgd([param for param in model.parameters() if param.requires_grad])
    run.rounds = Rounds(model, mesh, FederationConfig(2, 2, lora_average="freeze_a"), [run.optimizer])
    before = full_state(model)
    run.train(0)
    run.train(1)
    after = full_state(model)
    assert not torch.equal(before[SECOND], after[SECOND])
    return torch.equal(before[FIRST], after[FIRST])


def test_frozen_after_an_evaluation(world8: WorkerPool) -> None:
    assert all(world8.run(_evaluated_before))


def _without_adapters() -> None:
    model = double() if dist.get_rank() else adapted()
    mesh = make_mesh()
    Rounds(fully_shard(model, mesh=mesh.fsdp), mesh, FederationConfig(2, lora_average="freeze_a"))


def test_model_without_adapters_is_refused_on_every_rank(world8: WorkerPool) -> None:
    for error in world8.run_failing(_without_adapters):
        assert error.type_name == "ValueError"
        assert "has no LoRA adapter that trains" in error.message
