// The ring of shared-memory stages between the producer and the consumers, and who works on which tile.
#pragma once
#include "common/wgmma.cuh"

// The operand tiles of every stage. A rung's `Shared` adds its staging and two arrays of barriers: full[stage]
// is completed by the bytes of the stage's loads, empty[stage] by the consumers' releases.
template <int TILE_M, int TILE_N, int TILE_K, int STAGE_COUNT>
struct Operands {
  enum { M = TILE_M, N = TILE_N, K = TILE_K, STAGES = STAGE_COUNT };
  bf16 a[STAGES][M * K];
  bf16 b[STAGES][N * K];
};

// Where a role stands in the ring. Producer and consumers each walk their own copy; the phase flips
// at every wrap, so a barrier's parity tells this round from the last.
template <int STAGES>
struct Ring {
  int stage = 0;
  uint32 phase = 0;

  DEVICE void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// One thread makes the barriers of an empty ring; the caller synchronises the CTA or cluster afterwards.
template <int STAGES>
DEVICE void init_ring(uint64 (&full)[STAGES], uint64 (&empty)[STAGES], int full_arrivals,
                      int empty_arrivals) {
  if (threadIdx.x != 0) return;
  for (int stage = 0; stage < STAGES; ++stage) {
    mbarrier_init(&full[stage], full_arrivals);
    mbarrier_init(&empty[stage], empty_arrivals);
  }
  fence_mbarrier_init();
}

// Without a ring: asks for one stage and waits for it, so every byte's latency is exposed.
template <class Shared>
DEVICE void load_and_wait(Shared& shared, const GemmArgs& args, int k, int row, int col,
                          uint32 phase) {
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(&shared.loaded, sizeof(shared.a) + sizeof(shared.b));
    tma_load(shared.a, &args.a, &shared.loaded, k, row);
    tma_load(shared.b, &args.b, &shared.loaded, k, col);
  }
  mbarrier_wait(&shared.loaded, phase);
}

// The producer's part of one K block: once the stage is empty, its full barrier is told how many bytes
// to expect, and the TMA unit is asked for both tiles.
template <class Shared>
DEVICE void load_stage(Shared& shared, const Ring<Shared::STAGES>& ring, const GemmArgs& args,
                       int block, int row, int col) {
  mbarrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
  uint64* full = &shared.full[ring.stage];
  mbarrier_arrive_expect_tx(full, sizeof(shared.a[0]) + sizeof(shared.b[0]));
  tma_load(shared.a[ring.stage], &args.a, full, block * Shared::K, row);
  tma_load(shared.b[ring.stage], &args.b, full, block * Shared::K, col);
}

// A consumer warpgroup's part: its 64 rows of a stage that is full, as one group of wgmmas. `half` says
// which rows; `accumulate` 0 overwrites the accumulators. The caller waits and releases the stage.
template <class Shared>
DEVICE void start_stage(float (&d)[Shared::N / 2], Shared& shared, int stage, int half,
                        int accumulate = 1) {
  wgmma_fence();
  wgmma_stage<Shared::N>(d, shared.a[stage] + half * 64 * Shared::K, shared.b[stage], accumulate);
  wgmma_commit();
}

DEVICE int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

struct Tile {
  int m, n;  // in tiles, not elements
};

// Visiting order with reuse in the L2: down `GROUP` rows of tiles, then one column on. What runs at
// the same time then covers a near-square patch of C. Twin: schedule.py, grouped.
template <int GROUP>
DEVICE Tile grouped_tile(int index, int tiles_m, int tiles_n) {
  const int group = index / (GROUP * tiles_n);
  const int first_m = group * GROUP;
  const int rows = min(GROUP, tiles_m - first_m);
  const int within = index - group * GROUP * tiles_n;
  return {first_m + within % rows, within / rows};
}

// The host's order tables pack a tile as m << 16 | n.
DEVICE Tile unpack_tile(int packed) {
  return {packed >> 16, packed & 0xFFFF};
}
