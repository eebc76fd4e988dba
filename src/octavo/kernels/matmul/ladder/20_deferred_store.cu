// 20 Deferred store
//
// Problem:   C[M,N] = A[M,K] B[N,K]^T, bf16 in and out, fp32 accumulate, any M and N, K a multiple of 8.
// Idea:      A finished tile is rounded to bf16 into 64 registers, which frees the accumulators at once: the
//            next tile's wgmmas start, and between them the old tile is staged and stored, one 8 KB chunk
//            in every fourth K block. Two chunks of staging a warpgroup instead of a whole tile
//            also leave room for a fourth stage. The rest of K runs in whole rounds of the ring, with all
//            stages' addresses known: 56 instructions a K block instead of 62, for under the power limit an
//            instruction costs clock, and testing for a store in every block would cost what deferring gains.
// Limiter:   Power: at 8192^3 tensor cores are active 94.9% of the cycles over all SMs (ncu), 97.9% of those
//            of the 128 that work, at the clock that 700 W allow.
// Predicted: 1% over rung 19: about 2,000 idle cycles less for each of a CTA's tiles.
// Measured:  818 TFLOP/s at 4096^3, 832 TFLOP/s at 8192^3; 1.01, 1.03 x cuBLAS, cool; H200, ec36ff0.
// PTX:       cp.async.bulk.wait_group.read with one group pending.
#include "common/cluster.cuh"

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

struct Shared : Operands<BLOCK_M, BLOCK_N, BLOCK_K, STAGES> {
  bf16 c[2][2][CHUNK_ELEMENTS];  // two chunks in turn for each consumer
  uint64 full[STAGES];
  uint64 empty[STAGES];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    deferred_store(const __grid_constant__ GemmArgs args) {
  Shared& shared = dynamic_smem<Shared, SMEM_BYTES>();
  const int tiles = ceil_div(args.m, BLOCK_M * CLUSTER) * ceil_div(args.n, BLOCK_N);
  const int blocks_k = ceil_div(args.k, BLOCK_K);
  const ClusterWork<CLUSTER> work;
  init_cluster_ring<CLUSTER>(shared);

  if (threadIdx.x < 128) {
    setmaxnreg_dec<40>();
    if (threadIdx.x == 0) {
      Ring<STAGES> ring;
      for (int index = work.first; index < tiles; index += work.clusters) {
        const Tile tile = unpack_tile(args.order[index]);
        produce_tile<true>(shared, ring, args, work, index, tile, blocks_k);
      }
    }
  } else {
    setmaxnreg_inc<232>();
    consume_tiles<CLUSTER, SPACING>(shared, args, work, tiles, blocks_k);
  }
  cluster_sync();  // no CTA leaves while its peer may still arrive on its barriers
}
