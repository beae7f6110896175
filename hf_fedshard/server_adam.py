"""The two optimizers of federated papers that torch has not."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


class ServerAdam(torch.optim.Optimizer):
    """
    FedAdam and FedYogi (arXiv 2003.00295, algorithm 2), which torch has not: there is no bias correction, and the second
    moment begins with `tau` squared. With the pseudo-gradient `d = anchor - mean`:

    ```text
    m = beta1 m + (1 - beta1) d
    v = beta2 v + (1 - beta2) d^2                     FedAdam
    v = v - (1 - beta2) d^2 sign(v - d^2)             FedYogi
    x = x - lr m / (sqrt(v) + tau)
    ```

    Args:
        params (`Iterable[torch.Tensor]`):
            The anchors.
        lr (`float`):
            The paper's eta.
        beta1 (`float`):
            Decay of the first moment.
        beta2 (`float`):
            Decay of the second moment.
        tau (`float`):
            Degree of adaptivity: the smaller, the more adaptive.
        yogi (`bool`, defaults to `False`):
            Whether the second moment is Yogi's.
    """

    def __init__(
        self, params: Iterable[torch.Tensor], lr: float, beta1: float, beta2: float, tau: float, yogi: bool = False
    ) -> None:
        for name, value in (("beta1", beta1), ("beta2", beta2)):
            if not 0 <= value < 1:
                raise ValueError(f"Invalid {name} value: {value}")
        if not tau > 0:
            raise ValueError(f"Invalid tau value: {tau}")
        super().__init__(params, {"lr": lr, "beta1": beta1, "beta2": beta2, "tau": tau, "yogi": yogi})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """
        Steps every parameter that has a gradient.

        Args:
            closure (`Callable`, *optional*):
                None is taken.
        """
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.full_like(param, group["tau"] ** 2)
                first, second = state["exp_avg"], state["exp_avg_sq"]
                first.lerp_(param.grad, 1 - group["beta1"])
                square = param.grad * param.grad
                if group["yogi"]:
                    second.addcmul_(square, torch.sign(second - square), value=group["beta2"] - 1)
                else:
                    second.lerp_(square, 1 - group["beta2"])
                param.addcdiv_(first, second.sqrt().add_(group["tau"]), value=-group["lr"])
