"""Bytes that collectives move."""

from __future__ import annotations

from labkit.errors import UsageError


def ring_all_reduce_bytes(size_bytes: int, world_size: int) -> float:
    """Bytes that each rank sends to sum a vector over all ranks in a ring: 2(n-1)/n of it.

    Args:
        size_bytes: Of the vector, S.
        world_size: Ranks, n.

    Raises:
        UsageError: A size or number of ranks that can't be.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", section 3.

    >>> ring_all_reduce_bytes(100, 4)
    150.0
    >>> ring_all_reduce_bytes(100, 1)
    0.0
    """
    if size_bytes < 0 or world_size < 1:
        raise UsageError(
            f"size_bytes={size_bytes}, world_size={world_size}: sizes start at 0, worlds at 1.", try_="world_size=2"
        )
    return 2 * (world_size - 1) / world_size * size_bytes
