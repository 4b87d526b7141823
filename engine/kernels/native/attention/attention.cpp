/* Attention over a pool that has the dtype of the queries (attend.h).
 *
 * Compiled on first use by engine/kernels/native_attention.py, which also fills the plan.
 */
#include "attend.h"

extern "C" void attend_float32(const float *queries, int64_t query_stride, const float *keys, const float *values,
                               const float *sinks, float *out, const Plan *plan) {
    attend<float, float>(*plan, {queries, query_stride, keys, values, sinks, out});
}

extern "C" void attend_bfloat16(const Bfloat16 *queries, int64_t query_stride, const Bfloat16 *keys,
                                const Bfloat16 *values, const float *sinks, Bfloat16 *out, const Plan *plan) {
    attend<Bfloat16, Bfloat16>(*plan, {queries, query_stride, keys, values, sinks, out});
}
