// Masked tile loads and stores, and outer products, for the fp32 rungs: all matrices row-major and
// contiguous, base pointers 16-byte aligned. Offsets are 64-bit: row * columns passes 2^31 early.
#pragma once

#define DEVICE __device__ __forceinline__

DEVICE float load_or_zero(const float* matrix, int row, int col, int rows, int cols) {
  return row < rows && col < cols ? matrix[(long long)row * cols + col] : 0.0f;
}

// Four consecutive columns from `col`, a multiple of 4. One 16-byte load where the row length allows.
DEVICE float4 load4_or_zero(const float* matrix, int row, int col, int rows, int cols) {
  if (row >= rows || col >= cols) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const float* source = matrix + (long long)row * cols + col;
  if (cols % 4 == 0) return *reinterpret_cast<const float4*>(source);
  return make_float4(source[0], col + 1 < cols ? source[1] : 0.0f,
                     col + 2 < cols ? source[2] : 0.0f, col + 3 < cols ? source[3] : 0.0f);
}

DEVICE void store_inside(float* matrix, int row, int col, int rows, int cols, float value) {
  if (row < rows && col < cols) matrix[(long long)row * cols + col] = value;
}

DEVICE void store4_inside(float* matrix, int row, int col, int rows, int cols, float4 value) {
  if (row >= rows || col >= cols) return;
  float* target = matrix + (long long)row * cols + col;
  if (cols % 4 == 0) {
    *reinterpret_cast<float4*>(target) = value;
    return;
  }
  target[0] = value.x;
  if (col + 1 < cols) target[1] = value.y;
  if (col + 2 < cols) target[2] = value.z;
  if (col + 3 < cols) target[3] = value.w;
}

// sums[i][j] += a[i] b[j]: TM * TN FMAs for TM + TN loaded values.
template <int TM, int TN>
DEVICE void outer_product(float (&sums)[TM][TN], const float (&a)[TM], const float (&b)[TN]) {
#pragma unroll
  for (int i = 0; i < TM; ++i) {
#pragma unroll
    for (int j = 0; j < TN; ++j) sums[i][j] += a[i] * b[j];
  }
}

// `COUNT` values from shared memory as 16-byte loads, four at a time, `STRIDE` floats apart.
template <int COUNT, int STRIDE>
DEVICE void load_fragment(float (&fragment)[COUNT], const float* source) {
#pragma unroll
  for (int piece = 0; piece < COUNT / 4; ++piece) {
    const float4 value = *reinterpret_cast<const float4*>(source + piece * STRIDE);
    fragment[piece * 4] = value.x;
    fragment[piece * 4 + 1] = value.y;
    fragment[piece * 4 + 2] = value.z;
    fragment[piece * 4 + 3] = value.w;
  }
}

// Where a thread of a warp-tiled kernel stands. A warp owns WARP_M x WARP_N of the block's tile; its
// lanes form LANES_M x LANES_N; each lane owns 4 x 4 patches, repeated every 4 LANES_M rows and
// 4 LANES_N columns, so that what a warp reads or writes at one time is contiguous.
template <int WARPS_N, int WARP_M, int WARP_N, int LANES_M, int LANES_N>
struct WarpTile {
  static_assert(LANES_M * LANES_N == 32, "a warp has 32 lanes");
  static constexpr int ROWS = WARP_M / LANES_M;  // a thread's share of the warp's tile
  static constexpr int COLS = WARP_N / LANES_N;
  int row, col;  // of the thread's first patch, inside the block's tile

  DEVICE WarpTile() {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    row = warp / WARPS_N * WARP_M + lane / LANES_N * 4;
    col = warp % WARPS_N * WARP_N + lane % LANES_N * 4;
  }

  DEVICE void store(const float (&sums)[ROWS][COLS], float* C, int M, int N, int block_row,
                    int block_col) const {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int r = block_row + row + i / 4 * 4 * LANES_M + i % 4;
#pragma unroll
      for (int j = 0; j < COLS; j += 4) {
        const int c = block_col + col + j / 4 * 4 * LANES_N;
        store4_inside(C, r, c, M, N,
                      make_float4(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]));
      }
    }
  }
};
