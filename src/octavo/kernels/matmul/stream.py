"""Owns the sharing out of K blocks among clusters (Stream-K): what the host decides, and a twin of
StreamSchedule in common/stream_k.cuh. Knows nothing of torch or of a device.
"""

from __future__ import annotations

from octavo.kernels.matmul.quantization import ceil_div

# What handing over a partial sum costs a CTA, in K blocks of tensor-core time; see docs/log.md.
COST_BLOCKS = 4
Piece = tuple[int, int, int]  # tile, first K block, one past the last


def streamed_tiles(tiles: int, blocks: int, clusters: int) -> int:
    """How many tiles of `blocks` K blocks to share out among `clusters`; 0 where it would not pay.

    Between one and two rounds of tiles, so that each cluster's run is longer than a tile and no tile
    meets more than two clusters. It pays when the K blocks that it saves the busiest cluster
    outweigh moving a partial sum.
    """
    if tiles <= clusters or tiles % clusters == 0:
        return 0
    saved = ceil_div(tiles, clusters) * blocks - tiles * blocks / clusters
    streamed = tiles - (tiles // clusters - 1) * clusters
    fits = streamed * blocks * clusters < 2**31  # the device computes in 32 bits
    return streamed if saved > COST_BLOCKS and fits else 0


def stream_pieces(
    tiles: int, blocks: int, clusters: int, streamed: int, cluster: int
) -> list[Piece]:
    """What one cluster works on, in order. The first `streamed` tiles are one line of K blocks of
    which each cluster has an equal run; the others are whole, one a round.
    """
    pieces: list[Piece] = []
    at = streamed * blocks * cluster // clusters
    last = streamed * blocks * (cluster + 1) // clusters
    head_slot = cluster % max((tiles - streamed) // clusters, 1)
    whole = 0
    while True:
        if at < last:
            tile, begin = divmod(at, blocks)
            end = min(blocks, begin + last - at)
            if end == blocks or whole == head_slot:
                at += end - begin
                pieces.append((tile, begin, end))
                continue
        tile = streamed + cluster + whole * clusters
        if tile >= tiles:
            return pieces
        whole += 1
        pieces.append((tile, 0, blocks))
