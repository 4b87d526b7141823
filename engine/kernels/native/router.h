/* Choice of the experts of one token from its router logits, as in transformers. */
#pragma once

#include <math.h>
#include <stdint.h>

constexpr int64_t MOST_EXPERTS = 1024;
constexpr int64_t MOST_EXPERTS_PER_TOKEN = 64;

struct Router {
    int64_t experts, per_token; /* 0: every layer has one MLP */
    int64_t groups, chosen_groups; /* experts are chosen from the `chosen_groups` best of `groups` */
    int64_t normalised;         /* 1: a token's weights of experts have the sum 1 before they are multiplied by `scaling` */
    int64_t is_grouped;         /* 1: DeepSeek's, whose logits are not rounded */
    double scaling;
};

/* Returns the index of the highest value that is not taken, or of any if one is not a number. */
static int64_t highest_of(const float *values, const bool *taken, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    return best;
}

/* Marks the experts of all but the best groups as taken. A group's score is its highest one, or the sum of its two highest
 * ones if there are corrections. */
static void take_groups(const float *scores, const Router &router, bool has_corrections, bool *taken) {
    const int64_t size = router.experts / router.groups;
    float sums[MOST_EXPERTS];
    bool chosen[MOST_EXPERTS] = {};
    for (int64_t group = 0; group < router.groups; group++) {
        const float *own = scores + group * size;
        bool *passed = taken + group * size;
        const int64_t first = highest_of(own, passed, size);
        passed[first] = true;
        sums[group] = has_corrections ? own[first] + own[highest_of(own, passed, size)] : own[first];
        passed[first] = false;
    }
    for (int64_t n = 0; n < router.chosen_groups; n++) chosen[highest_of(sums, chosen, router.groups)] = true;
    for (int64_t e = 0; e < router.experts; e++) taken[e] = !chosen[e / size];
}

/* Replaces a row of logits by the weights of the chosen experts, and -1 for the others. Scores are the softmax, or
 * sigmoids with `corrections`, which affect the choice only. */
static void choose(float *row, const Router &router, const float *corrections) {
    int64_t best[MOST_EXPERTS_PER_TOKEN];
    float scores[MOST_EXPERTS], values[MOST_EXPERTS_PER_TOKEN], most = row[0], total = 0.0f, sum = 0.0f;
    bool taken[MOST_EXPERTS] = {};
    for (int64_t e = 1; e < router.experts; e++) most = row[e] > most ? row[e] : most;
    for (int64_t e = 0; e < router.experts; e++)
        if (corrections != nullptr) row[e] = 1.0f / (1.0f + expf(-row[e]));
        else total += row[e] = expf(row[e] - most);
    for (int64_t e = 0; e < router.experts; e++)
        scores[e] = corrections != nullptr ? row[e] + corrections[e] : row[e] /= total;
    if (router.chosen_groups < router.groups) take_groups(scores, router, corrections != nullptr, taken);
    for (int64_t n = 0; n < router.per_token; n++) {
        best[n] = highest_of(scores, taken, router.experts);
        taken[best[n]] = true;
        sum += values[n] = row[best[n]];
    }
    for (int64_t e = 0; e < router.experts; e++) row[e] = -1.0f;
    for (int64_t n = 0; n < router.per_token; n++) /* 1e-20: of transformers' DeepSeek-V3; other sums are far above */
        row[best[n]] = (router.normalised ? values[n] / (sum + 1e-20f) : values[n]) * (float)router.scaling;
}
