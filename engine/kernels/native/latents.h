/* Products of latent attention, which are separate for each head: from the plain parts of queries to the latents' space,
 * in which heads attend, and from there to their values (section 2.1 of the DeepSeek-V2 paper, arXiv 2405.04434).
 */
#pragma once

#include "products/tile_product.h"
#include "thread_pool.h"

constexpr float LATENT_EPSILON = 1e-6f; /* of the norms of latents, whatever the model's epsilon */

/* Widths of the model (LatentHeads of engine/model/config/latents.py). The pool has latents, then the rotated key. */
struct Latents {
    int64_t rank; /* 0: the model has none */
    int64_t rotary, plain, value, query_rank;
    int64_t pooled() const { return rank + rotary; }
};

/* Weights of a layer. A head has its panels of `keys` (from queries) and of `values`. */
struct LatentMatrices {
    Matrix queries, keys, values; /* queries: from their latents; no panels if they have none */
};

constexpr int64_t MOST_WORDS_OF_HEAD = 512; /* of bfloat16, by tiles */

constexpr int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

/* Stores each head's outputs. */
template <typename T> struct StoreHeads {
    T *out;
    int64_t stride, step, outputs; /* `step`: from one head to the next */
    void operator()(int64_t row, int64_t panel, const PanelSums &sums) const {
        const int64_t panels = panels_of(outputs);
        Store<T>{out + panel / panels * step, stride, outputs}(row, panel % panels, sums);
    }
};

/* Multiplies each head's part of the rows, `step` behind the one before, with its panels of `matrix`. */
template <typename T>
static void product_by_head(ThreadPool *pool, const Matrix &matrix, const T *input, int64_t stride, int64_t step,
                            int64_t rows, const StoreHeads<T> &finish) {
    const int64_t panels = panels_of(finish.outputs);
#if TILES
    if constexpr (std::is_same_v<T, Bfloat16>)
        if (has_tiles() && matrix.words <= MOST_WORDS_OF_HEAD)
            return parallel_for(pool, matrix.num_panels / panels, 1, [&](int64_t from, int64_t to) {
                alignas(64) char memory[GROUP * MOST_WORDS_OF_HEAD * sizeof(uint32_t)];
                const TileRows inputs(matrix, rows, memory);
                for (int64_t head = from; head < to; head++) {
                    for (int64_t row = 0; row < rows; row++) inputs.store(row, input + row * stride + head * step, matrix.words);
                    tile_product(matrix, inputs, rows, head * panels, (head + 1) * panels, finish);
                }
            });
#endif
    parallel_for(pool, matrix.num_panels, 1, [&](int64_t from, int64_t to) {
        for (int64_t end; from < to; from = end) {
            end = least(to, (from / panels + 1) * panels);
            product(matrix, input + from / panels * step, stride, rows, from, end, finish);
        }
    });
}
