"""What values look like while they cross the slow tier: formats of fewer bits than fp32, to bytes and back."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


WIRE_FORMATS = ("fp32", "bf16", "int8", "int4")
_SCALE = torch.bfloat16
# Below it 1 / scale and products with it are not safe on every device; such values wait in the residual.
_LEAST_SCALE = torch.finfo(_SCALE).tiny


class Codec(ABC):
    """
    A lossy format: rows of floating-point numbers to rows of bytes and back. It has no state, and the same bytes give the
    same numbers on every rank.

    Attributes:
        granule (`int`): Numbers in a row are a multiple of it.
        feeds_back (`bool`): Whether what encoding loses is worth being kept and sent later.
    """

    granule = 1
    feeds_back = False

    @abstractmethod
    def row_bytes(self, numel: int) -> int:
        """
        Bytes of a row, scales included.

        Args:
            numel (`int`):
                Numbers in it.
        """

    @abstractmethod
    def encode(self, values: torch.Tensor, rows: torch.Tensor, scratch: torch.Tensor) -> None:
        """
        Turns numbers into bytes.

        Args:
            values (`torch.Tensor`):
                fp32 or float64, of shape `(R, N)`, contiguous. Left as they are.
            rows (`torch.Tensor`):
                uint8, of shape `(R, row_bytes(N))`, contiguous; written in place.
            scratch (`torch.Tensor`):
                Of the shape and dtype of `values`; its content is lost.
        """

    @abstractmethod
    def decode(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """
        Turns bytes into numbers.

        Args:
            rows (`torch.Tensor`):
                From [`~Codec.encode`].
            values (`torch.Tensor`):
                fp32 or float64, of shape `(R, N)`, contiguous; written in place.
        """


class BFloat16Codec(Codec):
    """Each number rounded to bfloat16: half the bytes, fp32's range, and an error of at most 2^-8 of the number."""

    def row_bytes(self, numel: int) -> int:
        """See [`Codec`]."""
        return 2 * numel

    def encode(self, values: torch.Tensor, rows: torch.Tensor, scratch: torch.Tensor) -> None:
        """See [`Codec`]."""
        rows.view(torch.bfloat16).copy_(values)

    def decode(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """See [`Codec`]."""
        values.copy_(rows.view(torch.bfloat16))


class BlockCodec(Codec):
    """
    Integers of a few bits with a scale in bfloat16 for each block of consecutive numbers, the largest magnitude of the
    block over the largest integer: `code = round(value / scale)`, symmetric, so that 0 stays 0.

    The error of a number is at most half a scale. Blocks of zeros, and those whose scale would be denormal, are decoded as
    zeros. A block with a number that is not finite is decoded as NaN, so that it does not pass for an average.

    A row holds its scales and then its codes. Of 4 bits two codes share a byte: number `i` of the row is in the low, number
    `N / 2 + i` in the high half. Torch's own types of less than a byte have no arithmetic, and what packs them is for the
    weights of single layers, so shifts do it.

    Args:
        bits (`int`):
            8 or 4.
        block (`int`):
            Numbers that share a scale, even.
    """

    feeds_back = True

    def __init__(self, bits: int, block: int) -> None:
        self.bits = bits
        self.granule = block
        self.levels = 2 ** (bits - 1) - 1
        # The largest scale of which the largest code is a finite fp32 number: rounding a scale may have raised it.
        most = torch.tensor(torch.finfo(torch.float32).max / self.levels).to(_SCALE)
        if float(most) * self.levels > torch.finfo(torch.float32).max:
            most = torch.nextafter(most, torch.zeros_like(most))
        self._most = float(most)

    def row_bytes(self, numel: int) -> int:
        """See [`Codec`]."""
        return numel // self.granule * _SCALE.itemsize + numel * self.bits // 8

    def encode(self, values: torch.Tensor, rows: torch.Tensor, scratch: torch.Tensor) -> None:
        """See [`Codec`]."""
        blocks, quotients = values.unflatten(-1, (-1, self.granule)), scratch.unflatten(-1, (-1, self.granule))
        largest = torch.abs(blocks, out=quotients).amax(-1)
        scales = (largest / self.levels).clamp_(max=self._most).to(_SCALE)
        scales.masked_fill_(scales < _LEAST_SCALE, 0.0)
        # Also where a comparison with NaN is false, and for a float64 number beyond fp32.
        scales.masked_fill_(~(largest <= torch.finfo(torch.float32).max), torch.nan)
        held, codes = self._parts(rows)
        held.copy_(scales)
        # What is divided by 1 rounds to 0, or belongs to a NaN, of which any code will do.
        divisors = torch.where(scales > 0, scales, 1.0).to(values.dtype).unsqueeze(-1)
        torch.div(blocks, divisors, out=quotients).round_().clamp_(-self.levels, self.levels)
        if self.bits == 8:
            codes.view(torch.int8).copy_(scratch)
        else:
            halves = scratch.add_(self.levels).to(torch.uint8)
            low, high = halves.chunk(2, dim=-1)
            torch.bitwise_or(low, high.bitwise_left_shift_(4), out=codes)

    def decode(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """See [`Codec`]."""
        scales, codes = self._parts(rows)
        if self.bits == 8:
            values.copy_(codes.view(torch.int8))
        else:
            low, high = values.chunk(2, dim=-1)
            low.copy_(codes & 15)
            high.copy_(codes >> 4)
            values.sub_(self.levels)
        values.unflatten(-1, (-1, self.granule)).mul_(scales.to(values.dtype).unsqueeze(-1))

    def _parts(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales and the bytes of the codes, as views."""
        num_scales = rows.shape[-1] // (_SCALE.itemsize + self.granule * self.bits // 8)
        at = num_scales * _SCALE.itemsize
        return rows[:, :at].view(_SCALE), rows[:, at:]


# 8.25 and 4.5 bits a number.
_CODECS: dict[str, Codec] = {"bf16": BFloat16Codec(), "int8": BlockCodec(8, 64), "int4": BlockCodec(4, 32)}


def find_codec(wire_format: str) -> Codec | None:
    """
    What turns numbers into bytes of a format.

    Args:
        wire_format (`str`):
            One of `WIRE_FORMATS`.

    Returns:
        [`Codec`] or `None`: `None` for `"fp32"`, which is sent as it is.
    """
    return _CODECS.get(wire_format)
