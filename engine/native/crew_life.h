/* How a crew begins and ends (crew.h is how it works). */
#pragma once

#include <stdlib.h>

#include <new>

#include "crew.h"

static void *serve(void *own) {
    const Recruit recruit = *(Recruit *)own;
    free(own);
    Crew *crew = recruit.crew;
    for (uint32_t job = 0;; job++) {
        wait_for_change(crew->started, job);
        if (crew->leaving) return nullptr;
        crew->job(crew->argument, recruit.member, crew->members);
        meet(crew);
    }
}

static void dismiss(Crew *crew, int32_t threads) {
    crew->leaving = true;
    crew->started.fetch_add(1, std::memory_order_release);
    crew->started.notify_all();
    for (int32_t thread = 0; thread < threads; thread++) pthread_join(crew->threads[thread], nullptr);
    free(crew);
}

extern "C" void crew_end(Crew *crew) { dismiss(crew, crew->members - 1); }

/* Null where threads or memory cannot be had. */
extern "C" Crew *crew_begin(int32_t members) {
    void *memory = calloc(1, sizeof(Crew) + members * sizeof(pthread_t));
    if (memory == nullptr) return nullptr;
    Crew *crew = new (memory) Crew{};
    crew->members = members;
    for (int32_t member = 1; member < members; member++) {
        Recruit *recruit = (Recruit *)malloc(sizeof(Recruit));
        if (recruit != nullptr) *recruit = {crew, member};
        if (recruit == nullptr || pthread_create(&crew->threads[member - 1], nullptr, serve, recruit) != 0) {
            free(recruit);
            dismiss(crew, member - 1);
            return nullptr;
        }
    }
    return crew;
}
