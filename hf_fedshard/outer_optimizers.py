"""
The outer optimizers: torch's own by name, those of federated papers by theirs, and what may be set about them.

An outer optimizer steps each element of each shard by itself, so a rank needs no more than the shard that it holds.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .server_adam import ServerAdam


if TYPE_CHECKING:
    from .config import FederationConfig


# Every one of these updates an element from that element's own gradient and state.
ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
REFUSED = {
    "Adafactor": "it keeps row and column means of whole matrices",
    "LBFGS": "it evaluates the loss again in each step",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it takes sparse gradients only",
}
# Those of torch that do not step by the learning rate as it is when they step.
UNSCHEDULED = {
    "ASGD": "takes a changed learning rate over one step late",
    "Rprop": "takes no learning rate but the first one",
}
# What would turn the step round, or change who computes it.
_RESERVED = ("params", "lr", "maximize", "differentiable", "capturable", "foreach", "fused", "nesterov")


def _fedavgm(params: Any, lr: float = 1.0, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=momentum, foreach=False)


def _nesterov(params: Any, lr: float = 0.7, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=momentum, nesterov=True, foreach=False)


def _fedavg(params: Any, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, foreach=False)


def _fedadagrad(params: Any, lr: float = 0.1, tau: float = 1e-3) -> torch.optim.Optimizer:
    # Torch's is the paper's, with beta1 = 0 as there and v beginning with the square of tau.
    return torch.optim.Adagrad(params, lr=lr, initial_accumulator_value=tau**2, eps=tau, foreach=False)


def _fedadam(
    params: Any, lr: float = 1e-2, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3
) -> torch.optim.Optimizer:
    return ServerAdam(params, lr, beta1, beta2, tau)


def _fedyogi(
    params: Any, lr: float = 1e-2, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3
) -> torch.optim.Optimizer:
    return ServerAdam(params, lr, beta1, beta2, tau, yogi=True)


OF_PAPERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fedavg": _fedavg,
    "fedavgm": _fedavgm,
    "nesterov": _nesterov,
    "fedadagrad": _fedadagrad,
    "fedadam": _fedadam,
    "fedyogi": _fedyogi,
}
SCHEDULES = ("constant", "linear", "cosine")


def parse_options(options: str | Mapping[str, Any]) -> dict[str, Any]:
    """
    Reads the arguments of an outer optimizer.

    Args:
        options (`str` or `Mapping[str, Any]`):
            A dictionary, or the arguments as they are written in a call: `"momentum=0.9"`, `"betas=(0.9, 0.95), eps=1e-6"`.

    Raises:
        ValueError: If the text does not parse, or is neither a text nor a dictionary of names.
    """
    if isinstance(options, Mapping) and all(isinstance(name, str) for name in options):
        return dict(options)
    try:
        if not isinstance(options, str):
            raise ValueError
        call = ast.parse(f"f({options})", mode="eval").body
        assert isinstance(call, ast.Call) and not call.args
        return {str(item.arg): ast.literal_eval(item.value) for item in call.keywords if item.arg or 1 / 0}
    except (SyntaxError, ValueError, AssertionError, ZeroDivisionError):
        raise ValueError(
            f"outer_options must be written as the arguments of a call, such as 'momentum=0.9' or "
            f"'betas=(0.9, 0.95), eps=1e-6', or be a dictionary of them, but got {options!r}."
        ) from None


def format_options(options: str | Mapping[str, Any]) -> str:
    """
    The same text for the same options, however they were given: to be compared between ranks.

    Args:
        options (`str` or `Mapping[str, Any]`):
            As for [`parse_options`].
    """
    return ", ".join(f"{name}={value!r}" for name, value in sorted(parse_options(options).items()))


def make_outer_optimizer(
    name: str, learning_rate: float | None, options: str | Mapping[str, Any], params: Iterable[torch.Tensor]
) -> torch.optim.Optimizer:
    """
    Makes an outer optimizer.

    Args:
        name (`str`):
            `"fedavg"`, `"fedavgm"`, `"nesterov"`, `"fedadagrad"`, `"fedadam"`, `"fedyogi"`, or an elementwise class of
            `torch.optim`.
        learning_rate (`float`, *optional*):
            Its learning rate; by default that of the functions above, or of torch.
        options (`str` or `Mapping[str, Any]`):
            Its other arguments.
        params (`Iterable[torch.Tensor]`):
            The anchors.

    Raises:
        ValueError: If there is no such optimizer, if it is not elementwise, or if it does not take the options.
    """
    if isinstance(name, str) and name in REFUSED:
        raise ValueError(
            f"outer_optimizer={name} cannot step shards: {REFUSED[name]}. Use an elementwise one: "
            f"{', '.join([*OF_PAPERS, *ELEMENTWISE])}."
        )
    if not isinstance(name, str) or (name not in OF_PAPERS and name not in ELEMENTWISE):
        raise ValueError(
            f"outer_optimizer must be one of {', '.join(OF_PAPERS)}, or an elementwise class of torch.optim "
            f"({', '.join(ELEMENTWISE)}), but got {name!r}."
        )
    make = OF_PAPERS.get(name) or getattr(torch.optim, name)
    taken = set(inspect.signature(make).parameters)
    arguments = parse_options(options)
    allowed = sorted((taken - set(_RESERVED)) | ({"nesterov"} & taken if name == "SGD" else set()))
    wrong = sorted(set(arguments) - set(allowed))
    if wrong:
        hint = " The learning rate is outer_learning_rate." if "lr" in wrong else ""
        raise ValueError(
            f"outer_options has {', '.join(wrong)}, which outer_optimizer={name} does not take. It takes "
            f"{', '.join(allowed) or 'none'}.{hint}"
        )
    if learning_rate is not None:
        arguments["lr"] = learning_rate
    if name in ELEMENTWISE and "foreach" in taken:
        # One tensor after the other: torch's default makes temporaries as large as the whole shard.
        arguments["foreach"] = False
    try:
        optimizer: torch.optim.Optimizer = make(params, **arguments)
    except (ValueError, TypeError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items() if key != "foreach")
        raise ValueError(f"outer_optimizer={name} does not take {given}: {error}.") from error
    return optimizer


def rate_factor(schedule: str, warmup_rounds: int, total_rounds: int | None, num_steps: int) -> float:
    """
    By what the outer learning rate is multiplied. The forms are those of `transformers.get_scheduler`, but that no step
    has the factor 0: it would throw away what all groups have trained in a round.

    Args:
        schedule (`str`):
            `"constant"`, `"linear"` or `"cosine"`, the latter two falling towards 0 at `total_rounds`.
        warmup_rounds (`int`):
            Rounds of a linear warm-up.
        total_rounds (`int`, *optional*):
            Rounds of the run; after them the factor stays.
        num_steps (`int`):
            Outer steps behind the one that is made.
    """
    if num_steps < warmup_rounds:
        return (num_steps + 1) / (warmup_rounds + 1)
    if schedule == "constant":
        return 1.0
    assert total_rounds is not None
    left = total_rounds - warmup_rounds
    share = min(num_steps - warmup_rounds, left - 1) / left
    return 1.0 - share if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))


def is_plain_averaging(config: FederationConfig) -> bool:
    """
    Whether the model at a border is the average itself, bit for bit.

    Args:
        config ([`FederationConfig`]):
            The settings.
    """
    return (
        config.outer_optimizer == "fedavg"
        and config.outer_learning_rate in (None, 1.0)
        and config.outer_schedule == "constant"
        and config.outer_warmup_rounds == 0
        and config.outer_max_norm is None
    )
