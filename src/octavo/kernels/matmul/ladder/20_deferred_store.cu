// 20 Deferred store
//
// Problem:   C[M,N] = A[M,K] B[N,K]^T, bf16 in and out, fp32 accumulate, any M and N, K a multiple of 8.
// Idea:      A finished tile is rounded to bf16 into 64 registers, which frees the accumulators at once: the
//            next tile's wgmmas start, and between them the old tile is staged and stored, one 8 KB chunk
//            in every fourth K block. Two chunks of staging a warpgroup instead of a whole tile
//            also leave room for a fourth stage.
// Limiter:   Power: tensor cores are active 99.1% of the cycles (ncu), at the clock that 700 W allow.
// Predicted: 1% over rung 19: about 2,000 idle cycles less for each of a CTA's tiles.
// Measured:  820 TFLOP/s at 4096^3, 832 TFLOP/s at 8192^3; 1.01, 1.03 x cuBLAS, cool; H200, a3c9891.
// PTX:       cp.async.bulk.wait_group.read with one group pending.
#include "common/epilogue.cuh"
#include "common/pipeline.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 256;
constexpr int BLOCK_K = 64;
constexpr int STAGES = 4;
constexpr int THREADS = 384;
constexpr int CLUSTER = 2;
constexpr int B_BOX_ROWS = BLOCK_N / CLUSTER;
constexpr int HILBERT = 1;
constexpr int CHUNKS = BLOCK_N / 64;
constexpr int SPACING = 4;  // K blocks from one chunk's store to the next
constexpr int PERSISTENT = 1;
constexpr int SMEM_BYTES = STAGES * (BLOCK_M + BLOCK_N) * BLOCK_K * 2 + 4 * 64 * 64 * 2 + 1024;

struct Shared {
  bf16 a[STAGES][BLOCK_M * BLOCK_K];
  bf16 b[STAGES][BLOCK_N * BLOCK_K];
  bf16 c[2][2][CHUNK_ELEMENTS];  // two chunks in turn for each consumer
  RingBarriers<STAGES> ring;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    deferred_store(const __grid_constant__ GemmArgs args) {
  extern __shared__ __align__(1024) unsigned char smem[];
  static_assert(sizeof(Shared) <= SMEM_BYTES, "host and device disagree");
  Shared& shared = *reinterpret_cast<Shared*>(smem);
  // A cluster owns CLUSTER tiles below each other; the host lists them in Hilbert order.
  const int tiles = ceil_div(args.m, BLOCK_M * CLUSTER) * ceil_div(args.n, BLOCK_N);
  const int blocks_k = ceil_div(args.k, BLOCK_K);
  const int rank = cluster_cta_rank();
  const int first = blockIdx.x / CLUSTER;
  const int clusters = gridDim.x / CLUSTER;
  if (threadIdx.x == 0) shared.ring.init(1, 2 * CLUSTER);
  cluster_sync();  // the peer's barriers exist before anything arrives there

  Ring<STAGES> ring;
  if (threadIdx.x < 128) {
    setmaxnreg_dec<40>();
    if (threadIdx.x == 0) {
      for (int index = first; index < tiles; index += clusters) {
        const Tile tile = unpack_tile(args.order[index]);
        const int row = (tile.m * CLUSTER + rank) * BLOCK_M;
        const int col = tile.n * BLOCK_N + rank * B_BOX_ROWS;
        const bool backwards = index / clusters % 2;  // the same for all clusters of a round
        for (int block = 0; block < blocks_k; ++block, ring.advance()) {
          const int k = (backwards ? blocks_k - 1 - block : block) * BLOCK_K;
          mbarrier_wait(&shared.ring.empty[ring.stage], ring.phase ^ 1);
          uint64* full = &shared.ring.full[ring.stage];
          mbarrier_arrive_expect_tx(full, sizeof(shared.a[0]) + sizeof(shared.b[0]));
          tma_load(shared.a[ring.stage], &args.a, full, k, row);
          tma_load_multicast(shared.b[ring.stage] + rank * B_BOX_ROWS * BLOCK_K, &args.b, full, k,
                             col, (1 << CLUSTER) - 1);
        }
      }
    }
  } else {
    setmaxnreg_inc<232>();
    const int half = threadIdx.x / 128 - 1;
    DeferredTile<BLOCK_N> deferred(args.c, shared.c[half], 1 + half);
    for (int index = first; index < tiles; index += clusters) {
      const Tile tile = unpack_tile(args.order[index]);
      float accumulators[BLOCK_N / 2];
      int last = 0;  // the stage whose wgmma may still be running
      int block = 0;
      const auto start_block = [&] {
        mbarrier_wait(&shared.ring.full[ring.stage], ring.phase);
        wgmma_fence();
        wgmma_stage<BLOCK_N>(accumulators, shared.a[ring.stage] + half * 64 * BLOCK_K,
                             shared.b[ring.stage], block > 0);
        wgmma_commit();
      };
      const auto release_last = [&] {
        if (threadIdx.x % 128 < CLUSTER) {
          mbarrier_arrive_cluster(&shared.ring.empty[last], threadIdx.x % 128);
        }
      };
      const auto finish_block = [&] {
        wgmma_wait<1>();
        if (block > 0) release_last();
        last = ring.stage;
        ring.advance();
      };
      if (deferred.waiting && blocks_k > SPACING * CHUNKS) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
          start_block();
          deferred.store(chunk);  // of the last tile, while the tensor cores work on this one
          finish_block();
#pragma unroll 1
          for (++block; block % SPACING; ++block) {
            start_block();
            finish_block();
          }
        }
        deferred.waiting = false;
      } else {
        deferred.store_all();
      }
      for (; block < blocks_k; ++block) {
        start_block();
        finish_block();
      }
      wgmma_wait<0>();
      release_last();
      const int row = (tile.m * CLUSTER + rank) * BLOCK_M + half * 64;
      if (args.tma_store) {
        deferred.take(accumulators, row, tile.n * BLOCK_N);
      } else {
        store_registers<BLOCK_N>(accumulators, args, row, tile.n * BLOCK_N);
      }
    }
    deferred.store_all();
    if (threadIdx.x % 128 == 0) tma_store_wait_all();
  }
  cluster_sync();  // no CTA leaves while its peer may still arrive on its barriers
}
