// 02 Naive, coalesced
//
// Problem:   C[M,N] = A[M,K] B[K,N], fp32, row-major, any M and N, K a multiple of 8.
// Idea:      The same arithmetic as rung 01, but threadIdx.x walks along a row of C: a warp reads one
//            element of A (broadcast) and 128 consecutive bytes of B, and writes 128 consecutive bytes.
// Limiter:   Issue and L1: two loads for each FMA, so the FMA pipe runs at a fraction of its rate.
// Predicted: 10x rung 01.
// Measured:  5.8 TFLOP/s at 4096^3; 0.11 x cuBLAS; H200, ec36ff0.
// PTX:       none; plain C++.

constexpr int BLOCK_M = 32;
constexpr int BLOCK_N = 32;
constexpr int THREADS = BLOCK_M * BLOCK_N;

extern "C" __global__ void naive(int M, int N, int K, const float* A, const float* B, float* C) {
  const int row = blockIdx.y * BLOCK_M + threadIdx.x / BLOCK_N;
  const int col = blockIdx.x * BLOCK_N + threadIdx.x % BLOCK_N;
  if (row < M && col < N) {
    float sum = 0.0f;
    for (int k = 0; k < K; ++k) {
      sum += A[(long long)row * K + k] * B[(long long)k * N + col];
    }
    C[(long long)row * N + col] = sum;
  }
}
