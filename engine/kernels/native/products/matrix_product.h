/* Products of a few or many rows with constant weights, which are rearranged once.
 *
 * Weights [out, in] are in panels of 32 outputs: for each word of the input (one float32 or two bfloat16), the words
 * of these outputs, so that a product reads them from front to back; or the same in fewer bytes (compact_weights.h). Each
 * output is one running sum over the input in its order, whatever the number of rows and threads and the layout of the
 * weights: a row's result does not depend on the other rows. With a matrix unit, tile_product.h multiplies bfloat16.
 */
#pragma once

#include <type_traits>

#include "compact_weights.h"
#include "quantised_product.h"

constexpr int64_t AHEAD = 64; /* words of the input: weights are prefetched this far ahead */
/* The sums of a product fill half of the registers, and hide the latency of additions. */
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int64_t MOST_SUMS = 16;
#else
constexpr int64_t MOST_SUMS = 8;
#endif
constexpr int64_t MOST_ROWS = MOST_SUMS / 2;

struct Matrix {
    const void *panels; /* [panels, words, 32] words, the same compressed into cells, or codes (quantised_product.h) */
    const float *bias;  /* [panels · 32], or null */
    int64_t words;      /* of one row of the input */
    int64_t num_panels;
    Compact compact;
    Quantised quantised;
};

INLINE uint32_t word_of(const void *row, int64_t k) {
    uint32_t word;
    memcpy(&word, (const char *)row + k * sizeof word, sizeof word);
    return word;
}

/* Adds the products of `words` words of the rows to the sums of COUNT vectors of a panel, from vector `first` on. */
template <int COUNT, typename T, int ROWS>
INLINE void multiply_part(const uint32_t *panel, int64_t words, const T *input, int64_t stride, PanelSums (&sums)[ROWS], int64_t first) {
    Floats own[ROWS][COUNT] = {};
    panel += first * LANES;
    for (int64_t k = 0; k < words; k++, panel += PANEL) {
        Words weights[COUNT];
#pragma GCC unroll 8
        for (int n = 0; n < COUNT; n++) weights[n] = *(const LooseWords *)(panel + n * LANES);
#pragma GCC unroll 2
        for (int64_t line = 0; line < COUNT * LANES; line += 16) __builtin_prefetch(panel + AHEAD * PANEL + line);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) {
            const uint32_t word = word_of(input + row * stride, k);
#pragma GCC unroll 8
            for (int n = 0; n < COUNT; n++) own[row][n] = accumulate(input, own[row][n], weights[n], word);
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++) memcpy(sums[row] + first, own[row], sizeof own[row]);
}

/* Computes the products of `words` words of the rows with a panel: as many vectors at a time as registers allow. */
template <typename T, int ROWS>
INLINE void multiply(const uint32_t *panel, int64_t words, const T *input, int64_t stride, PanelSums (&sums)[ROWS]) {
    constexpr int COUNT = least(VECTORS, MOST_SUMS / (ROWS > 2 ? MOST_ROWS : ROWS));
    for (int64_t first = 0; first < VECTORS; first += COUNT)
        multiply_part<COUNT>(panel, words, input, stride, sums, first);
}

#if COMPACT
/* Multiplies a whole panel of cells, otherwise like `multiply`. */
template <int ROWS>
INLINE void multiply_cells(const Matrix &matrix, int64_t panel, const Bfloat16 *input, int64_t stride,
                           PanelSums (&sums)[ROWS]) {
    const int64_t num_cells = matrix.words / 2;
    const char *cell = (const char *)matrix.panels + panel * num_cells * CELL_BYTES;
    const __m512i exponents = _mm512_loadu_si512(matrix.compact.exponents);
    Outliers outliers(matrix.compact, panel);
    Floats totals[ROWS][VECTORS] = {};
    for (int64_t n = 0; n < num_cells; n++, cell += CELL_BYTES) {
        Words own[4];
        expand(cell, exponents, own);
        if (__builtin_expect(n == outliers.cell, 0)) put_back(outliers, own);
        for (int64_t line = 0; line < CELL_BYTES; line += 64) __builtin_prefetch(cell + AHEAD / 2 * CELL_BYTES + line);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
            for (int k = 0; k < 2; k++) {
                const uint32_t word = word_of(input + row * stride, 2 * n + k);
                totals[row][0] = accumulate(input, totals[row][0], own[2 * k], word);
                totals[row][1] = accumulate(input, totals[row][1], own[2 * k + 1], word);
            }
    }
    memcpy(sums, totals, sizeof totals);
}
#endif

