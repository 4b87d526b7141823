/* A decoder layer as two calls, before and after attention; the embedding before and the logits after all layers.
 *
 * Rows go through a call in groups of GROUP that stay in the cache. Within a group, operations run one after another, and the
 * thread_pool divides the rows or the panels of weights of each. The caller checks shapes.
 */
#include "thread_pool_start.h"
#include "products/matrix_product.h"
#include "products/tile_product.h"
#include "quantise.h"
#include "latents.h"
#include "norm_and_rope.h"
#include "router.h"
#include "single_operations.h"

constexpr int64_t MANY_PRODUCTS = 32'000'000; /* of a layer: some tenths of a millisecond on one core */
constexpr int64_t ROWS_AT_ONCE = 8; /* fewest rows per part of an operation too short to divide by single rows */

struct Mlp {
    Matrix gate_up, down;
};

struct Layer {
    Matrix qkv, o, router; /* router: no panels if the layer has one MLP */
    LatentMatrices latents;
    Mlp shared;              /* beside experts; no panels: there is none */
    const Mlp *mlps;         /* one, or of each expert */
    const float *input_norm, *qk_norm, *post_norm; /* qk_norm [heads + kv_heads, head_dim], or null */
    const float *query_norm, *latent_norm; /* of the latents of queries, and of keys and values */
    const float *corrections;              /* [experts], of the router, or null */
    void *keys, *values;                           /* this layer's part of the pool: [slots, kv_heads, head_dim],
                                                      * a slot every `slot_stride` elements */
};

struct Model {
    int64_t hidden_size, heads, kv_heads, head_dim, vocab_size;
    Latents latents;
    Router router;
    double alpha, limit;    /* of a clamped gate; 0: gates have SiLU */
    int64_t layer_products; /* multiplications per token in a layer's matrices */
    int64_t slot_stride;
    int64_t pool_format; /* 0: heads as they are computed, 1: rows of int8, 2: rows of fp8 */
    const Layer *layers;
    Matrix lm_head;
    const float *final_norm;
    const void *embedding;
    ThreadPool *thread_pool;
    void *normed, *inner; /* scratch of GROUP rows: [hidden_size], and the largest inner size of an MLP */
    void *inputs;         /* the same of `Inputs` or `TileRows` for the widest matrix */
    void *gathered, *mixed; /* the same of [hidden_size], for experts */
    float *shares;          /* the same of [experts]: weights of the chosen ones, -1 for others */
    int64_t *chosen;        /* [GROUP]: rows of one expert */
    void *fused, *wide;     /* scratch of GROUP rows: outputs of `qkv`, and queries or values of all heads, for latents */
    float epsilon;
};

struct Step {
    int64_t tokens;
    const int64_t *positions, *slots;
    const void *cosines, *sines; /* [positions, head_dim] */
    void *hidden;                /* [tokens, hidden_size] */
    void *heads;                 /* [tokens, heads + 2 kv_heads, head_dim]: queries, keys, values; with latent
                                  * attention [tokens, heads, pooled]: queries in the latents' space */
};

template <typename T, typename Finish>
static void shared_product(const Model *model, const Matrix &matrix, const T *input, int64_t stride, int64_t rows,
                           const Finish &finish) {
    if (matrix.quantised.bits != 0) {
        const Inputs inputs(matrix.quantised, rows, model->inputs);
        parallel_for(model->thread_pool, rows, ROWS_AT_ONCE, [&](int64_t from, int64_t to) {
            for (int64_t row = from; row < to; row++) store_row(matrix.quantised, input + row * stride, inputs, row);
        });
        return parallel_for(model->thread_pool, matrix.num_panels, 1, [&](int64_t from, int64_t to) {
            quantised_product(matrix.quantised, matrix.panels, matrix.bias, inputs, rows, from, to, finish);
        });
    }
#if TILES
    if constexpr (std::is_same_v<T, Bfloat16>)
        if (has_tiles()) {
            const TileRows inputs(matrix, rows, model->inputs);
            parallel_for(model->thread_pool, rows, ROWS_AT_ONCE, [&](int64_t from, int64_t to) {
                for (int64_t row = from; row < to; row++) inputs.store(row, input + row * stride, matrix.words);
            });
            return parallel_for(model->thread_pool, matrix.num_panels, inputs.grain(), [&](int64_t from, int64_t to) {
                tile_product(matrix, inputs, rows, from, to, finish);
            });
        }
#endif
    parallel_for(model->thread_pool, matrix.num_panels, 1,
          [&](int64_t from, int64_t to) { product(matrix, input, stride, rows, from, to, finish); });
}

