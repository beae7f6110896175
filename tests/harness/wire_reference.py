"""The average through a lossy wire format, on the tensors of all groups in one process. It shares no code with the package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


Tensors = dict[str, torch.Tensor]
# Bits of a code and numbers that share a scale.
BLOCKS = {"int8": (8, 64), "int4": (4, 32)}


def through_wire(values: torch.Tensor, wire_format: str) -> torch.Tensor:
    """
    What comes out at the other end, in the dtype of the values.

    Args:
        values (`torch.Tensor`):
            1-D, whole blocks.
        wire_format (`str`):
            `"bf16"`, `"int8"` or `"int4"`.
    """
    if wire_format == "bf16":
        return values.bfloat16().to(values.dtype)
    bits, block = BLOCKS[wire_format]
    most = 2 ** (bits - 1) - 1
    out = torch.zeros_like(values)
    for start in range(0, len(values), block):
        part = values[start : start + block]
        scale = (part.abs().max() / most).bfloat16().to(values.dtype)
        if scale >= torch.finfo(torch.bfloat16).tiny:
            out[start : start + block] = torch.round(part / scale).clamp(-most, most) * scale
    return out


class LossyAverage:
    """
    Averages round after round, with the residuals of all groups.

    Args:
        wire_format (`str`):
            `"bf16"`, `"int8"` or `"int4"`.
        num_groups (`int`):
            P, the peers.
        num_replicas (`int`):
            Replicas in a group, each of which exchanges a slice of every bucket.
        bucket_size_bytes (`int`):
            Size of a bucket.
    """

    def __init__(self, wire_format: str, num_groups: int, num_replicas: int, bucket_size_bytes: int) -> None:
        self.wire_format = wire_format
        self.num_groups = num_groups
        self.num_replicas = num_replicas
        self.bucket_size_bytes = bucket_size_bytes
        self.residuals: list[dict[torch.dtype, torch.Tensor]] = [{} for _ in range(num_groups)]

    def __call__(self, groups: Sequence[Tensors], start: Tensors | None, weights: Sequence[float]) -> Tensors:
        """
        The averages, in the dtype in which they are formed.

        Args:
            groups (`Sequence[dict[str, torch.Tensor]]`):
                What each group holds of one shard.
            start (`dict[str, torch.Tensor]`, *optional*):
                With what the round began, in the dtypes of the parameters.
            weights (`Sequence[float]`):
                Of the groups.
        """
        found: Tensors = {}
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, tensor in groups[0].items():
            by_dtype.setdefault(torch.promote_types(tensor.dtype, torch.float32), []).append(name)
        for dtype, names in by_dtype.items():
            sizes = [groups[0][name].numel() for name in names]
            granule = self.num_groups * self.num_replicas * BLOCKS.get(self.wire_format, (16, 1))[1]
            padded = -(-sum(sizes) // granule) * granule
            shares = []
            for group, (held, weight) in enumerate(zip(groups, weights, strict=True)):
                flat = torch.zeros(padded, dtype=dtype)
                if weight:
                    difference = self._flat(held, names, dtype) - (self._flat(start, names, dtype) if start else 0)
                    flat[: sum(sizes)] = difference * (weight / sum(weights))
                    flat += self.residuals[group].get(dtype, torch.zeros(padded, dtype=dtype))
                shares.append(flat)
            capacity = max(self.bucket_size_bytes // dtype.itemsize // granule, 1) * granule
            total = torch.zeros(padded, dtype=dtype)
            for at in range(0, padded, capacity):
                self._bucket(
                    [share[at : at + capacity] for share in shares], total[at : at + capacity], dtype, at, padded
                )
            flats = total[: sum(sizes)].split(sizes)
            for name, flat in zip(names, flats, strict=True):
                mean = flat.view(groups[0][name].shape)
                found[name] = mean + (start[name].to(dtype) if start else 0)
        return found

    def _bucket(
        self, shares: Sequence[torch.Tensor], total: torch.Tensor, dtype: torch.dtype, at: int, padded: int
    ) -> None:
        for piece in range(self.num_replicas * self.num_groups):
            # Slice by slice, and in each the part of peer 0, 1, ...
            size = len(total) // (self.num_replicas * self.num_groups)
            where = slice(piece * size, (piece + 1) * size)
            owner = piece % self.num_groups
            arrived = [through_wire(share[where], self.wire_format) for share in shares]
            summed = arrived[0].clone()
            for other in arrived[1:]:
                summed += other
            total[where] = through_wire(summed, self.wire_format)
            if self.wire_format == "bf16":
                continue
            for group, (share, there) in enumerate(zip(shares, arrived, strict=True)):
                residual = self.residuals[group].setdefault(dtype, torch.zeros(padded, dtype=dtype))
                residual[at + where.start : at + where.stop] = share[where] - there
                if group == owner:
                    residual[at + where.start : at + where.stop] += summed - total[where]

    @staticmethod
    def _flat(tensors: Mapping[str, torch.Tensor], names: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([tensors[name].reshape(-1).to(dtype) for name in names])


class ShardedLossyAverage:
    """
    Averages whole tensors as ranks with shards of them do, any part of a model at a time: what is owed is kept by name.

    Args:
        wire_format (`str`):
            `"bf16"`, `"int8"` or `"int4"`.
        num_groups (`int`):
            P, the peers.
        num_replicas (`int`):
            Replicas in a group.
        num_shards (`int`):
            Shards of a replica, cut along the first dim.
        bucket_size_bytes (`int`):
            Size of a bucket.
    """

    def __init__(
        self, wire_format: str, num_groups: int, num_replicas: int, num_shards: int, bucket_size_bytes: int
    ) -> None:
        self.arguments = (wire_format, num_groups, num_replicas, bucket_size_bytes)
        self.num_groups = num_groups
        self.num_shards = num_shards
        self.owed: dict[tuple[int, int, str], torch.Tensor] = {}

    def __call__(self, groups: Sequence[Tensors], weights: Sequence[float], start: Tensors) -> Tensors:
        """
        The averages, whole.

        Args:
            groups (`Sequence[dict[str, torch.Tensor]]`):
                What each group holds, whole and of one dtype.
            weights (`Sequence[float]`):
                Of the groups.
            start (`dict[str, torch.Tensor]`):
                What differences are taken to, of these parameters and perhaps others, in their order in the model.
        """
        names = [name for name in start if name in groups[0]]
        found: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        for shard in range(self.num_shards):
            cut = [{name: self._cut(group[name], shard) for name in names} for group in [*groups, start]]
            average = LossyAverage(*self.arguments)
            dtype, sizes = start[names[0]].dtype, [cut[0][name].numel() for name in names]
            padded = -(-sum(sizes) // self._granule()) * self._granule()
            for group in range(self.num_groups):
                flat = average.residuals[group][dtype] = torch.zeros(padded, dtype=dtype)
                owed = [self.owed.get((shard, group, name), torch.zeros(())) for name in names]
                for part, there in zip(flat[: sum(sizes)].split(sizes), owed, strict=True):
                    part.copy_(there)
            means = average(cut[:-1], cut[-1], weights)
            for group in range(self.num_groups):
                flat = average.residuals[group][dtype]
                assert not flat[sum(sizes) :].any()
                for name, part in zip(names, flat[: sum(sizes)].split(sizes), strict=True):
                    self.owed[shard, group, name] = part.clone()
            for name, mean in means.items():
                found[name].append(mean)
        return {name: torch.cat(parts) for name, parts in found.items()}

    def _cut(self, tensor: torch.Tensor, shard: int) -> torch.Tensor:
        size = -(-len(tensor) // self.num_shards)
        return tensor[shard * size : (shard + 1) * size]

    def _granule(self) -> int:
        wire_format, num_groups, num_replicas, _ = self.arguments
        return num_groups * num_replicas * BLOCKS.get(wire_format, (16, 1))[1]
