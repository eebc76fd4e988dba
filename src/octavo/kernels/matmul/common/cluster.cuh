// Persistent clusters whose CTAs share B by multicast: what a producer and a consumer do for one tile.
//
// A cluster owns CLUSTER tiles of C below each other. All need the same B, so each CTA loads a share of
// its rows for everyone; a stage may be overwritten only when the consumers of all CTAs have released it.
#pragma once
#include "common/epilogue.cuh"
#include "common/pipeline.cuh"

template <int CLUSTER>
struct ClusterWork {
  const int rank = cluster_cta_rank();
  const int first = blockIdx.x / CLUSTER;    // the cluster's first entry in the order of tiles
  const int clusters = gridDim.x / CLUSTER;  // and the distance to the next

  // The first of `block_m` rows of this CTA's tile.
  DEVICE int row(Tile tile, int block_m) const {
    return (tile.m * CLUSTER + rank) * block_m;
  }
};

// Afterwards the peer's barriers exist, so that loads and releases may arrive there.
template <int CLUSTER, class Shared>
DEVICE void init_cluster_ring(Shared& shared) {
  init_ring(shared.full, shared.empty, 1, 2 * CLUSTER);
  cluster_sync();
}

// All K blocks of one tile, the `index`-th of the order. BACK_AND_FORTH: from the last to the first in
// every second round, which is the same for all clusters.
template <bool BACK_AND_FORTH, int CLUSTER, class Shared>
DEVICE void produce_tile(Shared& shared, Ring<Shared::STAGES>& ring, const GemmArgs& args,
                         const ClusterWork<CLUSTER>& work, int index, Tile tile, int blocks_k) {
  constexpr int SHARE = Shared::N / CLUSTER;  // rows of B that this CTA loads for all
  const int row = work.row(tile, Shared::M);
  const int col = tile.n * Shared::N + work.rank * SHARE;
  const bool backwards = BACK_AND_FORTH && index / work.clusters % 2;
  for (int block = 0; block < blocks_k; ++block, ring.advance()) {
    const int k = (backwards ? blocks_k - 1 - block : block) * Shared::K;
    mbarrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
    uint64* full = &shared.full[ring.stage];
    mbarrier_arrive_expect_tx(full, sizeof(shared.a[0]) + sizeof(shared.b[0]));
    tma_load(shared.a[ring.stage], &args.a, full, k, row);
    tma_load_multicast(shared.b[ring.stage] + work.rank * SHARE * Shared::K, &args.b, full, k, col,
                       (1 << CLUSTER) - 1);
  }
}

// One thread for each CTA of the cluster tells it that this warpgroup no longer reads the stage.
template <int CLUSTER, class Shared>
DEVICE void release_stage(Shared& shared, int stage) {
  if (threadIdx.x % 128 < CLUSTER) {
    mbarrier_arrive_cluster(&shared.empty[stage], threadIdx.x % 128);
  }
}

// A consumer's walk along K with one group of wgmmas in flight: a stage is released when the next one's
// group has been issued, so the tensor cores have work while the warpgroup waits.
template <int CLUSTER, class Shared>
DEVICE void multiply_tile(float (&d)[Shared::N / 2], Shared& shared, Ring<Shared::STAGES>& ring,
                          int half, int blocks_k) {
  int last = 0;  // the stage whose wgmmas may still be running
  for (int block = 0; block < blocks_k; ++block, ring.advance()) {
    mbarrier_wait(&shared.full[ring.stage], ring.phase);
    start_stage(d, shared, ring.stage, half, block > 0);
    wgmma_wait<1>();
    if (block > 0) release_stage<CLUSTER>(shared, last);
    last = ring.stage;
  }
  wgmma_wait<0>();
  release_stage<CLUSTER>(shared, last);
}

