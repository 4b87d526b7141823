/* What attention does with a quantised pool: single tokens in float32, prompts in the dtype of queries. Codes are exact in
 * either; their scales meet scores and weights, not each element. */
#pragma once

#include "../native/quantise.h"
#include "vectors.h"

/* Whether a pool of these has rows of codes with scales. */
template <typename S> constexpr bool QUANTISED = false;
template <> constexpr bool QUANTISED<Int8> = true;
template <> constexpr bool QUANTISED<Fp8> = true;

/* Elements of S from one head to the next. */
template <typename S> INLINE int64_t head_size(int64_t head_dim) {
    return QUANTISED<S> ? head_dim + SCALE_BYTES : head_dim;
}

/* Codes become words of one float32. */
template <> constexpr int64_t PER_WORD<Int8> = 1;
template <> constexpr int64_t PER_WORD<Fp8> = 1;

INLINE Floats accumulate(const Int8 *, Floats sums, Words a, Words b) { return sums + (Floats)a * (Floats)b; }
INLINE Floats accumulate(const Fp8 *, Floats sums, Words a, Words b) { return sums + (Floats)a * (Floats)b; }
INLINE void split(const Int8 *, Words words, Floats (&parts)[1]) { parts[0] = (Floats)words; }
INLINE void split(const Fp8 *, Words words, Floats (&parts)[1]) { parts[0] = (Floats)words; }

/* A head's codes as elements of T, which has them exactly. */
template <typename T, typename S> INLINE void unpack(T *to, const S *row, int64_t dim) {
    for (int64_t i = 0; i < dim; i += LANES) store_some(to + i, load_some(row + i, dim - i), dim - i);
}
