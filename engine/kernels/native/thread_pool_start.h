/* Starts and ends a pool (see thread_pool.h). */
#pragma once

#include <stdlib.h>

#include <new>

#include "thread_pool.h"

static void *helper_loop(void *own) {
    ThreadPool *pool = (ThreadPool *)own;
    for (uint32_t seen = 0;;) {
        wait_while(pool->jobs, seen);
        seen = pool->jobs.load(std::memory_order_acquire);
        if (pool->stopping) return nullptr;
        while (take_chunk(pool)) {
        }
    }
}

static void stop_helpers(ThreadPool *pool, int32_t helpers) {
    pool->stopping = true;
    pool->jobs.fetch_add(1, std::memory_order_release);
    pool->jobs.notify_all();
    for (int32_t helper = 0; helper < helpers; helper++) pthread_join(pool->threads[helper], nullptr);
    free(pool);
}

extern "C" void thread_pool_stop(ThreadPool *pool) { stop_helpers(pool, pool->num_threads - 1); }

/* Starts a pool of `num_threads` threads, including the caller. Returns null if threads or memory are not available. */
extern "C" ThreadPool *thread_pool_start(int32_t num_threads) {
    void *memory = calloc(1, sizeof(ThreadPool) + num_threads * sizeof(pthread_t));
    if (memory == nullptr) return nullptr;
    ThreadPool *pool = new (memory) ThreadPool{};
    pool->num_threads = num_threads;
    for (int32_t helper = 0; helper + 1 < num_threads; helper++) {
        if (pthread_create(&pool->threads[helper], nullptr, helper_loop, pool) != 0) {
            stop_helpers(pool, helper);
            return nullptr;
        }
    }
    return pool;
}
