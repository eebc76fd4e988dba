// Norm and activation. A row's result is one fixed sequence of operations, whatever rows and threads
// there are beside it.
#pragma once
#include "vectors.h"

// Root-mean-square norm of one row of `size` (a multiple of 16).
INLINE void norm_row(elem *out, const elem *x, const elem *weight, long size, float eps,
                     int unit_offset) {
    vf squares = {};
    for (long i = 0; i < size; i += LANES) {
        vf v = load(x + i);
        squares += v * v;
    }
    float scale = (float)(1.0 / sqrt(sum(squares) / (double)size + eps));
    for (long i = 0; i < size; i += LANES) {
        vf v = load(x + i) * scale, w = load(weight + i);
        store(out + i, unit_offset ? v * (w + 1.0f) : rounded(v) * w);
    }
}

// residual: may be null; else `total` becomes x + residual, rounded, and is what is normalised.
void rms_norm(elem *out, elem *total, const elem *x, const elem *residual, const elem *weight,
              long rows, long size, float eps, int unit_offset, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > 32768)
    for (long row = 0; row < rows; row++) {
        const elem *source = x + row * size;
        if (residual) {
            for (long i = 0; i < size; i += LANES)
                store(total + row * size + i, load(source + i) + load(residual + row * size + i));
            source = total + row * size;
        }
        norm_row(out + row * size, source, weight, size, eps, unit_offset);
    }
}

// x: (rows, 2 * size), gate then up; out: (rows, size).
void silu_and_mul(elem *out, const elem *x, long rows, long size, int gelu, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > 16384)
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < size; i += LANES) {
            vf gate = load(x + row * 2 * size + i), up = load(x + (row * 2 + 1) * size + i);
            vf logit = gate;
            if (gelu)  // 2 * sqrt(2 / pi)
                logit = (gate * gate * 0.044715f + 1.0f) * gate * 1.5957691216057308f;
            store(out + row * size + i, gate / (exponential(-logit) + 1.0f) * up);
        }
}