/* Normalizes rows of hidden states into `normed`. */
template <typename T> static void shared_norm(const Model *model, const T *hidden, const float *weight, int64_t rows) {
    const int64_t size = model->hidden_size;
    parallel_for(model->thread_pool, rows, ROWS_AT_ONCE, [&](int64_t from, int64_t to) {
        for (int64_t row = from; row < to; row++)
            normalize(hidden + row * size, weight, (T *)model->normed + row * size, size, model->epsilon);
    });
}

template <typename T, typename S> static void quantise_heads(const Model *model, S *rows, const T *heads) {
    const int64_t dim = model->head_dim;
    for (int64_t head = 0; head < model->kv_heads; head++)
        quantise(heads + head * dim, rows + head * (dim + SCALE_BYTES), dim);
}

/* Stores a token's K or V in the pool. */
template <typename T> static void store_heads(const Model *model, void *piece, const T *heads, int64_t slot) {
    const int64_t place = slot * model->slot_stride;
    switch (model->pool_format) {
        case 1: return quantise_heads(model, (Int8 *)piece + place, heads);
        case 2: return quantise_heads(model, (Fp8 *)piece + place, heads);
        default: memcpy((T *)piece + place, heads, model->kv_heads * model->head_dim * sizeof(T));
    }
}

/* Normalizes and rotates the heads of one token and stores its K and V. */
template <typename T> static void place_token(const Model *model, const Layer *layer, const Step *step, int64_t token) {
    const int64_t dim = model->head_dim, kv_size = model->kv_heads * dim;
    const int64_t rotated = model->heads + model->kv_heads;
    T *heads = (T *)step->heads + token * (rotated * dim + kv_size);
    const T *cosines = (const T *)step->cosines + step->positions[token] * dim;
    const T *sines = (const T *)step->sines + step->positions[token] * dim;
    for (int64_t head = 0; head < rotated; head++) {
        T *own = heads + head * dim;
        if (layer->qk_norm != nullptr) normalize(own, layer->qk_norm + head * dim, own, dim, model->epsilon);
        rotate(own, cosines, sines, dim);
    }
    store_heads(model, layer->keys, heads + model->heads * dim, step->slots[token]);
    store_heads(model, layer->values, heads + rotated * dim, step->slots[token]);
}

/* Decides how many threads work on this layer. */
static void borrow_threads(const Model *model, const Step *step) {
    ThreadPool *pool = model->thread_pool;
    const bool is_long = step->tokens * model->layer_products >= MANY_PRODUCTS;
    pool->borrowed = pool->num_borrowers > 0 && is_long ? idle_cores(pool) : 0;
}

/* -- latent attention */

/* Completes a row of `fused`: normalizes the latents of queries, and latents and rotated key, which go to the pool. */
template <typename T>
static void place_latents(const Model *model, const Layer *layer, const Step *step, int64_t token, T *row, int64_t before) {
    const Latents &own = model->latents;
    T *pooled = row + before;
    const int64_t position = step->positions[token] * own.rotary;
    if (own.query_rank > 0) normalize(row, layer->query_norm, row, own.query_rank, LATENT_EPSILON);
    normalize(pooled, layer->latent_norm, pooled, own.rank, LATENT_EPSILON);
    rotate(pooled + own.rank, (const T *)step->cosines + position, (const T *)step->sines + position, own.rotary);
    store_heads(model, layer->keys, pooled, step->slots[token]);
    store_heads(model, layer->values, pooled + model->head_dim, step->slots[token]);
}

