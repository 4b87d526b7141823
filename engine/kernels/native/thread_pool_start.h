/* Starts and ends a pool (see thread_pool.h). */
#pragma once

#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <new>

#include "thread_pool.h"

static void *helper_loop(void *own) {
    ThreadPool *pool = ((Helper *)own)->pool;
    for (uint32_t seen = 0;;) {
        wait_while(pool->jobs, seen);
        seen = pool->jobs.load(std::memory_order_acquire);
        if (pool->stopping) return nullptr;
        while (take_chunk(pool)) {
        }
    }
}

/* Waits until another long job than `seen` was begun. The next one of a step follows soon, and waking up takes longer than many
 * jobs, so a borrowing thread keeps its core for a while as long as it is idle. */
static void wait_for_long_job(ThreadPool *pool, int32_t number, uint32_t seen) {
    for (const int64_t since = now_ns(); number < idle_cores(pool) && now_ns() - since < AWAKE_NS; sched_yield())
        for (int32_t spin = 0; spin < 100; spin++) {
            if (pool->long_jobs.load(std::memory_order_acquire) != seen) return;
            pause_briefly();
        }
    pool->long_jobs.wait(seen, std::memory_order_acquire);
}

static void *borrower_loop(void *own) {
    Helper *helper = (Helper *)own;
    ThreadPool *pool = helper->pool;
    const int32_t number = (int32_t)(helper - borrower(pool, 0));
    helper->id = (int32_t)syscall(SYS_gettid);
    for (uint32_t seen = 0;;) {
        wait_for_long_job(pool, number, seen);
        seen = pool->long_jobs.load(std::memory_order_acquire);
        if (pool->stopping) return nullptr;
        helper->is_working.store(true, std::memory_order_release);
        while (number < idle_cores(pool) && take_chunk(pool)) {
        }
        helper->is_working.store(false, std::memory_order_release);
    }
}

static void stop_helpers(ThreadPool *pool, int32_t helpers) {
    pool->stopping = true;
    for (std::atomic<uint32_t> *jobs : {&pool->jobs, &pool->long_jobs}) {
        jobs->fetch_add(1, std::memory_order_release);
        jobs->notify_all();
    }
    for (int32_t each = 0; each < helpers; each++) pthread_join(pool->helpers[each].thread, nullptr);
    free(pool);
}

extern "C" void thread_pool_stop(ThreadPool *pool) {
    stop_helpers(pool, pool->num_threads - 1 + pool->num_borrowers);
}

/* Starts a pool of `num_threads` threads, including the caller, which borrows more if it is given the table of the
 * host's workers. Returns null if threads or memory are not available. */
extern "C" ThreadPool *thread_pool_start(int32_t num_threads, const Worker *workers) {
    cpu_set_t cores = {};
    const int32_t more = workers != nullptr && sched_getaffinity(0, sizeof cores, &cores) == 0
                             ? CPU_COUNT(&cores) - num_threads
                             : 0;
    const int32_t borrowers = more < 0 ? 0 : more < MOST_BORROWERS ? more : MOST_BORROWERS;
    void *memory = calloc(1, sizeof(ThreadPool) + (num_threads + borrowers) * sizeof(Helper));
    if (memory == nullptr) return nullptr;
    ThreadPool *pool = new (memory) ThreadPool{};
    pool->num_threads = num_threads;
    pool->num_borrowers = borrowers;
    pool->workers = workers;
    pool->cores = cores;
    for (int32_t each = 0; each < num_threads - 1 + borrowers; each++) {
        Helper *helper = new (&pool->helpers[each]) Helper{};
        helper->pool = pool;
        if (pthread_create(&helper->thread, nullptr, each < num_threads - 1 ? helper_loop : borrower_loop, helper) != 0) {
            stop_helpers(pool, each);
            return nullptr;
        }
    }
    return pool;
}