// start_stage with uniform descriptors, once the stage is full. Stages are equally far apart, 8 elements to
// each 16-byte unit of a descriptor. The shuffles come before the wait, which hides them.
template <class Shared>
DEVICE void start_full_stage_uniform(float (&d)[Shared::N / 2], Shared& shared, int stage,
                                     uint32 phase, int half, int accumulate) {
  const uint32 low_a = descriptor_low(shared.a[0] + half * 64 * Shared::K);
  const uint32 low_b = descriptor_low(shared.b[0]);
  const uint32 a = uniform_word(low_a + stage * (Shared::M * Shared::K / 8));
  const uint32 b = uniform_word(low_b + stage * (Shared::N * Shared::K / 8));
  mbarrier_wait(&shared.full[stage], phase);
  wgmma_fence();
  wgmma_stage_uniform<Shared::N>(d, a, b, accumulate);
  wgmma_commit();
}

// multiply_tile, and in the gaps of the first K blocks the deferred tile is stored, one chunk in every
// SPACING blocks; at once where K is too short for that. What is left of K runs in whole rounds of the ring,
// with all addresses known at compile time. LEAN: descriptors in uniform registers.
template <int CLUSTER, int SPACING, bool LEAN, class Shared>
DEVICE void multiply_tile_storing(float (&d)[Shared::N / 2], Shared& shared,
                                  Ring<Shared::STAGES>& ring, int half, int blocks_k,
                                  DeferredTile<Shared::N>& deferred) {
  constexpr int CHUNKS = Shared::N / CHUNK_COLS, STAGES = Shared::STAGES;
  int last = 0;  // the stage whose wgmmas may still be running
  int block = 0;
  const auto start_block = [&](int stage) {
    if constexpr (LEAN) {
      start_full_stage_uniform(d, shared, stage, ring.phase, half, block > 0);
    } else {
      mbarrier_wait(&shared.full[stage], ring.phase);
      start_stage(d, shared, stage, half, block > 0);
    }
  };
  const auto finish_block = [&] {
    wgmma_wait<1>();
    if (block > 0) release_stage<CLUSTER>(shared, last);
    last = ring.stage;
    ring.advance();
  };
  if (deferred.waiting && blocks_k > SPACING * CHUNKS) {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      start_block(ring.stage);
      deferred.store(chunk);  // of the last tile, while the tensor cores work on this one
      finish_block();
#pragma unroll 1
      for (++block; block % SPACING; ++block) {
        start_block(ring.stage);
        finish_block();
      }
    }
    deferred.waiting = false;
  } else {
    deferred.store_all();
  }
#pragma unroll 1
  for (; ring.stage && block < blocks_k; ++block) {  // the last tile may have ended amid a round
    start_block(ring.stage);
    finish_block();
  }
#pragma unroll 1
  for (; block + STAGES <= blocks_k; ring.phase ^= 1) {
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage, ++block) {
      start_block(stage);
      wgmma_wait<1>();
      if (block > 0) release_stage<CLUSTER>(shared, (stage + STAGES - 1) % STAGES);
    }
    last = STAGES - 1;
  }
#pragma unroll 1
  for (; block < blocks_k; ++block) {
    start_block(ring.stage);
    finish_block();
  }
  wgmma_wait<0>();
  release_stage<CLUSTER>(shared, last);
}

// All that a consumer warpgroup does whose stores are deferred.
template <int CLUSTER, int SPACING, bool LEAN = false, class Shared>
DEVICE void consume_tiles(Shared& shared, const GemmArgs& args, const ClusterWork<CLUSTER>& work,
                          int tiles, int blocks_k) {
  const int half = threadIdx.x / 128 - 1;
  Ring<Shared::STAGES> ring;
  DeferredTile<Shared::N> deferred(args.c, shared.c[half], 1 + half);
  for (int index = work.first; index < tiles; index += work.clusters) {
    const Tile tile = unpack_tile(args.order[index]);
    float accumulators[Shared::N / 2];
    // This tile's product, and in its gaps the store of the last tile, if one is deferred.
    multiply_tile_storing<CLUSTER, SPACING, LEAN>(accumulators, shared, ring, half, blocks_k,
                                                  deferred);
    const int row = work.row(tile, Shared::M) + half * 64;
    if (args.tma_store) {
      deferred.take(accumulators, row, tile.n * Shared::N);
    } else {
      store_registers<Shared::N>(accumulators, args, row, tile.n * Shared::N);
    }
  }
  deferred.store_all();
  if (threadIdx.x % 128 == 0) tma_store_wait_all();
}