/* Rotates the queries of one token, and copies what was rotated behind their part in the latents' space. */
template <typename T> static void place_queries(const Model *model, const Step *step, int64_t token, const T *queries) {
    const Latents &own = model->latents;
    const int64_t position = step->positions[token] * own.rotary;
    T *to = (T *)step->heads + token * model->heads * own.pooled() + own.rank;
    for (int64_t head = 0; head < model->heads; head++, to += own.pooled()) {
        memcpy(to, queries + head * (own.plain + own.rotary) + own.plain, own.rotary * sizeof(T));
        rotate(to, (const T *)step->cosines + position, (const T *)step->sines + position, own.rotary);
    }
}

template <typename T> static void project_latents(const Model *model, const Step *step, const Layer *layer) {
    const Latents &own = model->latents;
    const int64_t query = own.plain + own.rotary, all = model->heads * query, size = model->hidden_size;
    const int64_t before = own.query_rank > 0 ? own.query_rank : all, width = before + own.pooled();
    const int64_t stride = own.query_rank > 0 ? all : width; /* of queries */
    T *fused = (T *)model->fused, *queries = own.query_rank > 0 ? (T *)model->wide : fused;
    for (int64_t first = 0; first < step->tokens; first += GROUP) {
        const int64_t rows = least(GROUP, step->tokens - first);
        shared_norm(model, (const T *)step->hidden + first * size, layer->input_norm, rows);
        shared_product(model, layer->qkv, (const T *)model->normed, size, rows, Store<T>{fused, width, width});
        parallel_for(model->thread_pool, rows, ROWS_AT_ONCE, [&](int64_t from, int64_t to) {
            for (int64_t row = from; row < to; row++)
                place_latents(model, layer, step, first + row, fused + row * width, before);
        });
        if (own.query_rank > 0)
            shared_product(model, layer->latents.queries, fused, width, rows, Store<T>{queries, all, all});
        parallel_for(model->thread_pool, rows, ROWS_AT_ONCE, [&](int64_t from, int64_t to) {
            for (int64_t row = from; row < to; row++) place_queries(model, step, first + row, queries + row * stride);
        });
        T *out = (T *)step->heads + first * model->heads * own.pooled();
        product_by_head(model->thread_pool, layer->latents.keys, queries, stride, query, rows,
                        StoreHeads<T>{out, model->heads * own.pooled(), own.pooled(), own.rank});
    }
}

/* Returns attention's results for rows as the layer's output projection reads them, [heads, size of a value]. */
template <typename T> static const T *values_of(const Model *model, const Layer *layer, const T *attended, int64_t rows) {
    const Latents &own = model->latents;
    if (own.rank == 0) return attended;
    T *values = (T *)model->wide;
    product_by_head(model->thread_pool, layer->latents.values, attended, model->heads * own.rank, own.rank, rows,
                    StoreHeads<T>{values, model->heads * own.value, own.value, own.value});
    return values;
}

template <typename T> static void project(const Model *model, const Step *step, const Layer *layer) {
    borrow_threads(model, step);
    if (model->latents.rank > 0) return project_latents<T>(model, step, layer);
    const int64_t size = model->hidden_size, width = (model->heads + 2 * model->kv_heads) * model->head_dim;
    for (int64_t first = 0; first < step->tokens; first += GROUP) {
        const int64_t rows = least(GROUP, step->tokens - first);
        shared_norm(model, (const T *)step->hidden + first * size, layer->input_norm, rows);
        shared_product(model, layer->qkv, (const T *)model->normed, size, rows,
                       Store<T>{(T *)step->heads + first * width, width, width});
        parallel_for(model->thread_pool, rows, ROWS_AT_ONCE, [&](int64_t from, int64_t to) {
            for (int64_t row = from; row < to; row++) place_token<T>(model, layer, step, first + row);
        });
    }
}

