/* Operations on one row of hidden states or on one head: RMSNorm and rotation. Each rounds where torch rounds. */
#pragma once

#include <math.h>

#include "simd.h"

/* Writes x / √(mean x² + epsilon), rounded, times `weight` to `out`, which may be `x`. */
template <typename T>
static void normalize(const T *x, const float *weight, T *out, int64_t count, float epsilon) {
    Floats squares = Floats{};
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats value = load_some(x + i, count - i);
        squares += value * value;
    }
    const float inverse = 1.0f / sqrtf(sum(squares) / (float)count + epsilon);
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats value = rounded(out, load_some(x + i, count - i) * inverse);
        store_some(out + i, value * load_some(weight + i, count - i), count - i);
    }
}

/* Rotates one head in place. `cosines` and `sines`: [head_dim], the sines of the first half negated. */
template <typename T>
static void rotate(T *head, const T *cosines, const T *sines, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t count = half - i;
        const Floats low = load_some(head + i, count), high = load_some(head + half + i, count);
        const Floats scaled_low = rounded(head, low * load_some(cosines + i, count));
        const Floats scaled_high = rounded(head, high * load_some(cosines + half + i, count));
        store_some(head + i, scaled_low + high * load_some(sines + i, count), count);
        store_some(head + half + i, scaled_high + low * load_some(sines + half + i, count), count);
    }
}
