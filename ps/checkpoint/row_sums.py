"""A checksum of rows of which a part does not depend on how they are spread over partitions.

Each row has a hash of 64 bits. The upper 31 bits of a partition's checksum are the sum of what these hashes begin with,
modulo 2³¹: the sums of all partitions add up to one that any other partitioning of the same rows has too. The lower 32
bits are a CRC over the hashes in their order.
"""

from __future__ import annotations

from collections.abc import Iterable

#: Bits of the sum, and how far a hash is shifted to the right for it.
SUM_BITS, SUM_SHIFT = 31, 33
_CRC_BITS = 32


def checksum_of(total: int, crc: int) -> int:
    """The checksum of rows whose hashes' first 31 bits add up to ``total``: at least 0, below 2⁶³."""
    return (total % (1 << SUM_BITS)) << _CRC_BITS | crc


def sum_of(checksums: Iterable[int]) -> int:
    """The sum over the rows that these checksums are of, modulo 2³¹."""
    return sum(checksum >> _CRC_BITS for checksum in checksums) % (1 << SUM_BITS)