template <typename T, int ROWS>
INLINE void multiply_panel(const Matrix &matrix, int64_t panel, const T *input, int64_t stride, PanelSums (&sums)[ROWS]) {
#if COMPACT
    if constexpr (std::is_same_v<T, Bfloat16>)
        if (matrix.compact.exponents != nullptr) return multiply_cells<ROWS>(matrix, panel, input, stride, sums);
#endif
    multiply<T, ROWS>((const uint32_t *)matrix.panels + panel * matrix.words * PANEL, matrix.words, input, stride, sums);
}

template <typename T, int ROWS, typename Finish>
INLINE void multiply_rows(const Matrix &matrix, int64_t panel, const T *input, int64_t stride, int64_t first,
                          const Finish &finish) {
    PanelSums sums[ROWS];
    multiply_panel<T, ROWS>(matrix, panel, input + first * stride, stride, sums);
    for (int row = 0; row < ROWS; row++) {
        if (matrix.bias != nullptr)
            for (int n = 0; n < VECTORS; n++) sums[row][n] += load(matrix.bias + panel * PANEL + n * LANES);
        finish(first + row, panel, sums[row]);
    }
}

/* Calls finish(row, panel, sums) for each row of `input` and panels [from, to). */
template <typename T, typename Finish>
static void product(const Matrix &matrix, const T *input, int64_t stride, int64_t rows, int64_t from, int64_t to,
                    const Finish &finish) {
    for (int64_t panel = from; panel < to; panel++) {
        int64_t row = 0;
        for (; row + MOST_ROWS <= rows; row += MOST_ROWS)
            multiply_rows<T, MOST_ROWS>(matrix, panel, input, stride, row, finish);
#define REST(COUNT) \
    case COUNT: multiply_rows<T, COUNT>(matrix, panel, input, stride, row, finish); break;
        switch (rows - row) {
            REST(1) REST(2) REST(3)
#if defined(__AVX512F__) || defined(__aarch64__)
            REST(4) REST(5) REST(6) REST(7)
#endif
        }
#undef REST
    }
}

/* -- destinations of the sums; T is the dtype to which every operation of the model rounds */

template <typename T> struct Store {
    T *out;
    int64_t stride, outputs;
    INLINE void put(T *to, Floats value, int64_t room) { if (room > 0) store_some(to, value, room); }
    void operator()(int64_t row, int64_t panel, const PanelSums &sums) const {
        for (int64_t n = 0, first = panel * PANEL; n < VECTORS; n++, first += LANES)
            put(out + row * stride + first, sums[n], outputs - first);
    }
};

/* Logits: rounded to T like the other projections, but stored as float32. */
template <typename T> struct Widen {
    float *out;
    int64_t stride, outputs;
    void operator()(int64_t row, int64_t panel, const PanelSums &sums) const {
        PanelSums wide;
        for (int n = 0; n < VECTORS; n++) wide[n] = rounded((const T *)nullptr, sums[n]);
        Store<float>{out, stride, outputs}(row, panel, wide);
    }
};

template <typename T> struct Add {
    T *out;
    int64_t stride, outputs;
    INLINE void put(T *to, Floats value, int64_t room) {
        if (room > 0) store_some(to, load_some(to, room) + rounded(to, value), room);
    }
    void operator()(int64_t row, int64_t panel, const PanelSums &sums) const {
        for (int64_t n = 0, first = panel * PANEL; n < VECTORS; n++, first += LANES)
            put(out + row * stride + first, sums[n], outputs - first);
    }
};

/* silu(gate) · up, from panels of 16 gates and their 16 ups. */
template <typename T> struct Gate {
    T *out;
    int64_t stride;
    void operator()(int64_t row, int64_t panel, const PanelSums &sums) const {
        T *to = out + row * stride + panel * PANEL / 2;
        for (int n = 0; n < VECTORS / 2; n++, to += LANES)
            store(to, rounded(to, silu(rounded(to, sums[n]))) * rounded(to, sums[n + VECTORS / 2]));
    }
};

/* gate · sigmoid(alpha · gate) · (up + 1) of clamped gates and ups, from the same panels. */
template <typename T> struct ClampedGate {
    T *out;
    int64_t stride;
    float alpha, limit;
    void operator()(int64_t row, int64_t panel, const PanelSums &sums) const {
        T *to = out + row * stride + panel * PANEL / 2;
        const Floats most = splat(limit), least = splat(-limit);
        for (int n = 0; n < VECTORS / 2; n++, to += LANES) {
            Floats gate = rounded(to, sums[n]), up = rounded(to, sums[n + VECTORS / 2]);
            gate = select(gate > most, most, gate);
            up = select(up > most, most, select(up < least, least, up));
            store(to, rounded(to, silu(gate * alpha) / alpha) * rounded(to, up + 1.0f));
        }
    }
};
