// 00 Instruction-level parallelism
//
// Problem:   iterations x 32 FMAs a thread, fp32, no memory: once as one chain in which each FMA needs the
//            result before it, once as 8 chains that know nothing of each other. Same FLOPs.
// Idea:      An FMA takes 4 cycles, and a scheduler may issue one each cycle. With one warp a scheduler
//            only independent instructions inside the thread can fill the other three.
// Limiter:   Dependent: latency of the FMA pipe. Independent: its throughput, 128 FMAs an SM and cycle.
// Predicted: independent is 4x dependent, and close to 2 x 128 FLOP x SMs x clock.
// Measured:  16.2 against 55.2 TFLOP/s, 3.41x; H200, ec36ff0.
// PTX:       none; plain C++.

constexpr int THREADS = 128;
constexpr int CHAINS = 8;
constexpr int FMAS = 32;

extern "C" __global__ void __launch_bounds__(THREADS)
    ilp_dependent(float* out, float scale, float shift, int iterations) {
  float x = threadIdx.x;
  for (int i = 0; i < iterations; ++i) {
#pragma unroll
    for (int j = 0; j < FMAS; ++j) x = x * scale + shift;
  }
  out[blockIdx.x * THREADS + threadIdx.x] = x;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    ilp_independent(float* out, float scale, float shift, int iterations) {
  float x[CHAINS];
#pragma unroll
  for (int j = 0; j < CHAINS; ++j) x[j] = threadIdx.x + j;
  for (int i = 0; i < iterations; ++i) {
#pragma unroll
    for (int j = 0; j < FMAS; ++j) x[j % CHAINS] = x[j % CHAINS] * scale + shift;
  }
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < CHAINS; ++j) sum += x[j];
  out[blockIdx.x * THREADS + threadIdx.x] = sum;
}
