/* Starts and ends a crew (see crew.h). */
#pragma once

#include <stdlib.h>

#include <new>

#include "crew.h"

static void *help(void *own) {
    Crew *crew = (Crew *)own;
    for (uint32_t seen = 0;;) {
        wait_while(crew->jobs, seen);
        seen = crew->jobs.load(std::memory_order_acquire);
        if (crew->leaving) return nullptr;
        while (take_chunk(crew)) {
        }
    }
}

static void dismiss(Crew *crew, int32_t helpers) {
    crew->leaving = true;
    crew->jobs.fetch_add(1, std::memory_order_release);
    crew->jobs.notify_all();
    for (int32_t helper = 0; helper < helpers; helper++) pthread_join(crew->threads[helper], nullptr);
    free(crew);
}

extern "C" void crew_end(Crew *crew) { dismiss(crew, crew->members - 1); }

/* Starts a crew of `members` threads, including the caller. Returns null if threads or memory are not available. */
extern "C" Crew *crew_begin(int32_t members) {
    void *memory = calloc(1, sizeof(Crew) + members * sizeof(pthread_t));
    if (memory == nullptr) return nullptr;
    Crew *crew = new (memory) Crew{};
    crew->members = members;
    for (int32_t helper = 0; helper + 1 < members; helper++) {
        if (pthread_create(&crew->threads[helper], nullptr, help, crew) != 0) {
            dismiss(crew, helper);
            return nullptr;
        }
    }
    return crew;
}
