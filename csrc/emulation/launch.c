/* SPDX-License-Identifier: Apache-2.0
 *
 * launch.c: a launch is checked, gets its threads, and ends when they have.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "block.h"

void launch_fail(launch *l, uccl_ep_status status, const char *text) {
    pthread_mutex_lock(&l->lock);
    if (l->status == UCCL_EP_OK) {
        l->status = status;
        if (l->text && l->text_bytes) snprintf(l->text, l->text_bytes, "%s", text);
    }
    pthread_mutex_unlock(&l->lock);
    atomic_store(&l->over, true);
}

__attribute__((format(printf, 3, 4))) static uccl_ep_status refuse(launch *l, uccl_ep_status status, const char *form,
                                                                   ...) {
    char text[256];
    va_list arguments;
    va_start(arguments, form);
    vsnprintf(text, sizeof text, form, arguments);
    va_end(arguments);
    launch_fail(l, status, text);
    return status;
}

/* The product of three counts of a launch, none of them zero; 0 if it is above `most`. */
static uint32_t volume(const uint32_t n[3], uint64_t most) {
    const uint64_t plane = (uint64_t)n[0] * n[1];
    if (!plane || !n[2] || plane > most || plane * n[2] > most) return 0;
    return (uint32_t)(plane * n[2]);
}

static uccl_ep_status check(launch *l) {
    const uccl_ep_emulation_launch_params *asked = l->asked;
    if (asked->warp_size != 1 && asked->warp_size != 32 && asked->warp_size != 64)
        return refuse(l, UCCL_EP_E_INVALID, "warps of %u lanes: 1, 32 and 64 are emulated", asked->warp_size);
    if (!asked->kernel) return refuse(l, UCCL_EP_E_INVALID, "no kernel");
    l->threads = volume(asked->block, UCCL_EP_EMULATION_MAX_THREADS);
    if (!l->threads)
        return refuse(l, UCCL_EP_E_INVALID, "a block of %u x %u x %u threads: 1 to %u", asked->block[0],
                      asked->block[1], asked->block[2], UCCL_EP_EMULATION_MAX_THREADS);
    l->blocks = volume(asked->grid, INT32_MAX);
    if (!l->blocks)
        return refuse(l, UCCL_EP_E_INVALID, "a grid of %u x %u x %u blocks", asked->grid[0], asked->grid[1],
                      asked->grid[2]);
    if (asked->shared_bytes > UCCL_EP_EMULATION_MAX_SHARED)
        return refuse(l, UCCL_EP_E_INVALID, "%llu bytes of shared memory: at most %u",
                      (unsigned long long)asked->shared_bytes, UCCL_EP_EMULATION_MAX_SHARED);
    if (asked->cooperative && l->blocks > UCCL_EP_EMULATION_MAX_RESIDENT)
        return refuse(l, UCCL_EP_E_UNSUPPORTED, "a cooperative launch of %u blocks: at most %u run at the same time",
                      l->blocks, UCCL_EP_EMULATION_MAX_RESIDENT);
    return UCCL_EP_OK;
}

static void *thread_main(void *argument) {
    blocks_run(argument);
    return NULL;
}

uccl_ep_status uccl_ep_emulation_launch(const uccl_ep_emulation_launch_params *asked, char *text, uint64_t text_bytes) {
    launch l = {.text = text, .text_bytes = text_bytes};
    pthread_mutex_init(&l.lock, NULL);
    if (text && text_bytes) *text = 0;
    /* A caller of an older header has a smaller structure: what it lacks is zero. */
    uccl_ep_emulation_launch_params known = {0};
    if (!asked || asked->size < offsetof(uccl_ep_emulation_launch_params, seed))
        return refuse(&l, UCCL_EP_E_INVALID, "the launch is none, or smaller than any version of it");
    memcpy(&known, asked, asked->size < sizeof known ? asked->size : sizeof known);
    l.asked = &known;
    if (check(&l) != UCCL_EP_OK) return l.status;

    const uint32_t n = l.blocks < UCCL_EP_EMULATION_MAX_RESIDENT ? l.blocks : UCCL_EP_EMULATION_MAX_RESIDENT;
    pthread_t *threads = calloc(n, sizeof *threads);
    if (!threads) return refuse(&l, UCCL_EP_E_NO_MEMORY, "no memory for %u blocks", n);
    uint32_t started = 0;
    for (; started < n; started++) {
        const int error = pthread_create(&threads[started], NULL, thread_main, &l);
        if (!error) continue;
        /* Blocks that wait for each other must all run; others can do with fewer. */
        if (known.cooperative || !started)
            refuse(&l, UCCL_EP_E_SYSTEM, "pthread_create for block %u of %u: %s", started, n, strerror(error));
        break;
    }
    for (uint32_t i = 0; i < started; i++) pthread_join(threads[i], NULL);
    free(threads);
    pthread_mutex_destroy(&l.lock);
    return l.status;
}
