"""Lossy formats: what comes out of the bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_fedshard.wire import WIRE_FORMATS, Codec, find_codec
from tests.harness.wire_reference import BLOCKS, through_wire


LOSSY = WIRE_FORMATS[1:]


def codec_of(wire_format: str) -> Codec:
    codec = find_codec(wire_format)
    assert codec is not None
    return codec


def there_and_back(values: torch.Tensor, wire_format: str) -> torch.Tensor:
    """Rows of numbers, through bytes."""
    codec = codec_of(wire_format)
    before, scratch, out = values.clone(), torch.full_like(values, torch.nan), torch.full_like(values, torch.nan)
    rows = torch.zeros(values.shape[0], codec.row_bytes(values.shape[1]), dtype=torch.uint8)
    codec.encode(values, rows, scratch)
    torch.testing.assert_close(values, before, rtol=0, atol=0, equal_nan=True)
    codec.decode(rows, out)
    return out


@settings(deadline=None, max_examples=60)
@given(
    wire_format=st.sampled_from(LOSSY),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 99),
)
def test_error_and_reference(
    wire_format: str, dtype: torch.dtype, shape: tuple[int, int], exponent: int, seed: int
) -> None:
    codec, generator = codec_of(wire_format), torch.Generator().manual_seed(seed)
    # Blocks of unlike sizes, some elements of them 0.
    values = torch.randn(shape[0], shape[1] * 64, generator=generator, dtype=dtype) * 10.0**exponent
    values *= 10.0 ** torch.randint(-3, 4, (shape[0], 1), generator=generator)
    values[torch.rand(values.shape, generator=generator) < 0.2] = 0
    out = there_and_back(values, wire_format)
    assert torch.equal(out, torch.stack([through_wire(row, wire_format) for row in values]))
    assert (out[values == 0] == 0).all()
    error = (out - values).abs()
    if wire_format == "bf16":
        assert (error <= 2.0**-8 * values.abs()).all()
        return
    bits, block = BLOCKS[wire_format]
    largest = values.unflatten(1, (-1, block)).abs().amax(-1, keepdim=True)
    # Half a scale, which rounding to bfloat16 may have raised by 2^-8.
    bound = largest / (2 ** (bits - 1) - 1) / 2 * (1 + 2.0**-8)
    assert (error.unflatten(1, (-1, block)) <= bound * (1 + 1e-6)).all()
    assert codec.granule == block


@pytest.mark.parametrize("wire_format", LOSSY)
def test_extremes(wire_format: str) -> None:
    """Zeros, denormals, the largest numbers, infinity and NaN, each in blocks of its own."""
    most = torch.finfo(torch.float32).max
    values = torch.zeros(6, 64)
    values[1, :3] = torch.tensor([1e-45, -1e-39, 3e-38])
    values[2, :3] = torch.tensor([most * 0.99, -most * 0.99, 1.0])
    values[3, 1], values[4, 2] = torch.inf, torch.nan
    values[5, :2] = torch.tensor([1e30, 1e-30])
    out = there_and_back(values, wire_format)
    assert (out[0] == 0).all()
    assert torch.isfinite(out[[1, 2, 5]]).all()
    assert (out[1] - values[1]).abs().max() < 4e-38
    torch.testing.assert_close(out[2, :2], values[2, :2], rtol=0.01, atol=0)
    torch.testing.assert_close(out[5, 0], values[5, 0], rtol=0.01, atol=0)
    # What is not finite never passes for a number, and spoils its own block alone.
    assert not torch.isfinite(out[3, 1]) and torch.isnan(out[4, 2])
    if wire_format != "bf16":
        block = BLOCKS[wire_format][1]
        assert torch.isnan(out[3:5, :block]).all()
        assert (out[3:5, block:] == 0).all()
        exact = torch.full((1, 64), most)
        assert torch.isfinite(there_and_back(exact, wire_format)).all()
        assert torch.isnan(there_and_back(torch.full((1, 64), 1e300, dtype=torch.float64), wire_format)).all()


def test_codes_use_their_range() -> None:
    """The largest magnitude of a block comes out within the rounding of its scale, with either sign."""
    for wire_format in BLOCKS:
        values = torch.linspace(-1, 1, 64).repeat(1, 2)
        out = there_and_back(values, wire_format)
        torch.testing.assert_close(out[0, [0, 63]], values[0, [0, 63]], rtol=2.0**-8, atol=0)


def test_bytes() -> None:
    assert find_codec("fp32") is None
    bits = {name: 8 * codec_of(name).row_bytes(64 * 10) / 640 for name in LOSSY}
    assert bits == {"bf16": 16, "int8": 8.25, "int4": 4.5}
