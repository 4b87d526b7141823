/* K and V in one byte per element: a head is a row of codes, followed by their scale, a float32. All bits equal the
 * result of engine/kv_cache/tensors.py: the scale is the highest magnitude divided by the highest code; codes are rounded to
 * nearest, ties to even. Divisions are used because products may be fused with additions and then round differently.
 */
#pragma once

#include "simd.h"
#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

constexpr int64_t SCALE_BYTES = 4;

struct Int8 {
    int8_t bits;
};

struct Fp8 { /* E4M3: a sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity */
    uint8_t bits;
};

typedef int8_t Bytes __attribute__((vector_size(LANES)));
typedef int8_t LooseBytes __attribute__((vector_size(LANES), aligned(1), may_alias));

template <typename S> constexpr float HIGHEST_CODE = 0.0f;
template <> constexpr float HIGHEST_CODE<Int8> = 127.0f;
template <> constexpr float HIGHEST_CODE<Fp8> = 448.0f;

/* -- codes to floats, without the scale */

INLINE Floats widen(const Int8 *, Bytes codes) {
    return __builtin_convertvector(__builtin_convertvector(codes, Integers), Floats);
}

INLINE Floats widen(const Fp8 *, Bytes codes) { /* moved to float32's sign and magnitude; its bias is 120 higher */
    const Words wide = (Words)__builtin_convertvector(codes, Integers);
    return (Floats)(wide << 20 & 0x87f00000u) * splat(0x1p120f);
}

/* Loads `count` bytes, at most LANES; the others are 0. */
INLINE Bytes some_bytes(const void *from, int64_t count) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const __mmask16 there = (__mmask16)(count >= LANES ? 0xffff : (1u << count) - 1);
    return (Bytes)_mm_maskz_loadu_epi8(there, from);
#else
    if (count >= LANES) return *(const LooseBytes *)from;
    Bytes bytes = {};
    memcpy(&bytes, from, count);
    return bytes;
#endif
}

INLINE Floats load_some(const Int8 *from, int64_t count) { return widen(from, some_bytes(from, count)); }
INLINE Floats load_some(const Fp8 *from, int64_t count) { return widen(from, some_bytes(from, count)); }

/* -- floats, not above the highest code, to codes */

INLINE void store(Int8 *to, Floats x) {
    const Floats shift = splat(12582912.0f); /* 1.5 · 2²³: adding it rounds to an integer */
    const Integers codes = (Integers)(x + shift) - (Integers)shift;
    *(LooseBytes *)to = __builtin_convertvector(codes, Bytes);
}

INLINE void store(Fp8 *to, Floats x) {
    const Words bits = (Words)x & 0x7fffffffu, sign = (Words)x >> 24 & 0x80u;
    const Words normal = (bits + 0x7ffffu + (bits >> 20 & 1) - (120u << 23)) >> 20;
    const Floats shift = splat(16384.0f); /* its last place is the last place of denormals, 2⁻⁹ */
    const Words denormal = (Words)((Floats)bits + shift) - (Words)shift;
    const Words codes = (Words)select((Integers)(bits < 0x3c800000u), (Floats)denormal, (Floats)normal) | sign; /* 2⁻⁶ */
    *(LooseBytes *)to = __builtin_convertvector(codes, Bytes);
}

/* -- a head */

template <typename T> INLINE float highest_magnitude(const T *head, int64_t dim) {
    Floats best = Floats{};
    for (int64_t i = 0; i < dim; i += LANES) {
        const Floats magnitude = (Floats)((Words)load_some(head + i, dim - i) & 0x7fffffffu);
        best = select(magnitude > best, magnitude, best);
    }
    float highest = 0.0f;
    for (int64_t lane = 0; lane < LANES; lane++) highest = best[lane] > highest ? best[lane] : highest;
    return highest;
}

template <typename T, typename S> static void quantise(const T *head, S *row, int64_t dim) {
    const float least_highest = 1e-30f, highest = highest_magnitude(head, dim);
    const float scale = (highest > least_highest ? highest : least_highest) / HIGHEST_CODE<S>;
    for (int64_t i = 0; i < dim; i += LANES) store_some(row + i, load_some(head + i, dim - i) / scale, dim - i);
    memcpy(row + dim, &scale, SCALE_BYTES);
}

INLINE float scale_of(const void *row, int64_t dim) {
    float scale;
    memcpy(&scale, (const char *)row + dim, SCALE_BYTES);
    return scale;
}
