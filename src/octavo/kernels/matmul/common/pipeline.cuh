// The ring of shared-memory stages between the producer and the consumers.
#pragma once
#include "common/ptx.cuh"

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

template <int STAGES>
struct RingBarriers {
  uint64 full[STAGES];   // completed by the bytes of a stage's loads
  uint64 empty[STAGES];  // completed by the consumers' releases

  // One thread calls this; the caller synchronises the CTA (or cluster) afterwards.
  DEVICE void init(int full_arrivals, int empty_arrivals) {
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(&full[stage], full_arrivals);
      mbarrier_init(&empty[stage], empty_arrivals);
    }
    fence_mbarrier_init();
  }
};

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
