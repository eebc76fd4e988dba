// Types that the kernels need and NVRTC does not know without headers.
#pragma once

using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

// Storage only: arithmetic on bf16 happens inside the tensor cores, conversion in ptx.cuh.
struct bf16 {
  uint16 bits;
};

// A CUtensorMap as the driver encodes it: opaque, read by the TMA unit from the parameter bank.
struct alignas(128) TensorMap {
  uint64 words[16];
};

// The one parameter of every bf16 rung. kernels/matmul/host.py packs the same layout.
struct alignas(128) GemmArgs {
  TensorMap a;       // [M, K] row-major, box BLOCK_K x BLOCK_M
  TensorMap b;       // [N, K] row-major, box BLOCK_K x B_BOX_ROWS
  TensorMap c;       // [M, N] row-major, box 64 x 64; only valid when tma_store is set
  bf16* out;         // [M, N], rows ldc elements apart
  int64 ldc;
  const int* order;  // tile visiting order, (m << 16 | n) each; only for rungs that take one
  int m, n, k;
  int tma_store;     // 0 where C's rows are not a multiple of 16 bytes: store from registers
};
