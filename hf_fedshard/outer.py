"""The outer step: from the average of the groups to the model with which the next round begins."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from .apart import Apart
from .config import FederationConfig
from .outer_memory import OuterMemory
from .outer_optimizers import is_plain_averaging, make_outer_optimizer, rate_factor
from .tensors import accumulation_dtype
from .wire import find_codec


class OuterLoop:
    """
    Holds the anchor, the model at the last border, and steps it with the outer optimizer on the pseudo-gradient, the
    anchor minus the average of the groups (arXiv 2003.00295; with Nesterov momentum DiLoCo, arXiv 2311.08105).

    Everything is sharded as the parameters are, in fp32 or more: the anchor takes 4 bytes for each element of this rank's
    shards, the optimizer's state as much for SGD with momentum and Adagrad and twice that for Adam. The pseudo-gradient
    takes none beside the parameters, but where these have fewer bits than fp32: then 4 bytes an element during a border.
    Plain averaging ([`is_plain_averaging`]) needs no anchor, unless a proximal term does, or a lossy wire format, which
    carries differences to it. With `offload_outer_state` all of it is in host memory, and one shard after the other is
    stepped on the device.

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
        self.keeps_anchors = not self.plain or bool(config.proximal_mu) or find_codec(config.wire_format) is not None
        self.memory = OuterMemory(config.offload_outer_state)
        self.apart = Apart(self.memory)
        self.optimizer: torch.optim.Optimizer | None = None
        self._rate = 0.0
        self._device: torch.device | None = None
        """Of the parameters: what is exchanged may lie in host memory, and anchors too."""

    def restart(self, shards: Mapping[str, torch.Tensor]) -> None:
        """
        Begins from a model that all groups hold, with no step made.

        Args:
            shards (`Mapping[str, torch.Tensor]`):
                This rank's shards of what is averaged.
        """
        self.num_steps = 0
        self.apart.clear()
        self._device = next((shard.device for shard in shards.values()), self._device)
        if not self.keeps_anchors:
            return
        # The same dictionary: the proximal term looks its anchors up in it.
        self.anchors.clear()
        self.anchors.update({name: self._copy(shard) for name, shard in shards.items()})
        if not self.plain:
            self.optimizer = self._make(self.anchors)
            for name, anchor in self.anchors.items():
                self.memory.adopt_state(self.optimizer, anchor, shards[name].device)
            self._rate = self.optimizer.param_groups[0]["lr"]

    def _copy(self, shard: torch.Tensor) -> torch.Tensor:
        return self.memory.copy(shard, shard.device, accumulation_dtype(shard.dtype))

    def _make(self, anchors: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
        config = self.config
        return make_outer_optimizer(
            config.outer_optimizer, config.outer_learning_rate, config.outer_options, list(anchors.values())
        )

    def fresh_state(self) -> dict[str, torch.Tensor]:
        """
        What the optimizer keeps of a parameter, with a single element, that has not moved in its first step: to complete
        a state that was saved with options that keep less.
        """
        still = torch.zeros(1)
        still.grad = torch.zeros(1)
        optimizer = self._make({"": still})
        optimizer.step()
        return {key: value for key, value in optimizer.state[still].items() if isinstance(value, torch.Tensor)}

    def _adopt(self, name: str, value: torch.Tensor) -> None:
        """Takes in what began to train inside the round: it has moved already, and begins from its first average."""
        device = self._device or value.device
        self.anchors[name] = anchor = self.memory.copy(value, device, accumulation_dtype(value.dtype))
        if self.optimizer is not None:
            self.optimizer.param_groups[0]["params"].append(anchor)
            # Adagrad makes its state when it is constructed.
            self.optimizer.state.update(self._make({name: anchor}).state)
            self.memory.adopt_state(self.optimizer, anchor, device)

    def forget(self, names: Iterable[str]) -> None:
        """
        Drops anchors: of what no longer trains, or began to train inside the round that is resumed.

        Args:
            names (`Iterable[str]`):
                Of the parameters.
        """
        names = set(names)
        self.apart.rejoin(names)
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
    def form_pseudo_gradients(
        self, means: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype], copies: Mapping[str, int]
    ) -> float:
        """
        Turns the averages into pseudo-gradients, in place, and gives this rank's part of their squared norm.

        Reads the anchors and changes none of them, nor the optimizer: a thread of its own may call it while training steps use
        them. The average of what has no anchor yet stays as it is, and begins from it in [`~OuterLoop.step`].

        A pseudo-gradient is what the groups have moved by: from the model that they began the round with, which is the
        anchor as the parameters' dtype rounds it. What was rounded off is no movement; counted as one it would be taken
        back in each round, and the anchor could not add up what is smaller than a step of that dtype.

        Args:
            means (`Mapping[str, torch.Tensor]`):
                The averages, from [`~OuterLoop.means`] after the exchange.
            dtypes (`Mapping[str, torch.dtype]`):
                Of the parameters.
            copies (`Mapping[str, int]`):
                How many ranks of a group hold each element of a parameter: its part is divided among them, so that the
                sum over the group counts every element once.
        """
        if self.optimizer is None:
            return 0.0
        squares = []
        for name, mean in means.items():
            if name not in self.anchors:
                continue  # it has not moved from the average that it begins from
            start = self.anchors[name].to(dtypes[name])
            self.apart.complete(name, mean)
            # A snapshot may lie in host memory.
            mean.neg_().add_(start.to(mean.device))
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
        dtypes: Mapping[str, torch.dtype],
        norm: float,
        last: bool = True,
        turn: Collection[str] | None = None,
    ) -> float | None:
        """
        Steps the anchor and gives the parameters its values. Without communication.

        What is not in its turn becomes its average, and keeps its anchor and its place in the schedule: it has not moved from
        the model of its last step by less for that.

        Args:
            means (`Mapping[str, torch.Tensor]`):
                The pseudo-gradients, and the averages of what has no anchor yet, or is not in its turn; their content is lost.
            shards (`Mapping[str, torch.Tensor]`):
                This rank's shards, written in place; those that are missing are left to the caller.
            dtypes (`Mapping[str, torch.dtype]`):
                Of the parameters.
            norm (`float`):
                Norm of the pseudo-gradient of all that is stepped, the same bits on all ranks.
            last (`bool`, defaults to `True`):
                Whether the schedule goes on: not with a fragment of the model that others follow.
            turn (`Collection[str]`, *optional*):
                Names of the parameters that are stepped, the same on all ranks; by default all.

        Returns:
            `float` or `None`: The outer learning rate; `None` where the average is the model.
        """
        if self.optimizer is None:
            return self.take(means, shards, dtypes)
        if turn is not None:
            self._leave({name: mean for name, mean in means.items() if name not in turn}, shards, dtypes)
            means = {name: mean for name, mean in means.items() if name in turn}
            if not turn:
                return None
        config, limit = self.config, self.config.outer_max_norm
        rate = self._rate * rate_factor(
            config.outer_schedule, config.outer_warmup_rounds, config.outer_schedule_rounds, self.num_steps
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # What lies in host memory comes to the device one shard at a time.
        one_by_one = self.memory.offload or any(mean.device != self._device for mean in means.values())
        for name, gradient in means.items():
            if name not in self.anchors:
                self._adopt(name, gradient)
                gradient.zero_()
            if limit is not None and norm > limit:
                gradient.mul_(limit / norm)
            if one_by_one:
                on_device = gradient.to(self._device or gradient.device, non_blocking=True)
                self.memory.step(self.optimizer, self.anchors[name], on_device)
            else:
                self.anchors[name].grad = gradient
        if not one_by_one:
            self.optimizer.step()
        for name in means:
            self.anchors[name].grad = None
            if name in shards:
                shards[name].copy_(self.anchors[name])
        self.apart.rejoin(means)
        self.num_steps += last
        return rate

    def _leave(
        self,
        means: Mapping[str, torch.Tensor],
        shards: Mapping[str, torch.Tensor],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        """Takes the average as the model, and leaves the anchor where it is."""
        newcomers = {name: mean for name, mean in means.items() if name not in self.anchors}
        self.take(newcomers, shards, dtypes)
        for name, mean in means.items():
            if name not in newcomers:
                self.apart.leave(name, mean, shards.get(name))

    @torch.no_grad()
    def take(
        self,
        means: Mapping[str, torch.Tensor],
        shards: Mapping[str, torch.Tensor],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        """
        Takes the average as the model, without a step: it is the next anchor. Without communication.

        Of plain averaging the anchor is the model itself, as the parameters' dtype rounds it, also where the average of a
        snapshot has more bits: a checkpoint holds the model alone.

        Args:
            means (`Mapping[str, torch.Tensor]`):
                The averages.
            shards (`Mapping[str, torch.Tensor]`):
                This rank's shards, written in place; those that are missing are left to the caller.
            dtypes (`Mapping[str, torch.dtype]`):
                Of the parameters.
        """
        self.apart.rejoin(means)
        for name, mean in means.items():
            if name in shards and mean is not shards[name]:
                shards[name].copy_(mean)
            if name in self.anchors:
                # From pinned memory without waiting for the steps on the device. Not into it: the host may read it next.
                self.anchors[name].copy_(mean, non_blocking=mean.device.type == "cpu")
            elif self.keeps_anchors:
                self._adopt(name, mean)
            if self.optimizer is None and name in self.anchors and mean.dtype != dtypes[name]:
                self.anchors[name].copy_(self.anchors[name].to(dtypes[name]))


def _wide_copy(shard: torch.Tensor) -> torch.Tensor:
    return shard.detach().to(accumulation_dtype(shard.dtype), copy=True)
