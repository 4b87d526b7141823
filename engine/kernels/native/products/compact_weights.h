/* Lossless compression of panels of bfloat16 weights to three quarters of their bytes: a product of few rows takes as
 * long as reading its weights.
 *
 * Nearly all exponents of a trained or random matrix are among 16 values, so that 4 bits encode one. Two consecutive
 * words of input in a panel (matrix_product.h) are four vectors of 32 weights. They become a cell of 192 bytes, in 16-bit
 * lanes: the four exponents of a place, then signs and mantissas of the first word's two vectors, then of the second's.
 * A weight with a rare exponent is stored separately with its place, and is put back before the weights are used.
 */
#pragma once

#include "../simd.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define COMPACT 1 /* elsewhere expanding would take longer than reading */
#else
#define COMPACT 0
#endif

constexpr int64_t VECTOR = 32;               /* weights of one vector */
constexpr int64_t CELL = 4 * VECTOR;         /* weights of two words of a panel */
constexpr int64_t CELL_BYTES = CELL * 3 / 2;
constexpr uint16_t NO_EXPONENT = 0x807f;     /* the other bits of a weight */

struct Compact {
    const uint16_t *exponents; /* [32], the 16 twice, at their bits of a weight; null: the matrix is not compact */
    const uint64_t *outliers;    /* weight << 32 | place in the panel, sorted by panel and place */
    const int64_t *starts;     /* [panels + 1]: index of each panel's first entry in `outliers` */
};

/* Iterator over the weights of a panel that have rare exponents. */
struct Outliers {
    const uint64_t *next = nullptr, *end = nullptr;
    int64_t cell = -1; /* of the next one; -1: there is none */

    Outliers() = default;
    Outliers(const Compact &compact, int64_t panel)
        : next(compact.outliers + compact.starts[panel]), end(compact.outliers + compact.starts[panel + 1]) {
        find();
    }
    void find() { cell = next == end ? -1 : (int64_t)((uint32_t)*next / CELL); }
    void skip(int64_t before) { /* those of cells before this one */
        while (next != end && cell < before) next++, find();
    }
};

#if COMPACT
/* Expands a cell into its vectors: left and right half of the panel at the first word, then at the second. */
INLINE void expand(const char *cell, __m512i exponents, Words (&vectors)[4]) {
    const __m512i swap = _mm512_set4_epi32(0x0e0f0c0d, 0x0a0b0809, 0x06070405, 0x02030001); /* bytes of a lane */
    const __m512i others = _mm512_set1_epi16((short)NO_EXPONENT);
    const __m512i codes = _mm512_loadu_si512(cell);
    const __m512i first = _mm512_loadu_si512(cell + 64), second = _mm512_loadu_si512(cell + 128);
    const __m512i rests[4] = {first, _mm512_shuffle_epi8(first, swap), second, _mm512_shuffle_epi8(second, swap)};
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) { /* a permutation uses the lowest 5 bits of a lane: the fifth has no effect */
        const __m512i found = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * n), exponents);
        vectors[n] = (Words)_mm512_ternarylogic_epi32(rests[n], others, found, 0xea); /* rest & others | found */
    }
}

/* Puts the weights with rare exponents into the vectors of cell `outliers.cell`. */
INLINE void put_back(Outliers &outliers, Words (&vectors)[4]) {
    uint16_t weights[CELL];
    for (int n = 0; n < 4; n++) memcpy(weights + n * VECTOR, &vectors[n], sizeof vectors[n]);
    for (const int64_t cell = outliers.cell; outliers.cell == cell; outliers.next++, outliers.find())
        weights[(uint32_t)*outliers.next % CELL] = (uint16_t)(*outliers.next >> 32);
    for (int n = 0; n < 4; n++) memcpy(&vectors[n], weights + n * VECTOR, sizeof vectors[n]);
}
#endif

/* -- compression */

/* Adds the number of weights with each exponent to `counts` [256]. */
extern "C" void count_exponents(const uint16_t *weights, int64_t count, int64_t *counts) {
    for (int64_t i = 0; i < count; i++) counts[weights[i] >> 7 & 0xff]++;
}

/* Compresses panels of words [panels, words, 32] into `cells`. `codes` [256] is the code of each exponent, or -1;
 * weights without a code go to `outliers` and `starts`. The number of words is even. */
extern "C" void make_compact(const uint16_t *weights, int64_t num_panels, int64_t words, const int8_t *codes, uint16_t *cells,
                             uint64_t *outliers, int64_t *starts) {
    const int64_t per_panel = words / 2;
    int64_t found = 0;
    starts[0] = 0;
    for (int64_t n = 0; n < num_panels * per_panel; n++, weights += CELL, cells += CELL_BYTES / 2) {
        for (int64_t lane = 0; lane < VECTOR; lane++) {
            uint16_t named = 0, rests[4];
            for (int64_t vector = 0; vector < 4; vector++) {
                const uint16_t weight = weights[vector * VECTOR + lane];
                const int8_t code = codes[weight >> 7 & 0xff];
                rests[vector] = weight & NO_EXPONENT;
                if (code >= 0) named = (uint16_t)(named | code << 4 * vector);
            }
            cells[lane] = named;
            cells[VECTOR + lane] = (uint16_t)(rests[0] | rests[1] << 8 | rests[1] >> 8);
            cells[2 * VECTOR + lane] = (uint16_t)(rests[2] | rests[3] << 8 | rests[3] >> 8);
        }
        for (int64_t i = 0; i < CELL; i++)
            if (codes[weights[i] >> 7 & 0xff] < 0) outliers[found++] = (uint64_t)weights[i] << 32 | (n % per_panel * CELL + i);
        if ((n + 1) % per_panel == 0) starts[(n + 1) / per_panel] = found;
    }
}
