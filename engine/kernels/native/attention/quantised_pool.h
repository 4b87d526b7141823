/* Attention over a quantised pool: single tokens in float32, prompts in the dtype of the queries. Both represent codes
 * exactly. Scales are multiplied with scores and weights, not with each element. */
#pragma once

#include "../quantise.h"
#include "softmax_simd.h"

/* True if a pool of S has rows of codes with scales. */
template <typename S> constexpr bool QUANTISED = false;
template <> constexpr bool QUANTISED<Int8> = true;
template <> constexpr bool QUANTISED<Fp8> = true;

/* Returns the number of elements of S from one head to the next. */
template <typename S> INLINE int64_t head_size(int64_t head_dim) {
    return QUANTISED<S> ? head_dim + SCALE_BYTES : head_dim;
}

/* A code becomes a word of one float32. */
template <> constexpr int64_t PER_WORD<Int8> = 1;
template <> constexpr int64_t PER_WORD<Fp8> = 1;

INLINE Floats accumulate(const Int8 *, Floats sums, Words a, Words b) { return sums + (Floats)a * (Floats)b; }
INLINE Floats accumulate(const Fp8 *, Floats sums, Words a, Words b) { return sums + (Floats)a * (Floats)b; }
INLINE void split(const Int8 *, Words words, Floats (&parts)[1]) { parts[0] = (Floats)words; }
INLINE void split(const Fp8 *, Words words, Floats (&parts)[1]) { parts[0] = (Floats)words; }

/* Converts a head's codes to elements of T, which represents them exactly. */
template <typename T, typename S> INLINE void unpack(T *to, const S *row, int64_t dim) {
    for (int64_t i = 0; i < dim; i += LANES) store_some(to + i, load_some(row + i, dim - i), dim - i);
}