/* Passes the outputs of an MLP for rows of normalized input to `finish`. */
template <typename T, typename Finish>
static void mlp(const Model *model, const Mlp &own, const T *input, int64_t rows, const Finish &finish) {
    T *inner = (T *)model->inner;
    const int64_t size = own.gate_up.num_panels * PANEL / 2;
    const float alpha = (float)model->alpha, limit = (float)model->limit;
    if (limit > 0.0f)
        shared_product(model, own.gate_up, input, model->hidden_size, rows,
                       ClampedGate<T>{inner, size, alpha, limit});
    else shared_product(model, own.gate_up, input, model->hidden_size, rows, Gate<T>{inner, size});
    shared_product(model, own.down, inner, size, rows, finish);
}

/* Adds an expert's outputs for its rows, multiplied by their shares. */
template <typename T> struct AddShare {
    T *out;
    const float *shares;
    const int64_t *rows;
    int64_t size, experts;
    void operator()(int64_t n, int64_t panel, const PanelSums &sums) const {
        const float share = shares[rows[n] * experts];
        PanelSums parts;
        for (int64_t part = 0; part < VECTORS; part++) parts[part] = rounded(out, sums[part]) * share;
        Add<T>{out, size, size}(rows[n], panel, parts);
    }
};

/* Returns what the experts make of the normalized rows: each reads its weights once, in order, for the rows it has. */
template <typename T> static const T *mix_experts(const Model *model, const Layer *layer, int64_t rows) {
    const int64_t size = model->hidden_size, experts = model->router.experts;
    const T *normed = (const T *)model->normed;
    T *gathered = (T *)model->gathered, *mixed = (T *)model->mixed;
    if (model->router.is_grouped)
        shared_product(model, layer->router, normed, size, rows, Store<float>{model->shares, experts, experts});
    else shared_product(model, layer->router, normed, size, rows, Widen<T>{model->shares, experts, experts});
    for (int64_t row = 0; row < rows; row++) choose(model->shares + row * experts, model->router, layer->corrections);
    memset(mixed, 0, rows * size * sizeof(T));
    for (int64_t expert = 0; expert < experts; expert++) {
        int64_t count = 0;
        for (int64_t row = 0; row < rows; row++)
            if (model->shares[row * experts + expert] != -1.0f) model->chosen[count++] = row;
        if (count == 0) continue;
        for (int64_t n = 0; n < count; n++)
            memcpy(gathered + n * size, normed + model->chosen[n] * size, size * sizeof(T));
        mlp(model, layer->mlps[expert], gathered, count,
            AddShare<T>{mixed, model->shares + expert, model->chosen, size, experts});
    }
    if (layer->shared.down.num_panels > 0) mlp(model, layer->shared, normed, rows, Add<T>{mixed, size, size});
    return mixed;
}

template <typename T> static void add_rows(const T *from, T *to, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES)
        store_some(to + i, load_some(to + i, count - i) + load_some(from + i, count - i), count - i);
}

template <typename T> static void finish(const Model *model, const Step *step, const Layer *layer, const T *attended) {
    const Latents &own = model->latents;
    const int64_t size = model->hidden_size, seen = model->heads * (own.rank > 0 ? own.rank : model->head_dim);
    const int64_t value = own.rank > 0 ? model->heads * own.value : seen;
    const T *normed = (const T *)model->normed;
    for (int64_t first = 0; first < step->tokens; first += GROUP) {
        const int64_t rows = least(GROUP, step->tokens - first);
        T *hidden = (T *)step->hidden + first * size;
        const Add<T> residual = {hidden, size, size};
        shared_product(model, layer->o, values_of(model, layer, attended + first * seen, rows), value, rows, residual);
        shared_norm(model, hidden, layer->post_norm, rows);
        if (layer->router.num_panels == 0) mlp(model, layer->mlps[0], normed, rows, residual);
        else add_rows(mix_experts<T>(model, layer, rows), hidden, rows * size);
    }
}

