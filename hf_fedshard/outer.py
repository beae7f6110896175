"""The outer step: from the average of the groups to the model with which the next round begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from .config import FederationConfig
from .outer_optimizers import is_plain_averaging, make_outer_optimizer, rate_factor
from .shards import accumulation_dtype


class OuterLoop:
    """
    Holds the anchor, the model at the last border, and steps it with the outer optimizer on the pseudo-gradient, the
    anchor minus the average of the groups (arXiv 2003.00295; with Nesterov momentum DiLoCo, arXiv 2311.08105).

    Everything is sharded as the parameters are, in fp32 or more: the anchor takes 4 bytes for each element of this rank's
    shards, the optimizer's state as much for SGD with momentum and Adagrad and twice that for Adam. The pseudo-gradient
    takes none beside the parameters, but where these have fewer bits than fp32: then 4 bytes an element during a border.
    Plain averaging ([`is_plain_averaging`]) needs no anchor, unless a proximal term does.

    Args:
        config ([`FederationConfig`]):
            The settings.
    """

    def __init__(self, config: FederationConfig) -> None:
        self.config = config
        self.anchors: dict[str, torch.Tensor] = {}
        self.num_steps = 0
        """Outer steps made: where the schedule stands."""
        self.plain = is_plain_averaging(config)
        self.optimizer: torch.optim.Optimizer | None = None
        self._rate = 0.0

    def restart(self, shards: Mapping[str, torch.Tensor]) -> None:
        """
        Begins from a model that all groups hold, with no step made.

        Args:
            shards (`Mapping[str, torch.Tensor]`):
                This rank's shards of what is averaged.
        """
        self.num_steps = 0
        if self.plain and not self.config.proximal_mu:
            return
        # The same dictionary: the proximal term looks its anchors up in it.
        self.anchors.clear()
        self.anchors.update({name: _wide_copy(shard) for name, shard in shards.items()})
        if not self.plain:
            self.optimizer = self._make(self.anchors)
            self._rate = self.optimizer.param_groups[0]["lr"]

    def _make(self, anchors: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
        config = self.config
        return make_outer_optimizer(
            config.outer_optimizer, config.outer_learning_rate, config.outer_options, list(anchors.values())
        )

    def _adopt(self, name: str, value: torch.Tensor) -> None:
        """Takes in what began to train inside the round: it has moved already, and begins from its first average."""
        self.anchors[name] = anchor = _wide_copy(value).to(
            next((held.device for held in self.anchors.values()), value.device)
        )
        if self.optimizer is not None:
            self.optimizer.param_groups[0]["params"].append(anchor)
            # Adagrad makes its state when it is constructed.
            self.optimizer.state.update(self._make({name: anchor}).state)

    def forget(self, names: Iterable[str]) -> None:
        """
        Drops anchors: of what began to train inside the round that is resumed.

        Args:
            names (`Iterable[str]`):
                Of the parameters.
        """
        dropped = {id(self.anchors.pop(name)) for name in names}
        if self.optimizer is None:
            return
        for group in self.optimizer.param_groups:
            for anchor in group["params"]:
                if id(anchor) in dropped:
                    # Adagrad has made its state when it was constructed.
                    self.optimizer.state.pop(anchor, None)
            group["params"] = [anchor for anchor in group["params"] if id(anchor) not in dropped]

    def means(self, shards: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """
        The tensors in which the average is to be formed: the shards themselves, or, of parameters with fewer bits than
        fp32, copies, so that the pseudo-gradient is not that of a rounded average.

        Args:
            shards (`Mapping[str, torch.Tensor]`):
                This rank's shards.
        """
        if self.optimizer is None:
            return dict(shards)
        return {
            name: shard if shard.dtype == accumulation_dtype(shard.dtype) else _wide_copy(shard)
            for name, shard in shards.items()
        }

    @torch.no_grad()
    def form_pseudo_gradients(self, means: Mapping[str, torch.Tensor], copies: Mapping[str, int]) -> float:
        """
        Turns the averages into pseudo-gradients, in place, and gives this rank's part of their squared norm.

        Args:
            means (`Mapping[str, torch.Tensor]`):
                The averages, from [`~OuterLoop.means`] after the exchange.
            copies (`Mapping[str, int]`):
                How many ranks of a group hold each element of a parameter: its part is divided among them, so that the
                sum over the group counts every element once.
        """
        if self.optimizer is None:
            return 0.0
        squares = []
        for name, mean in means.items():
            if name not in self.anchors:
                self._adopt(name, mean)
            # A snapshot may lie in host memory.
            mean.neg_().add_(self.anchors[name].to(mean.device))
            squares.append(mean.norm().double().square() / copies[name])
        if not squares:
            return 0.0
        # Brought together before they are read, which is when a device is waited for.
        return float(torch.stack([square.to(squares[0].device) for square in squares]).sum())

    @torch.no_grad()
    def step(
        self,
        means: Mapping[str, torch.Tensor],
        shards: Mapping[str, torch.Tensor],
        norm: float,
        last: bool = True,
    ) -> float | None:
        """
        Steps the anchor and gives the parameters its values. Without communication.

        Args:
            means (`Mapping[str, torch.Tensor]`):
                The pseudo-gradients.
            shards (`Mapping[str, torch.Tensor]`):
                This rank's shards, written in place.
            norm (`float`):
                Norm of the pseudo-gradient of the whole model, the same bits on all ranks.
            last (`bool`, defaults to `True`):
                Whether the schedule goes on: not with a fragment of the model that others follow.

        Returns:
            `float` or `None`: The outer learning rate; `None` where the average is the model.
        """
        if self.optimizer is None:
            return self.take(means, shards)
        config, limit = self.config, self.config.outer_max_norm
        rate = self._rate * rate_factor(
            config.outer_schedule, config.outer_warmup_rounds, config.outer_schedule_rounds, self.num_steps
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for name, gradient in means.items():
            if limit is not None and norm > limit:
                gradient.mul_(limit / norm)
            self.anchors[name].grad = gradient
        self.optimizer.step()
        for name in means:
            self.anchors[name].grad = None
            shards[name].copy_(self.anchors[name])
        self.num_steps += last
        return rate

    @torch.no_grad()
    def take(self, means: Mapping[str, torch.Tensor], shards: Mapping[str, torch.Tensor]) -> None:
        """
        Takes the average as the model, without a step: it is the next anchor. Without communication.

        Args:
            means (`Mapping[str, torch.Tensor]`):
                The averages.
            shards (`Mapping[str, torch.Tensor]`):
                This rank's shards, written in place.
        """
        for name, mean in means.items():
            if mean is not shards[name]:
                shards[name].copy_(mean)
            if name in self.anchors:
                self.anchors[name].copy_(mean)
            elif self.optimizer is not None or self.config.proximal_mu:
                self._adopt(name, mean)


def _wide_copy(shard: torch.Tensor) -> torch.Tensor:
    return shard.detach().to(accumulation_dtype(shard.dtype), copy=True)
