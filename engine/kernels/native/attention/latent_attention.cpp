/* Attention to latents (latents.h), for queries of type QUERIES and a pool of POOL. Compiler flags define both, so that
 * only the combination in use is compiled. */
#include "latents.h"

#if !defined(QUERIES) /* for tools that only parse this file */
#define QUERIES Bfloat16
#define POOL Int8
#endif

extern "C" void attend(const QUERIES *queries, int64_t query_stride, const POOL *keys, const POOL *values,
                       const float *sinks, QUERIES *out, const Plan *plan) {
    attend_latents<QUERIES, POOL>(*plan, {queries, query_stride, keys, values, sinks, out});
}
