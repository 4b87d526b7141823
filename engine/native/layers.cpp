/* A decoder layer as two calls, before and after attention, and what lies before the first and behind the last layer.
 *
 * Every call is one job of the crew. Rows go through it in groups that stay in the cache; within a group the members
 * share out rows or panels of weights and meet after each operation. Shapes are the caller's to check.
 */
#include "crew_life.h"
#include "product.h"
#include "rows.h"

constexpr int64_t GROUP = 256; /* rows */

struct Layer {
    Matrix qkv, o, gate_up, down;
    const float *input_norm, *qk_norm, *post_norm; /* qk_norm [heads + kv_heads, head_dim], or null */
    void *keys, *values;                           /* this layer's part of the pool: [slots, kv_heads, head_dim] */
};

struct Model {
    int64_t hidden_size, inner_size; /* inner_size is a multiple of 16 */
    int64_t heads, kv_heads, head_dim, vocab_size;
    const Layer *layers;
    Matrix lm_head;
    const float *final_norm;
    const void *embedding;
    Crew *crew;
    void *normed, *inner; /* scratch of GROUP rows: [hidden_size] and [inner_size] */
    float epsilon;
};

struct Step {
    int64_t tokens;
    const int64_t *positions, *slots;
    const void *cosines, *sines; /* [positions, head_dim] */
    void *hidden;                /* [tokens, hidden_size] */
    void *heads;                 /* [tokens, heads + 2 kv_heads, head_dim]: queries, keys, values */
};

/* One call, as the crew's members see it. */
struct Call {
    const Model *model;
    const Layer *layer;
    const Step *step;
    const void *input;
    const int64_t *rows;
    int64_t count;
    float *output;
};

struct Part {
    int64_t from, to;
};

INLINE Part part(int64_t count, int32_t member, int32_t members) {
    return {count * member / members, count * (member + 1) / members};
}

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <typename T, typename Finish>
INLINE void shared_product(const Call *call, const Matrix &matrix, const T *input, int64_t stride, int64_t rows,
                           int32_t member, int32_t members, const Finish &finish) {
    const Part own = part(matrix.num_panels, member, members);
    product(matrix, input, stride, rows, own.from, own.to, finish);
    meet(call->model->crew);
}

template <typename T>
INLINE void shared_norm(const Call *call, const T *hidden, const float *weight, int64_t rows, int32_t member,
                        int32_t members) {
    const Model *model = call->model;
    const int64_t size = model->hidden_size;
    const Part own = part(rows, member, members);
    for (int64_t row = own.from; row < own.to; row++)
        normalize(hidden + row * size, weight, (T *)model->normed + row * size, size, model->epsilon);
    meet(model->crew);
}

/* Normalizes and rotates the heads of one token and stores its K and V. */
template <typename T> static void place_token(const Call *call, int64_t token) {
    const Model *model = call->model;
    const Step *step = call->step;
    const int64_t dim = model->head_dim, kv_size = model->kv_heads * dim;
    const int64_t rotated = model->heads + model->kv_heads;
    T *heads = (T *)step->heads + token * (rotated * dim + kv_size);
    const T *cosines = (const T *)step->cosines + step->positions[token] * dim;
    const T *sines = (const T *)step->sines + step->positions[token] * dim;
    for (int64_t head = 0; head < rotated; head++) {
        T *own = heads + head * dim;
        if (call->layer->qk_norm != nullptr) normalize(own, call->layer->qk_norm + head * dim, own, dim, model->epsilon);
        rotate(own, cosines, sines, dim);
    }
    const int64_t place = step->slots[token] * kv_size;
    memcpy((T *)call->layer->keys + place, heads + model->heads * dim, kv_size * sizeof(T));
    memcpy((T *)call->layer->values + place, heads + rotated * dim, kv_size * sizeof(T));
}

template <typename T> static void project_job(void *argument, int32_t member, int32_t members) {
    const Call *call = (const Call *)argument;
    const Model *model = call->model;
    const Step *step = call->step;
    const int64_t size = model->hidden_size, width = (model->heads + 2 * model->kv_heads) * model->head_dim;
    for (int64_t first = 0; first < step->tokens; first += GROUP) {
        const int64_t rows = smaller(GROUP, step->tokens - first);
        shared_norm(call, (const T *)step->hidden + first * size, call->layer->input_norm, rows, member, members);
        shared_product(call, call->layer->qkv, (const T *)model->normed, size, rows, member, members,
                       Store<T>{(T *)step->heads + first * width, width, width});
        const Part own = part(rows, member, members);
        for (int64_t row = own.from; row < own.to; row++) place_token<T>(call, first + row);
    }
}

