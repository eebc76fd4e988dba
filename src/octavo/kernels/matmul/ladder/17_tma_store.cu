// 17 Asynchronous TMA store
//
// Problem:   C[M,N] = A[M,K] B[N,K]^T, bf16 in and out, fp32 accumulate, any M and N, K a multiple of 8.
// Idea:      C leaves through shared memory: consumers write their fragments to a swizzled staging tile,
//            fence, meet at a barrier, and one thread hands the tile to the TMA unit, which writes whole
//            128-byte rows while the consumers start on the next tile.
//            Three orders matter: each writer's proxy fence before the barrier; the storing thread itself
//            waits until the last store has read the staging, then a barrier, before it is overwritten;
//            and the store ends before the CTA does.
// Limiter:   64 four-byte shared stores a thread, and a barrier that ties both consumers together.
// Predicted: 758 TFLOP/s (reported on an H100).
// Measured:  795 TFLOP/s at 4096^3, 825 TFLOP/s at 8192^3; 0.98, 1.02 x cuBLAS, cool; H200, ec36ff0.
// PTX:       cp.async.bulk.tensor to global, bulk groups, fence.proxy.async.
#include "common/cluster.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 256;
constexpr int BLOCK_K = 64;
constexpr int STAGES = 3;
constexpr int THREADS = 384;
constexpr int CLUSTER = 2;
constexpr int B_BOX_ROWS = BLOCK_N / CLUSTER;
constexpr int GROUP_M = 8;
constexpr int CHUNKS = BLOCK_N / 64;
constexpr int PERSISTENT = 1;
constexpr int SMEM_BYTES = STAGES * (BLOCK_M + BLOCK_N) * BLOCK_K * 2 + BLOCK_M * BLOCK_N * 2 + 1024;

struct Shared : Operands<BLOCK_M, BLOCK_N, BLOCK_K, STAGES> {
  bf16 c[2][CHUNKS][CHUNK_ELEMENTS];  // a strip of 64 rows for each consumer
  uint64 full[STAGES];
  uint64 empty[STAGES];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    tma_store_epilogue(const __grid_constant__ GemmArgs args) {
  Shared& shared = dynamic_smem<Shared, SMEM_BYTES>();
  const int tiles_m = ceil_div(args.m, BLOCK_M * CLUSTER);
  const int tiles_n = ceil_div(args.n, BLOCK_N);
  const int blocks_k = ceil_div(args.k, BLOCK_K);
  const ClusterWork<CLUSTER> work;
  init_cluster_ring<CLUSTER>(shared);

  Ring<STAGES> ring;
  if (threadIdx.x < 128) {
    setmaxnreg_dec<40>();
    if (threadIdx.x == 0) {
      for (int index = work.first; index < tiles_m * tiles_n; index += work.clusters) {
        const Tile tile = grouped_tile<GROUP_M>(index, tiles_m, tiles_n);
        produce_tile<false>(shared, ring, args, work, index, tile, blocks_k);
      }
    }
  } else {
    setmaxnreg_inc<232>();
    const int half = threadIdx.x / 128 - 1;
    for (int index = work.first; index < tiles_m * tiles_n; index += work.clusters) {
      const Tile tile = grouped_tile<GROUP_M>(index, tiles_m, tiles_n);
      float accumulators[BLOCK_N / 2];
      multiply_tile<CLUSTER>(accumulators, shared, ring, half, blocks_k);
      const int row = work.row(tile, BLOCK_M);
      if (args.tma_store) {
        store_strips<BLOCK_N>(accumulators, shared.c, args, half, row, tile.n);
      } else {
        store_registers<BLOCK_N>(accumulators, args, row + half * 64, tile.n * BLOCK_N);
      }
    }
    if (threadIdx.x % 128 == 0) tma_store_wait_all();
  }
  cluster_sync();  // no CTA leaves while its peer may still arrive on its barriers
}
