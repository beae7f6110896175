"""Whether a lossy wire format is worth it: what it sends, padding included, against fp32."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from .averaging import ModelAverager
from .exchange_plan import plan_exchange


logger = logging.getLogger(__name__)


def round_bytes(averager: ModelAverager, fragments: Sequence[Collection[str] | None], wire_format: str) -> int:
    """
    Bytes of parameters that this rank sends over the slow tier in one round. Without communication; the model is resharded.

    Args:
        averager ([`ModelAverager`]):
            Of the model.
        fragments (`Sequence`):
            Names of the parameters of each fragment; `None` stands for all.
        wire_format (`str`):
            How they cross.
    """
    shards = averager.trained.averaged_shards()
    size = averager.config.bucket_size_bytes
    parts = [{name: shard for name, shard in shards.items() if names is None or name in names} for names in fragments]
    return sum(plan_exchange(part, averager.mesh, size, wire_format).slow_bytes() for part in parts)


def warn_of_padding(averager: ModelAverager, fragments: Sequence[Collection[str] | None]) -> None:
    """
    Says so where a lossy format saves nothing: what it sends is padded to a block for each group and replica, the last bucket
    of each fragment once, and of a small model or a few adapters that is more than the model.

    Args:
        averager ([`ModelAverager`]):
            Of the model, resharded.
        fragments (`Sequence`):
            Names of the parameters of each fragment; `None` stands for all.
    """
    config, layout = averager.config, averager.mesh.layout
    if config.wire_format == "fp32" or layout.num_groups == 1 or not averager.mesh.is_main:
        return
    ours, plain = (round_bytes(averager, fragments, name) for name in (config.wire_format, "fp32"))
    if 0 < plain <= ours:
        cut = f", in each of num_fragments={len(fragments)}" if len(fragments) > 1 else ""
        logger.warning(
            "wire_format=%r saves nothing here: a rank sends %d bytes in a round, and would send %d in fp32. The last "
            "bucket%s is padded to a block for each of %d groups and %d replicas. Use wire_format='fp32'%s.",
            config.wire_format,
            ours,
            plain,
            cut,
            layout.num_groups,
            layout.replicate_size,
            ", or fewer fragments" if len(fragments) > 1 else "",
        )
