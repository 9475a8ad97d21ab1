"""How a kernel spreads over a block: warps, and the shared memory each of them holds."""

from __future__ import annotations

from dataclasses import dataclass

from tile_ep.layout import align, ceil_div


@dataclass(frozen=True)
class BlockShape:
    """Shape of a block.

    Attributes:
        num_warps: warps of a block.
        chunk_bytes: bytes of a row in shared memory at a time, a multiple of 16.
        depth: chunks that a warp holds.
    """

    num_warps: int
    chunk_bytes: int
    depth: int


@dataclass(frozen=True)
class Tuning:
    """Limits within which shapes are chosen for one kind of device.

    Attributes:
        dispatch_warps, combine_warps: warps of a block, at most.
        dispatch_chunk, combine_chunk: bytes of a chunk, at most.
        dispatch_depth, combine_depth: chunks per warp.
        shared_bytes: dynamic shared memory of a block, at most.
        default_sms: blocks of a collective unless the call says otherwise.
    """

    dispatch_warps: int
    dispatch_chunk: int
    dispatch_depth: int
    combine_warps: int
    combine_chunk: int
    combine_depth: int
    shared_bytes: int
    default_sms: int

    def dispatch_shape(self, row_bytes: int) -> BlockShape:
        """Shape for scattering rows of `row_bytes`."""
        return self._shape(row_bytes, self.dispatch_warps, self.dispatch_chunk, self.dispatch_depth)

    def combine_shape(self, row_bytes: int) -> BlockShape:
        """Shape for pulling rows of `row_bytes`."""
        return self._shape(row_bytes, self.combine_warps, self.combine_chunk, self.combine_depth)

    def _shape(self, row_bytes: int, most_warps: int, most: int, depth: int) -> BlockShape:
        # Equal chunks of whole 16-byte units, of which a warp moves 32 at a time.
        chunk = align(ceil_div(row_bytes, ceil_div(row_bytes, most)), 16)
        if chunk > 512 and row_bytes % align(chunk, 512) == 0:
            chunk = align(chunk, 512)
        warps = min(most_warps, self.shared_bytes // (depth * align(chunk, 128)))
        return BlockShape(max(1, warps), chunk, depth)


HOPPER = Tuning(
    dispatch_warps=8,
    dispatch_chunk=7168,
    dispatch_depth=2,
    combine_warps=14,
    combine_chunk=3584,
    combine_depth=4,
    shared_bytes=224 * 1024 - 24 * 1024,
    default_sms=16,
)
SIMULATOR = Tuning(
    dispatch_warps=2,
    dispatch_chunk=96,
    dispatch_depth=2,
    combine_warps=2,
    combine_chunk=64,
    combine_depth=3,
    shared_bytes=48 * 1024,
    default_sms=2,
)
