// Vectors of 16 floats in the compiler's own notation, which AVX-512 has, and what rows are made of.
//
// ELEM_BF16: the element type of activations, weights and cache is bfloat16, else it is float.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef float v8 __attribute__((vector_size(32)));
typedef float v4 __attribute__((vector_size(16)));
#define LANES 16
#define INLINE static inline __attribute__((always_inline))

INLINE vf load_float(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void store_float(float *p, vf x) { memcpy(p, &x, sizeof x); }

INLINE vf splat(float x) { return x - (vf){}; }

// mask: lanes of all ones or all zeros.
INLINE vf pick(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

// NaN if a is, but not if b is.
INLINE vf larger(vf a, vf b) { return pick(b > a, b, a); }

#ifdef ELEM_BF16
typedef uint16_t elem;
#define NOT_A_NUMBER 0x7fc0

INLINE vf load(const elem *p) {
    vh x;
    memcpy(&x, p, sizeof x);
    return (vf)((vu)_mm512_cvtepu16_epi32((__m256i)x) << 16);  // gcc would widen in two halves
}

INLINE vu bf16_bits(vf x) {  // to nearest, ties to even
    vu bits = (vu)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu number = (vu)(x == x);
    return (number & rounded) | (~number & 0x7fc0);
}

INLINE void store(elem *p, vf x) {
    vh half = __builtin_convertvector(bf16_bits(x), vh);
    memcpy(p, &half, sizeof half);
}

INLINE vf rounded(vf x) { return (vf)(bf16_bits(x) << 16); }
#else
typedef float elem;
#define NOT_A_NUMBER NAN

INLINE vf load(const elem *p) { return load_float(p); }

INLINE void store(elem *p, vf x) { store_float(p, x); }

INLINE vf rounded(vf x) { return x; }
#endif

INLINE float sum(vf x) {
    v8 halves[2];
    memcpy(halves, &x, sizeof x);
    v8 half = halves[0] + halves[1];
    v4 quarters[2];
    memcpy(quarters, &half, sizeof half);
    v4 quarter = quarters[0] + quarters[1];
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

INLINE float maximum(vf x) {
    float a[LANES];
    memcpy(a, &x, sizeof x);
    for (int i = 0; i < 8; i++) a[i] = a[i] > a[i + 8] ? a[i] : a[i + 8];
    for (int i = 0; i < 4; i++) a[i] = a[i] > a[i + 4] ? a[i] : a[i + 4];
    a[0] = a[0] > a[2] ? a[0] : a[2];
    a[1] = a[1] > a[3] ? a[1] : a[3];
    return a[0] > a[1] ? a[0] : a[1];
}

// e to the x: exactly 1 at 0, 0 below -104, infinity above 89. Scaled by 2^n in two steps.
INLINE vf exponential(vf x) {
    x = larger(x, splat(-120.0f));
    x = pick(x > splat(120.0f), splat(120.0f), x);
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    vf n = (x * 1.44269504088896341f + magic) - magic;
    vf r = n * 2.12194440e-4f + (n * -0.693359375f + x);
    vf y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    vi whole = __builtin_convertvector(n, vi), half = whole >> 1;
    return y * (vf)((half + 127) << 23) * (vf)((whole - half + 127) << 23);
}
