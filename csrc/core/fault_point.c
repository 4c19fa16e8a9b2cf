/* SPDX-License-Identifier: Apache-2.0
 *
 * fault_point.c: which fault points are on. Empty in the product.
 */
#include "fault_point.h"

#ifdef UCCL_EP_FAULT_POINTS
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

unsigned char uccl_ep_fault_on[UCCL_EP_FAULT_COUNT];
static const void *held_channel;
static uint64_t held_behind;

void fault_hold(const void *channel, uint64_t ticket) {
    __atomic_store_n(&held_behind, ticket, __ATOMIC_RELAXED);
    __atomic_store_n(&held_channel, channel, __ATOMIC_RELEASE);
}

bool fault_holds(const void *channel, uint64_t ticket) {
    return __atomic_load_n(&held_channel, __ATOMIC_ACQUIRE) == channel &&
           (int64_t)(ticket - __atomic_load_n(&held_behind, __ATOMIC_RELAXED)) > 0;
}

__attribute__((constructor)) static void read_environment(void) {
    static const char *const names[] = {
#define NAME(name, clause, text) #name,
        UCCL_EP_FAULT_POINT_TABLE(NAME)
#undef NAME
    };
    const char *value = getenv("UCCL_EP_FAULT_POINTS");
    while (value && *value) {
        const size_t n = strcspn(value, ",");
        int found = 0;
        for (unsigned i = 0; i < UCCL_EP_FAULT_COUNT; i++)
            if (strlen(names[i]) == n && !strncmp(names[i], value, n)) found = uccl_ep_fault_on[i] = 1;
        if (!found) {
            fprintf(stderr, "UCCL_EP_FAULT_POINTS: no fault point '%.*s'\n", (int)n, value);
            exit(2);
        }
        value += n + (value[n] == ',');
    }
}
#else
typedef int uccl_ep_no_fault_points;
#endif