template <typename T> static void finish_job(void *argument, int32_t member, int32_t members) {
    const Call *call = (const Call *)argument;
    const Model *model = call->model;
    const Layer *layer = call->layer;
    const int64_t size = model->hidden_size, inner_size = model->inner_size, seen_size = model->heads * model->head_dim;
    T *inner = (T *)model->inner;
    for (int64_t first = 0; first < call->step->tokens; first += GROUP) {
        const int64_t rows = smaller(GROUP, call->step->tokens - first);
        T *hidden = (T *)call->step->hidden + first * size;
        const Add<T> residual = {hidden, size, size};
        const T *seen = (const T *)call->input + first * seen_size;
        shared_product(call, layer->o, seen, seen_size, rows, member, members, residual);
        shared_norm(call, hidden, layer->post_norm, rows, member, members);
        shared_product(call, layer->gate_up, (const T *)model->normed, size, rows, member, members,
                       Gate<T>{inner, inner_size});
        shared_product(call, layer->down, inner, inner_size, rows, member, members, residual);
    }
}

template <typename T> static void logits_job(void *argument, int32_t member, int32_t members) {
    const Call *call = (const Call *)argument;
    const Model *model = call->model;
    const int64_t size = model->hidden_size;
    T *normed = (T *)model->normed;
    for (int64_t first = 0; first < call->count; first += GROUP) {
        const int64_t rows = smaller(GROUP, call->count - first);
        const Part own = part(rows, member, members);
        for (int64_t row = own.from; row < own.to; row++) {
            const int64_t token = call->rows == nullptr ? first + row : call->rows[first + row];
            normalize((const T *)call->step->hidden + token * size, model->final_norm, normed + row * size, size,
                      model->epsilon);
        }
        meet(model->crew);
        shared_product(call, model->lm_head, (const T *)normed, size, rows, member, members,
                       Widen<T>{call->output + first * model->vocab_size, model->vocab_size, model->vocab_size});
    }
}

template <typename T> static void embed(const Model *model, const Step *step, const int64_t *token_ids) {
    const int64_t size = model->hidden_size;
    for (int64_t token = 0; token < step->tokens; token++)
        memcpy((T *)step->hidden + token * size, (const T *)model->embedding + token_ids[token] * size, size * sizeof(T));
}

/* embed: the tokens' hidden states. project: heads, rotated, with K and V in the pool. finish: `seen` [tokens, heads,
 * head_dim] and the MLP into the hidden states. logits: [count, vocab] of the tokens `rows`, or of the first `count`. */
#define DEFINE(NAME, T)                                                                                                \
    extern "C" void embed_##NAME(const Model *model, const Step *step, const int64_t *token_ids) {                     \
        embed<T>(model, step, token_ids);                                                                              \
    }                                                                                                                  \
    extern "C" void project_##NAME(const Model *model, const Step *step, int64_t layer) {                              \
        Call call = {model, model->layers + layer, step, nullptr, nullptr, 0, nullptr};                                \
        work_together(model->crew, project_job<T>, &call);                                                             \
    }                                                                                                                  \
    extern "C" void finish_##NAME(const Model *model, const Step *step, int64_t layer, const void *seen) {             \
        Call call = {model, model->layers + layer, step, seen, nullptr, 0, nullptr};                                   \
        work_together(model->crew, finish_job<T>, &call);                                                              \
    }                                                                                                                  \
    extern "C" void logits_##NAME(const Model *model, const Step *step, const int64_t *rows, int64_t count,            \
                                  float *output) {                                                                     \
        Call call = {model, nullptr, step, nullptr, rows, count, output};                                              \
        work_together(model->crew, logits_job<T>, &call);                                                              \
    }

DEFINE(float32, float)
DEFINE(bfloat16, Bfloat16)

/* Whether these products are the fastest that this processor can do with many rows, too: not where it has matrix
 * units or where 16 floats are not one register. */
extern "C" int32_t suits_many_rows([[maybe_unused]] int32_t is_bfloat16) {
#if defined(__AVX512F__) && defined(__AVX512BF16__) && !defined(__AMX_BF16__)
    return 1;
#elif defined(__AVX512F__)
    return !is_bfloat16;
#else
    return 0;
#endif
}

/* -- single operations, for tests */

#define DEFINE_PARTS(NAME, T)                                                                                          \
    extern "C" void normalize_##NAME(const T *x, const float *weight, T *out, int64_t count, float epsilon) {          \
        normalize(x, weight, out, count, epsilon);                                                                     \
    }                                                                                                                  \
    extern "C" void rotate_##NAME(T *head, const T *cosines, const T *sines, int64_t head_dim) {                       \
        rotate(head, cosines, sines, head_dim);                                                                        \
    }                                                                                                                  \
    extern "C" void product_##NAME(const Matrix *matrix, const T *input, int64_t stride, int64_t rows, T *out,         \
                                   int64_t outputs) {                                                                  \
        product(*matrix, input, stride, rows, 0, matrix->num_panels, Store<T>{out, outputs, outputs});                 \
    }                                                                                                                  \
    extern "C" void gate_##NAME(const Matrix *matrix, const T *input, int64_t stride, int64_t rows, T *out) {          \
        product(*matrix, input, stride, rows, 0, matrix->num_panels, Gate<T>{out, matrix->num_panels * LANES});        \
    }

DEFINE_PARTS(float32, float)
DEFINE_PARTS(bfloat16, Bfloat16)
