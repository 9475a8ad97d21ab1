"""How a kernel spreads over a block: warps, and the shared memory each of them holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tile_ep.layout import align, ceil_div


@dataclass(frozen=True)
class BlockShape:
    """Shape of a block, or the most that it may be.

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
        dispatch, expanded, combine: of blocks that scatter rows to ranks, rows to experts, or pull rows.
        shared_bytes: dynamic shared memory of a block, at most.
        default_sms: blocks of a collective unless the call says otherwise.
        by_warp: dispatch copies rows by the warp, once for each destination, not by the copy engine.
        pushes: combine pushes rows to the rank that sums them, which otherwise pulls them. The same on all ranks.
        few: most entries of topk_idx that every block of a dispatch counts for itself, which spares the blocks waiting for each
            other; where there are more, each counts its share.
        combine_few: of blocks that pull the rows of so few tokens: all of a chunk's sources are under way at a time, and more
            warps get a chunk.
        cluster: blocks of a cluster where a collective runs beside the caller's work. A matrix product comes in clusters, too,
            which find no room where single blocks have taken one SM of each pair.
    """

    dispatch: BlockShape
    expanded: BlockShape
    combine: BlockShape
    combine_few: BlockShape
    shared_bytes: int
    default_sms: int
    by_warp: bool = False
    pushes: bool = False
    few: int = 0
    cluster: int = 1

    def shape(self, most: BlockShape, row_bytes: int) -> BlockShape:
        """The shape within `most` for rows of `row_bytes`: equal chunks of whole 16-byte units, of which a warp moves 32 at a
        time, and as many warps as find room.
        """
        chunk = align(ceil_div(row_bytes, ceil_div(row_bytes, most.chunk_bytes)), 16)
        if chunk > 512 and row_bytes % align(chunk, 512) == 0:
            chunk = align(chunk, 512)
        warps = min(most.num_warps, self.shared_bytes // (most.depth * align(chunk, 128)))
        return BlockShape(max(1, warps), chunk, most.depth)


HOPPER = Tuning(
    dispatch=BlockShape(8, 7168, 2),
    expanded=BlockShape(8, 7168, 2),
    combine=BlockShape(16, 7168, 3),
    combine_few=BlockShape(12, 2048, 8),
    shared_bytes=216 * 1024,
    default_sms=16,
    few=1024,
    cluster=2,
)
SIMULATOR = Tuning(
    dispatch=BlockShape(2, 96, 2),
    expanded=BlockShape(2, 96, 2),
    combine=BlockShape(2, 64, 3),
    combine_few=BlockShape(2, 32, 4),
    shared_bytes=48 * 1024,
    default_sms=2,
    few=1024,
)
CLASSIC = replace(HOPPER, dispatch=BlockShape(16, 7168, 2), by_warp=True, pushes=True)
"""For comparison, how exchanges have long been built: a warp copies a row once for each destination, and expert outputs are
stored back to where the token came from, to be summed there.
"""
