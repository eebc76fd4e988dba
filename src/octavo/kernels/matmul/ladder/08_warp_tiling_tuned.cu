// 08 Warp tiling, tuned
//
// Problem:   C[M,N] = A[M,K] B[K,N], fp32, row-major, any M and N, K a multiple of 8.
// Idea:      Rung 07 with two buffers: the next tile's global loads are issued before this tile's FMAs and
//            land in registers, then in the other buffer; one barrier a tile instead of two. A is written
//            transposed at row ^ 8 (k / 4 % 4), which spreads a warp's writes over all 32 banks. CTAs
//            that lie inside the matrices run a copy of the loop without masks: an SM sub-partition
//            issues one instruction a cycle, so each that is no FFMA costs one.
// Limiter:   The FMA pipe: issue slots that go to anything but FFMA, and the clock under power.
// Predicted: 85% of cuBLAS or more.
// Measured:  48.5 TFLOP/s at 4096^3; 0.95 x cuBLAS; H200, ec36ff0.
// PTX:       none; plain C++.
#include "common/sgemm.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 128;
constexpr int BLOCK_K = 16;
constexpr int WARP_M = 64;
constexpr int WARP_N = 32;
constexpr int THREADS = 256;
constexpr int A_LOADS = BLOCK_M * BLOCK_K / 4 / THREADS;
constexpr int B_LOADS = BLOCK_N * BLOCK_K / 4 / THREADS;
constexpr int A_ROWS = THREADS / (BLOCK_K / 4);  // rows of A that all threads load at one time
constexpr int B_ROWS = THREADS / (BLOCK_N / 4);

using Lanes = WarpTile<BLOCK_N / WARP_N, WARP_M, WARP_N, 8, 4>;

struct Buffer {
  float a[BLOCK_K][BLOCK_M];  // transposed, swizzled
  float b[BLOCK_K][BLOCK_N];
};

struct Operands {
  const float *a, *b;
  int m, n, k, row, col;  // extents, and where this CTA's tile begins
};

DEVICE int swizzled(int k, int row) {
  return row ^ k / 4 % 4 * 8;
}

// A tile on its way: from global memory into registers now, into shared memory later.
template <bool INSIDE>
struct Staged {
  float4 a[A_LOADS], b[B_LOADS];
  int a_row = threadIdx.x / (BLOCK_K / 4), a_col = threadIdx.x % (BLOCK_K / 4) * 4;
  int b_row = threadIdx.x / (BLOCK_N / 4), b_col = threadIdx.x % (BLOCK_N / 4) * 4;

  DEVICE void load(const Operands& from, int k) {
    const float* a_source = from.a + (long long)(from.row + a_row) * from.k + k + a_col;
    const float* b_source = from.b + (long long)(k + b_row) * from.n + from.col + b_col;
#pragma unroll
    for (int i = 0; i < A_LOADS; ++i) {
      if constexpr (INSIDE) {
        a[i] = *reinterpret_cast<const float4*>(a_source + (long long)i * A_ROWS * from.k);
      } else {
        a[i] = load4_or_zero(from.a, from.row + a_row + i * A_ROWS, k + a_col, from.m, from.k);
      }
    }
#pragma unroll
    for (int i = 0; i < B_LOADS; ++i) {
      if constexpr (INSIDE) {
        b[i] = *reinterpret_cast<const float4*>(b_source + (long long)i * B_ROWS * from.n);
      } else {
        b[i] = load4_or_zero(from.b, k + b_row + i * B_ROWS, from.col + b_col, from.k, from.n);
      }
    }
  }

  DEVICE void store(Buffer& buffer) const {
#pragma unroll
    for (int i = 0; i < A_LOADS; ++i) {
      const int row = swizzled(a_col, a_row + i * A_ROWS);
      buffer.a[a_col][row] = a[i].x;
      buffer.a[a_col + 1][row] = a[i].y;
      buffer.a[a_col + 2][row] = a[i].z;
      buffer.a[a_col + 3][row] = a[i].w;
    }
#pragma unroll
    for (int i = 0; i < B_LOADS; ++i) {
      *reinterpret_cast<float4*>(&buffer.b[b_row + i * B_ROWS][b_col]) = b[i];
    }
  }
};

template <bool INSIDE>
DEVICE void multiply(float (&sums)[Lanes::ROWS][Lanes::COLS], Buffer (&buffers)[2],
                     const Operands& from, const Lanes& lanes) {
  Staged<INSIDE> staged;
  staged.load(from, 0);
  staged.store(buffers[0]);
  __syncthreads();
  for (int k = 0; k < from.k; k += BLOCK_K) {
    const bool more = k + BLOCK_K < from.k;
    const Buffer& now = buffers[k / BLOCK_K % 2];
    if (more) staged.load(from, k + BLOCK_K);
#pragma unroll
    for (int step = 0; step < BLOCK_K; ++step) {
      float a[Lanes::ROWS], b[Lanes::COLS];
#pragma unroll
      for (int piece = 0; piece < Lanes::ROWS; piece += 4) {
        const float4 four = *reinterpret_cast<const float4*>(
            &now.a[step][swizzled(step, lanes.row + piece * 8)]);
        a[piece] = four.x;
        a[piece + 1] = four.y;
        a[piece + 2] = four.z;
        a[piece + 3] = four.w;
      }
      load_fragment<Lanes::COLS, 16>(b, &now.b[step][lanes.col]);
      outer_product(sums, a, b);
    }
    // The other buffer was last read before the previous barrier, so it is free to fill.
    if (more) staged.store(buffers[(k / BLOCK_K + 1) % 2]);
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    warp_tiling_tuned(int M, int N, int K, const float* A, const float* B, float* C) {
  __shared__ Buffer buffers[2];
  const Lanes lanes;
  const Operands from = {A, B, M, N, K, (int)blockIdx.y * BLOCK_M, (int)blockIdx.x * BLOCK_N};
  float sums[Lanes::ROWS][Lanes::COLS] = {};
  if (from.row + BLOCK_M <= M && from.col + BLOCK_N <= N && K % BLOCK_K == 0 && N % 4 == 0) {
    multiply<true>(sums, buffers, from, lanes);
  } else {
    multiply<false>(sums, buffers, from, lanes);
  }
  lanes.store(sums, C, M, N, from.row, from.col);
}
