// 01 Naive, uncoalesced
//
// Problem:   C[M,N] = A[M,K] B[K,N], fp32, row-major, any M and N, K a multiple of 8.
// Idea:      One thread an output element; threadIdx.x walks down a column of C, so the 32 threads
//            of a warp read 32 rows of A and write 32 rows of C: 32 sectors where 4 would do.
// Limiter:   LSU and L1: each warp-wide load of A is 32 separate 32-byte sectors, 1/8 of them used.
// Predicted: about 1/10 of rung 02, as on other chips (3171 against 243 GFLOP/s on an H100 PCIe).
// Measured:  0.50 TFLOP/s at 4096^3; 0.01 x cuBLAS; H200, ec36ff0.
// PTX:       none; plain C++.

constexpr int BLOCK_M = 32;
constexpr int BLOCK_N = 32;
constexpr int THREADS = BLOCK_M * BLOCK_N;

extern "C" __global__ void naive_uncoalesced(int M, int N, int K, const float* A, const float* B,
                                             float* C) {
  const int row = blockIdx.y * BLOCK_M + threadIdx.x % BLOCK_M;
  const int col = blockIdx.x * BLOCK_N + threadIdx.x / BLOCK_M;
  if (row < M && col < N) {
    float sum = 0.0f;
    for (int k = 0; k < K; ++k) {
      sum += A[(long long)row * K + k] * B[(long long)k * N + col];
    }
    C[(long long)row * N + col] = sum;
  }
}
