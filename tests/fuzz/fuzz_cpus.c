/* SPDX-License-Identifier: Apache-2.0
 *
 * Lists of CPUs such as "2,5-7": whatever is accepted reads the same by a second, simpler reader.
 */
#define _GNU_SOURCE
#include <sched.h>

#include "core/internal.h"
#include "fuzz.h"

/* Digits only: returns -1 where there is no number, or one beyond all CPUs. */
static long plain_number(const char **at) {
    long value = 0;
    if (**at < '0' || **at > '9') return -1;
    for (; **at >= '0' && **at <= '9'; (*at)++)
        if ((value = value * 10 + (**at - '0')) >= CPU_SETSIZE) return -1;
    return value;
}

/* The CPU, or -1: not a list, or a shorter one. */
static int second_reader(const char *text, uint32_t index) {
    uint32_t seen = 0;
    int found = -1;
    for (const char *at = text;; at++) {
        const long first = plain_number(&at);
        long last = first;
        if (first < 0) return -1;
        if (*at == '-') {
            at++;
            last = plain_number(&at);
            if (last < first) return -1;
        }
        for (long cpu = first; cpu <= last; cpu++)
            if (seen++ == index) found = (int)cpu;
        if (!*at) return found;
        if (*at != ',') return -1;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = fuzz_begin(data, size);
    char text[256];
    const uint32_t index = fuzz_below(&in, 64);
    fuzz_string(&in, text, sizeof text);
    int cpu = -2;
    const uccl_ep_status status = parse_cpus(text, index, &cpu);
    const int expected = second_reader(text, index);
    if (status == UCCL_EP_OK) {
        FUZZ_CHECK(cpu == expected, "'%s'[%u] is %d, and by the second reader %d", text, index, cpu, expected);
    } else {
        FUZZ_CHECK(status == UCCL_EP_E_INVALID && expected == -1, "'%s'[%u] was refused", text, index);
        FUZZ_CHECK(uccl_ep_last_error()->text[0], "an error without words");
    }
    return 0;
}
