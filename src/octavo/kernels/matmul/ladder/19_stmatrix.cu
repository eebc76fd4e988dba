// 19 stmatrix epilogue
//
// Problem:   C[M,N] = A[M,K] B[N,K]^T, bf16 in and out, fp32 accumulate, any M and N, K a multiple of 8.
// Idea:      stmatrix writes four 8x8 fragments at once, 16 bytes a lane, and the swizzle keeps it free of
//            bank conflicts without padding. Each consumer warpgroup stages and stores its own 64 rows, so
//            the two no longer wait for each other.
// Limiter:   64 KB of staging leave room for 3 stages only; the tensor cores rest in every epilogue.
// Predicted: 1% over rung 18.
// Measured:  803 TFLOP/s at 4096^3, 829 TFLOP/s at 8192^3; 0.99, 1.02 x cuBLAS, cool; H200, ec36ff0.
// PTX:       stmatrix.
#include "common/cluster.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 256;
constexpr int BLOCK_K = 64;
constexpr int STAGES = 3;
constexpr int THREADS = 384;
constexpr int CLUSTER = 2;
constexpr int B_BOX_ROWS = BLOCK_N / CLUSTER;
constexpr int HILBERT = 1;
constexpr int CHUNKS = BLOCK_N / 64;
constexpr int PERSISTENT = 1;
constexpr int SMEM_BYTES = STAGES * (BLOCK_M + BLOCK_N) * BLOCK_K * 2 + BLOCK_M * BLOCK_N * 2 + 1024;

struct Shared : Operands<BLOCK_M, BLOCK_N, BLOCK_K, STAGES> {
  bf16 c[2][CHUNKS][CHUNK_ELEMENTS];  // a strip of 64 rows for each consumer
  uint64 full[STAGES];
  uint64 empty[STAGES];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    stmatrix(const __grid_constant__ GemmArgs args) {
  Shared& shared = dynamic_smem<Shared, SMEM_BYTES>();
  const int tiles = ceil_div(args.m, BLOCK_M * CLUSTER) * ceil_div(args.n, BLOCK_N);
  const int blocks_k = ceil_div(args.k, BLOCK_K);
  const ClusterWork<CLUSTER> work;
  init_cluster_ring<CLUSTER>(shared);

  Ring<STAGES> ring;
  if (threadIdx.x < 128) {
    setmaxnreg_dec<40>();
    if (threadIdx.x == 0) {
      for (int index = work.first; index < tiles; index += work.clusters) {
        const Tile tile = unpack_tile(args.order[index]);
        produce_tile<true>(shared, ring, args, work, index, tile, blocks_k);
      }
    }
  } else {
    setmaxnreg_inc<232>();
    const int half = threadIdx.x / 128 - 1;
    for (int index = work.first; index < tiles; index += work.clusters) {
      const Tile tile = unpack_tile(args.order[index]);
      float accumulators[BLOCK_N / 2];
      multiply_tile<CLUSTER>(accumulators, shared, ring, half, blocks_k);
      const int row = work.row(tile, BLOCK_M) + half * 64;
      if (args.tma_store) {
        if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
        named_barrier_sync<128>(1 + half);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
          stage_chunk_stmatrix<BLOCK_N>(accumulators, shared.c[half][chunk], chunk);
        }
        fence_proxy_async();
        named_barrier_sync<128>(1 + half);
        if (threadIdx.x % 128 == 0) {
          for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            tma_store(&args.c, shared.c[half][chunk], tile.n * BLOCK_N + chunk * CHUNK_COLS, row);
          }
          tma_store_commit();
        }
      } else {
        store_registers<BLOCK_N>(accumulators, args, row, tile.n * BLOCK_N);
      }
    }
    if (threadIdx.x % 128 == 0) tma_store_wait_all();
  }
  cluster_sync();  // no CTA leaves while its peer may still arrive on its barriers
}
