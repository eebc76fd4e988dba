// 18 Hilbert schedule
//
// Problem:   C[M,N] = A[M,K] B[N,K]^T, bf16 in and out, fp32 accumulate, any M and N, K a multiple of 8.
// Idea:      Reuse from round to round. Tiles in the order of a Hilbert curve: any run of consecutive
//            tiles covers a compact patch of C, and the next patch shares half of its panels with it. And
//            K is walked back and forth: every second round starts with the K blocks that the L2 still
//            holds. The sum's order alternates with it, the same in every run.
// Limiter:   As rung 17. Without the turn of K the curve gains nothing over rung 15's groups: 1.07 GB are
//            read from memory at 8192^3 in either order, 16 rounds of 67 MB (ncu).
// Predicted: 0.5%: a quarter less memory traffic, which takes a few per cent of the power.
// Measured:  801 TFLOP/s at 4096^3, 827 TFLOP/s at 8192^3; 0.99, 1.02 x cuBLAS, cool; H200, ec36ff0.
// PTX:       none new.
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
    hilbert(const __grid_constant__ GemmArgs args) {
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
        // true: in every second round from the last K block to the first.
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
