"""Averages of low-rank adapters: how wrong each is, and that it is what it says."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from hf_fedshard.config import FederationConfig
from hf_fedshard.layout import FederationLayout
from hf_fedshard.lora import adapter_pairs, trained_pairs
from hf_fedshard.lora_products import refactor
from hf_fedshard.mesh import build_federation_mesh
from hf_fedshard.rounds import Rounds
from hf_fedshard.shards import reshard
from hf_fedshard.simulation import Simulation
from tests.harness.models import add_lora, full_state, tiny_llama
from tests.harness.outer_runs import (
    GROUP_SIZE,
    NUM_RANKS,
    Run,
    adapted,
    double,
    draws,
    make_mesh,
    num_samples,
    sum_over,
)
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
    assert errors["factors"] == pytest.approx(0.011, abs=5e-4) and errors["uniform"] == pytest.approx(0.010, abs=5e-4)
    assert 1e-14 < errors["uniform"] < errors["factors"]
    best = runs[0]["uniform"]["metrics"].lora_error
    groups = [runs[0]["uniform"]["own"], runs[GROUP_SIZE]["uniform"]["own"]]
    mean = (product(groups[0]) + product(groups[1])) / 2
    values = torch.linalg.svdvals(mean)
    assert best == pytest.approx(float(values[2:].norm() / values.norm()), rel=1e-9), "the best of rank 2"
    assert runs[0]["uniform"]["metrics"].as_logs()["fedshard/lora_error"] == pytest.approx(best, rel=1e-3)


def errors_from_zero(rule: str, num_rounds: int = 4, period: int = 4) -> list[float]:
    """The same in each of the first rounds of an adapter as PEFT begins it, with B = 0."""
    model, batches = adapted(), [draws(rank, num_rounds * period) for rank in range(NUM_RANKS)]
    nn.init.zeros_(model.get_parameter(SECOND))
    simulation = Simulation(model, FederationConfig(2, period, lora_average=rule), sgd)
    start, errors = product(dict(model.named_parameters())).detach(), []
    for step in range(num_rounds * period):
        for group in simulation.groups:
            first = group.index * GROUP_SIZE
            own = [batches[rank][step] for rank in range(first, first + GROUP_SIZE)]
            for batch in own:
                sum_over(group.model, batch, sum(map(num_samples, own))).backward()
            group.optimizer.step()
            group.optimizer.zero_grad()
            group.count_step()
        products = [product(dict(group.model.named_parameters())).detach() for group in simulation.groups]
        if simulation.step() is not None:
            mean, new = sum(products) / len(products), product(dict(simulation.model.named_parameters())).detach()
            errors.append(float((new - mean).norm() / (mean - start).norm()))
            start = new
    return errors


def test_error_from_zero() -> None:
    """The figures of docs/outer.md, of rounds of four steps."""
    errors = {rule: errors_from_zero(rule) for rule in ("factors", "product", "freeze_a")}
    print({rule: [f"{error:.3e}" for error in found] for rule, found in errors.items()})
    assert errors["factors"] == pytest.approx([0.117, 0.0194, 0.0252, 0.0387], abs=1e-4)
    assert errors["product"] == pytest.approx([0.0766, 0.0030, 0.0105, 0.0213], abs=1e-4)
    assert max(errors["freeze_a"]) < 1e-14


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


@pytest.mark.parametrize(
    "shape",
    # The last ones have a rank above the number of inputs, outputs, or both.
    [(9, 7, 3), (4, 20, 2), (20, 4, 2), (5, 5, 4), (2, 30, 8), (20, 3, 8), (8, 64, 16), (1, 1, 3)],
)
def test_refactor_is_the_best_of_its_rank(shape: tuple[int, int, int]) -> None:
    m, n, r = shape
    first, second = [draw(r, n), draw(r, n) + 0.3], [draw(m, r), draw(m, r) - 0.2]
    a, b, error = refactor(first, second, [0.5, 0.5])
    mean = (second[0] @ first[0] + second[1] @ first[1]) / 2
    values = torch.linalg.svdvals(mean)
    assert (a.shape, b.shape) == ((r, n), (m, r))
    assert float((b @ a - mean).norm()) == pytest.approx(float(values[r:].norm()), rel=1e-8, abs=1e-12)
    assert error == pytest.approx(float(values[r:].norm() / values.norm()), rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize("shape", [(9, 7, 4), (3, 30, 8), (20, 3, 8), (30, 40, 4)])
def test_refactor_of_a_lower_rank_is_determined(shape: tuple[int, int, int], kept: int) -> None:
    """
    A mean product of a lower rank than the adapter's leaves A directions in which it could be anything. Its bits must not
    hang on rounding: shards of two computations are put together where ranks run on unlike hardware.
    """
    m, n, r = shape
    common, left = draw(kept, n), draw(m, kept)
    first = [torch.cat([common, draw(r - kept, n) + shift]) for shift in (0.0, 1.0)]
    second = [nn.functional.pad(left * factor, (0, r - kept)) for factor in (1.0, 2.0)]
    mean = 1.5 * left @ common
    a, b, error = refactor(first, second, [0.5, 0.5])
    torch.testing.assert_close(b @ a, mean)
    assert error < 1e-14
    if n > r:
        torch.testing.assert_close(a, (first[0] + first[1]) / 2)  # nothing stands against the mean itself
    noise = [1 + 1e-15 * draw(r, n), 1 - 1e-15 * draw(r, n)]
    other_a, other_b, _ = refactor([own * by for own, by in zip(first, noise, strict=True)], second, [0.5, 0.5])
    for mixed in (other_b @ a, b @ other_a):
        torch.testing.assert_close(mixed, mean)
    torch.testing.assert_close(other_a, a)


def test_refactor_of_a_lower_rank_keeps_one_first_factor() -> None:
    first, second = draw(4, 9), [draw(6, 1) @ draw(1, 4), draw(6, 1) @ draw(1, 4) * 3]
    a, b, _ = refactor([first, first], second, [0.5, 0.5])
    torch.testing.assert_close(a, first)
    torch.testing.assert_close(b, (second[0] + second[1]) / 2)


def test_refactor_of_products_that_cancel() -> None:
    """The factors of the mean product, which is zero: not the means of the factors, whose product is not."""
    first, second = draw(1, 5), draw(4, 1)
    a, b, error = refactor([first, 3 * first], [second, -second / 3], [0.5, 0.5])
    assert float((b @ a).abs().max()) < 1e-15 and error == 0
    assert float(a.norm()) > 0, "or nothing would ever train"


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
    assert not model.get_parameter(FIRST).requires_grad
    run.rounds.finish()
    assert model.get_parameter(FIRST).requires_grad, "as it was"
    return torch.equal(before[FIRST], after[FIRST])


def test_frozen_after_an_evaluation(world8: WorkerPool) -> None:
    assert all(world8.run(_evaluated_before))


def _unlike_hardware() -> Any:
    """One rank finds another pair of factors for the same products."""
    mesh, after = make_mesh(), []
    for unlike in (False, True):
        run = Run(mesh, adapted(), sgd, lora_average="product")

        def found(*args: Any, unlike: bool = unlike) -> Any:
            a, b, error = refactor(*args)
            return (2 * a, b / 2, 2 * error) if unlike and dist.get_rank() == 5 else (a, b, error)

        with mock.patch("hf_fedshard.lora_products.refactor", found):
            run.train(0)
            metrics = run.train(1)
        after.append((full_state(run.model), metrics.drift, metrics.lora_error))
        run.rounds.release()
    return after


def test_all_ranks_take_one_pair_of_factors(world8: WorkerPool) -> None:
    for alike, unlike in world8.run(_unlike_hardware):
        assert all(torch.equal(tensor, unlike[0][name]) for name, tensor in alike[0].items())
        assert alike[1:] == unlike[1:]


def _one_group() -> bool:
    """Plain training, in a loop as under Trainer: whether A still trains."""
    mesh = build_federation_mesh("cpu", FederationLayout(1, 4, {"dp_shard": 2}))
    model = fully_shard(adapted(), mesh=mesh.fsdp)
    rounds = Rounds(model, mesh, FederationConfig(1, 2, lora_average="freeze_a"), [sgd(model.parameters())])
    trains = model.get_parameter(FIRST).requires_grad
    rounds.finish()
    return trains


def test_one_group_freezes_nothing(world8: WorkerPool) -> None:
    assert all(world8.run(_one_group))


def _one_factor(frozen: str) -> Any:
    """A run in which the user has frozen a factor, and the mean of the products in its round."""
    mesh, model = make_mesh(), adapted()
    model.get_parameter(frozen).requires_grad_(False)
    if frozen == FIRST:
        nn.init.ones_(model.get_parameter(SECOND))
    run = Run(mesh, model, sgd, lora_average="product")
    run.train(0)
    close, own = run.rounds.close, []

    def keeping(*args: Any) -> Any:
        own.append(product(full_state(run.model)))
        return close(*args)

    run.rounds.close = keeping  # type: ignore[method-assign]
    run.train(1)
    return own[0], product(full_state(run.model))


@pytest.mark.parametrize("frozen", [FIRST, SECOND])
def test_a_frozen_factor_is_one_for_all(world8: WorkerPool, frozen: str) -> None:
    ranks = world8.run(_one_factor, frozen)
    mean = (ranks[0][0] + ranks[GROUP_SIZE][0]) / 2
    assert not torch.equal(ranks[0][0], ranks[GROUP_SIZE][0])
    for rank in ranks:
        torch.testing.assert_close(rank[1], mean)


def _one_local_factor(simulated: bool) -> None:
    settings: dict[str, Any] = {"lora_average": "product", "local_parameters": FIRST}
    if simulated:
        Simulation(adapted(), FederationConfig(2, 2, **settings), sgd)
    Run(make_mesh(), adapted(), sgd, **settings)


@pytest.mark.parametrize("simulated", [False, True])
def test_a_product_with_a_local_factor_is_refused(world8: WorkerPool, simulated: bool) -> None:
    for error in world8.run_failing(_one_local_factor, simulated):
        assert error.type_name == "ValueError"
        assert f"of {SECOND} and {FIRST} only the first is averaged" in error.message


def _without_adapters() -> None:
    model = double() if dist.get_rank() else adapted()
    mesh = make_mesh()
    Rounds(fully_shard(model, mesh=mesh.fsdp), mesh, FederationConfig(2, lora_average="freeze_a"))


def test_model_without_adapters_is_refused_on_every_rank(world8: WorkerPool) -> None:
    for error in world8.run_failing(_without_adapters):
        assert error.type_name == "ValueError"
        assert "has no LoRA adapter that trains" in error.message
