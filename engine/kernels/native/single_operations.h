/* Single operations of a layer with names of their own, for tests; layers.cpp exports them. */
#pragma once

#include "norm_and_rope.h"
#include "products/tile_product.h"
#include "quantise.h"

template <typename T, typename Finish>
static void whole_product(const Matrix &matrix, const T *input, int64_t stride, int64_t rows, const Finish &finish) {
#if TILES
    if constexpr (std::is_same_v<T, Bfloat16>)
        if (has_tiles() && matrix.quantised.bits == 0) {
            char *memory = new char[TileRows::bytes(matrix, GROUP)];
            for (int64_t first = 0; first < rows; first += GROUP) {
                const TileRows inputs(matrix, least(GROUP, rows - first), memory);
                for (int64_t row = 0; row < least(GROUP, rows - first); row++)
                    inputs.store(row, input + (first + row) * stride, matrix.words);
                tile_product(matrix, inputs, least(GROUP, rows - first), 0, matrix.num_panels,
                             [&](int64_t row, int64_t panel, const PanelSums &sums) { finish(first + row, panel, sums); });
            }
            delete[] memory;
            return;
        }
#endif
    if (matrix.quantised.bits == 0) return product(matrix, input, stride, rows, 0, matrix.num_panels, finish);
    char *memory = new char[Inputs::bytes(matrix.quantised, rows)];
    const Inputs inputs(matrix.quantised, rows, memory);
    for (int64_t row = 0; row < rows; row++) store_row(matrix.quantised, input + row * stride, inputs, row);
    quantised_product(matrix.quantised, matrix.panels, matrix.bias, inputs, rows, 0, matrix.num_panels, finish);
    delete[] memory;
}

#define DEFINE_PARTS(NAME, T)                                                                                          \
    extern "C" void normalize_##NAME(const T *x, const float *weight, T *out, int64_t count, float epsilon) {          \
        normalize(x, weight, out, count, epsilon);                                                                     \
    }                                                                                                                  \
    extern "C" void rotate_##NAME(T *head, const T *cosines, const T *sines, int64_t head_dim) {                       \
        rotate(head, cosines, sines, head_dim);                                                                        \
    }                                                                                                                  \
    extern "C" void quantise_##NAME(const T *head, void *row, int64_t head_dim, int64_t format) {                      \
        if (format == 1) quantise(head, (Int8 *)row, head_dim);                                                        \
        else quantise(head, (Fp8 *)row, head_dim);                                                                     \
    }                                                                                                                  \
    extern "C" void product_##NAME(const Matrix *matrix, const T *input, int64_t stride, int64_t rows, T *out,         \
                                   int64_t outputs) {                                                                  \
        whole_product(*matrix, input, stride, rows, Store<T>{out, outputs, outputs});                                  \
    }                                                                                                                  \
    extern "C" void gate_##NAME(const Matrix *matrix, const T *input, int64_t stride, int64_t rows, T *out) {          \
        whole_product(*matrix, input, stride, rows, Gate<T>{out, matrix->num_panels * PANEL / 2});                     \
    }

DEFINE_PARTS(float32, float)
DEFINE_PARTS(bfloat16, Bfloat16)