/* `output` and `feed` compute the two terms that `finish` adds, for ranks that each have a part of the layer. */
template <typename T> static void output(const Model *model, const Step *step, const Layer *layer, const T *attended, T *out) {
    const int64_t size = model->hidden_size, seen_size = model->heads * model->head_dim;
    for (int64_t first = 0; first < step->tokens; first += GROUP)
        shared_product(model, layer->o, attended + first * seen_size, seen_size, least(GROUP, step->tokens - first),
                       Store<T>{out + first * size, size, size});
}

template <typename T> static void feed(const Model *model, const Step *step, const Layer *layer, T *out) {
    const int64_t size = model->hidden_size;
    for (int64_t first = 0; first < step->tokens; first += GROUP) {
        const int64_t rows = least(GROUP, step->tokens - first);
        const T *hidden = (const T *)step->hidden + first * size;
        shared_norm(model, hidden, layer->post_norm, rows);
        if (layer->router.num_panels == 0) mlp(model, layer->mlps[0], (const T *)model->normed, rows, Store<T>{out + first * size, size, size});
        else memcpy(out + first * size, mix_experts<T>(model, layer, rows), rows * size * sizeof(T));
    }
}

template <typename T> static void logits(const Model *model, const Step *step, float *output) {
    const int64_t size = model->hidden_size, vocab = model->vocab_size;
    for (int64_t first = 0; first < step->tokens; first += GROUP) {
        const int64_t rows = least(GROUP, step->tokens - first);
        shared_norm(model, (const T *)step->hidden + first * size, model->final_norm, rows);
        shared_product(model, model->lm_head, (const T *)model->normed, size, rows,
                       Widen<T>{output + first * vocab, vocab, vocab});
    }
}

template <typename T> static void embed(const Model *model, const Step *step, const int64_t *token_ids) {
    const int64_t size = model->hidden_size;
    for (int64_t token = 0; token < step->tokens; token++)
        memcpy((T *)step->hidden + token * size, (const T *)model->embedding + token_ids[token] * size, size * sizeof(T));
}

/* embed: writes the tokens' hidden states. project: computes and rotates heads, stores K and V in the pool. finish:
 * adds the projection of `attended` [tokens, heads, head_dim] and the MLP to the hidden states; output and feed write these
 * two terms to `out` instead. logits: [tokens, vocab]. */
#define DEFINE(NAME, T)                                                                                                \
    extern "C" void embed_##NAME(const Model *model, const Step *step, const int64_t *token_ids) {                     \
        embed<T>(model, step, token_ids);                                                                              \
    }                                                                                                                  \
    extern "C" void project_##NAME(const Model *model, const Step *step, int64_t layer) {                              \
        project<T>(model, step, model->layers + layer);                                                                \
    }                                                                                                                  \
    extern "C" void finish_##NAME(const Model *model, const Step *step, int64_t layer, const T *attended) {                \
        finish<T>(model, step, model->layers + layer, attended);                                                           \
    }                                                                                                                  \
    extern "C" void output_##NAME(const Model *model, const Step *step, int64_t layer, const T *attended, T *out) {        \
        output<T>(model, step, model->layers + layer, attended, out);                                                      \
    }                                                                                                                  \
    extern "C" void feed_##NAME(const Model *model, const Step *step, int64_t layer, T *out) {                         \
        feed<T>(model, step, model->layers + layer, out);                                                              \
    }                                                                                                                  \
    extern "C" void logits_##NAME(const Model *model, const Step *step, float *output) {                               \
        logits<T>(model, step, output);                                                                                \
    }

DEFINE(float32, float)
DEFINE(bfloat16, Bfloat16)

/* True if these products are the fastest on this processor for many rows too. With AVX2 only, a library is faster in
 * float32. In bfloat16 it is slower without instructions for it, also with AVX-512. */
extern "C" int32_t suits_many_rows([[maybe_unused]] int32_t is_bfloat16) {
#if defined(__AVX512F__)
    return 1;
#elif defined(__AVX2__)
    return is_bfloat16;
#else
    return 0;
#endif
}

/* True if these products read compact weights (compact_weights.h). */
extern "C" int32_t reads_compact(int32_t is_bfloat16) { return COMPACT && is_bfloat16; }
