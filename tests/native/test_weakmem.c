/* SPDX-License-Identifier: Apache-2.0
 *
 * test_weakmem.c: the explorer of weakmem.h allows exactly what the memory model allows, on the litmus tests of the
 * field.
 *
 * Each program has up to four threads of a few accesses. What its loads return is gathered from all executions and
 * compared with the set of results that release/acquire C11 allows (without load buffering, see weakmem.h).
 */
#include "weakmem.h"

enum { X, Y, D, LOCATIONS }; /* X and Y are atomic, D is plain */
enum { RLX = __ATOMIC_RELAXED, ACQ = __ATOMIC_ACQUIRE, REL = __ATOMIC_RELEASE };

static uint64_t memory[LOCATIONS];

/* One access, packed into the argument of a call. Loads are numbered through the program: they fill the result. */
#define ACCESS(kind, where, value, order, load)                                                                        \
    {                                                                                                                  \
        step,                                                                                                          \
            (uint64_t)(kind) | (uint64_t)(where) << 8 | (uint64_t)(value) << 16 | (uint64_t)(order) << 24 |            \
                (uint64_t)(load) << 32,                                                                                \
            0                                                                                                          \
    }
#define R(where, order, load) ACCESS(WM_LOAD, where, 0, order, load)
#define W(where, value, order) ACCESS(WM_STORE, where, value, order, 0)
#define ADD(where, value, order, load) ACCESS(WM_ADD, where, value, order, load)
#define FENCE(order) ACCESS(WM_FENCE, 0, 0, order, 0)
#define AWAIT(where, value, order) ACCESS(WM_LOAD, where, value, order, 15)
#define PLAIN_W(value) ACCESS(WM_WRITE, D, value, 0, 0)
#define PLAIN_R(load) ACCESS(WM_READ, D, 0, 0, load)

static int step(uint64_t *reg, uint64_t argument) {
    const void *where = &memory[argument >> 8 & 255];
    const uint64_t value = argument >> 16 & 255, load = argument >> 32;
    const int order = (int)(argument >> 24 & 255);
    switch ((wm_kind)(argument & 255)) {
    case WM_LOAD:
        if (load == 15) return wm_load(where, order) == value;
        reg[0] |= wm_load(where, order) << 4 * load;
        break;
    case WM_STORE:
        wm_store(where, value, order);
        break;
    case WM_ADD:
        reg[0] |= wm_fetch_add(where, value, order) << 4 * load;
        break;
    case WM_FENCE:
        wm_fence(order);
        break;
    case WM_READ:
        reg[0] |= wm_read(where) << 4 * load;
        break;
    case WM_WRITE:
        wm_write(where, value);
        break;
    }
    return 1;
}

/* A result has one hexadecimal digit a load, load 0 the lowest; then, if asked for, the last values of X and Y. */
static uint64_t results[64];
static size_t found;
static int with_memory;

static void gather(const wm_state *end) {
    uint64_t result = 0;
    for (unsigned t = 0; t < wm.threads; t++) result |= end->thread[t].reg[0];
    for (unsigned l = 0; l < 2 && with_memory; l++)
        result |= end->location[l].history[end->location[l].count - 1].value << 4 * l;
    for (size_t i = 0; i < found; i++) {
        if (results[i] == result) return;
    }
    CHECK(found < sizeof(results) / sizeof(results[0]), "too many results");
    results[found++] = result;
}

typedef struct litmus {
    const char *name;
    const char *error;    /* what is found, NULL: nothing */
    const char *expected; /* results in hexadecimal, ascending */
    int with_memory;
    wm_step threads[4][5]; /* a thread ends at a step without a call */
} litmus;

static const litmus tests[] = {
    {"message passing, release and acquire",
     NULL,
     "0 10 11",
     0,
     {{W(X, 1, RLX), W(Y, 1, REL)}, {R(Y, ACQ, 0), R(X, RLX, 1)}}},
    {"message passing, store relaxed",
     NULL,
     "0 1 10 11",
     0,
     {{W(X, 1, RLX), W(Y, 1, RLX)}, {R(Y, ACQ, 0), R(X, RLX, 1)}}},
    {"message passing, load relaxed",
     NULL,
     "0 1 10 11",
     0,
     {{W(X, 1, RLX), W(Y, 1, REL)}, {R(Y, RLX, 0), R(X, RLX, 1)}}},
    {"message passing, fences",
     NULL,
     "0 10 11",
     0,
     {{W(X, 1, RLX), FENCE(REL), W(Y, 1, RLX)}, {R(Y, RLX, 0), FENCE(ACQ), R(X, RLX, 1)}}},
    {"message passing, no acquire fence",
     NULL,
     "0 1 10 11",
     0,
     {{W(X, 1, RLX), FENCE(REL), W(Y, 1, RLX)}, {R(Y, RLX, 0), FENCE(REL), R(X, RLX, 1)}}},
    {"message passing of plain data", NULL, "5", 0, {{PLAIN_W(5), W(Y, 1, REL)}, {AWAIT(Y, 1, ACQ), PLAIN_R(0)}}},
    {"the same, store relaxed", "data race", "", 0, {{PLAIN_W(5), W(Y, 1, RLX)}, {AWAIT(Y, 1, ACQ), PLAIN_R(0)}}},
    {"the same, load relaxed", "data race", "", 0, {{PLAIN_W(5), W(Y, 1, REL)}, {AWAIT(Y, 1, RLX), PLAIN_R(0)}}},
    {"plain read before a write, handed over",
     NULL,
     "0",
     0,
     {{PLAIN_R(0), W(Y, 1, REL)}, {AWAIT(Y, 1, ACQ), PLAIN_W(5)}}},
    {"plain read before a write, relaxed",
     "data race",
     "",
     0,
     {{PLAIN_R(0), W(Y, 1, RLX)}, {AWAIT(Y, 1, ACQ), PLAIN_W(5)}}},
    {"two plain reads do not race", NULL, "0", 0, {{PLAIN_R(0)}, {PLAIN_R(1)}}},
    {"store buffering", NULL, "0 1 10 11", 0, {{W(X, 1, REL), R(Y, ACQ, 0)}, {W(Y, 1, REL), R(X, ACQ, 1)}}},
    {"load buffering (the model leaves out 11)",
     NULL,
     "0 1 10",
     0,
     {{R(X, RLX, 0), W(Y, 1, RLX)}, {R(Y, RLX, 1), W(X, 1, RLX)}}},
    {"coherence of two loads", NULL, "0 10 11", 0, {{W(X, 1, RLX)}, {R(X, RLX, 0), R(X, RLX, 1)}}},
    {"coherence of two stores",
     NULL,
     "0 10 11 20 21 22",
     0,
     {{W(X, 1, RLX), W(X, 2, RLX)}, {R(X, RLX, 0), R(X, RLX, 1)}}},
    {"two readers agree on the order of stores",
     NULL,
     "11 21 22",
     0,
     {{W(X, 1, RLX)}, {W(X, 2, RLX)}, {AWAIT(X, 1, RLX), R(X, RLX, 0)}, {AWAIT(X, 2, RLX), R(X, RLX, 1)}}},
    {"2+2W: both first stores may stay",
     NULL,
     "11 12 21 22",
     1,
     {{W(X, 1, REL), W(Y, 2, REL)}, {W(Y, 1, REL), W(X, 2, REL)}}},
    {"independent readers may disagree",
     NULL,
     "0 1 10 11 100 101 110 111 1000 1001 1010 1011 1100 1101 1110 1111",
     0,
     {{W(X, 1, REL)}, {W(Y, 1, REL)}, {R(X, ACQ, 0), R(Y, ACQ, 1)}, {R(Y, ACQ, 2), R(X, ACQ, 3)}}},
    {"causality over a third thread",
     NULL,
     "1",
     0,
     {{W(X, 1, RLX), W(Y, 1, REL)}, {AWAIT(Y, 1, ACQ), W(Y, 2, REL)}, {AWAIT(Y, 2, ACQ), R(X, RLX, 0)}}},
    {"additions are atomic", NULL, "1 10", 0, {{ADD(X, 1, RLX, 0)}, {ADD(X, 1, RLX, 1)}}},
    {"a load and a store are no addition",
     NULL,
     "0 1 10",
     0,
     {{R(X, RLX, 0), W(X, 1, RLX)}, {R(X, RLX, 1), W(X, 1, RLX)}}},
    {"nothing comes between an addition and what it read", NULL, "2 2003", 1, {{ADD(X, 1, RLX, 3)}, {W(X, 2, RLX)}}},
    {"a relaxed addition continues a release",
     NULL,
     "105",
     0,
     {{PLAIN_W(5), W(X, 1, REL)}, {AWAIT(X, 1, RLX), ADD(X, 1, RLX, 2)}, {AWAIT(X, 2, ACQ), PLAIN_R(0)}}},
    {"a relaxed store does not",
     "data race",
     "",
     0,
     {{PLAIN_W(5), W(X, 1, REL)}, {AWAIT(X, 1, RLX), W(X, 2, RLX)}, {AWAIT(X, 2, ACQ), PLAIN_R(0)}}},
    {"waiting for what nobody does", "stuck", "", 0, {{W(X, 1, REL)}, {AWAIT(X, 2, ACQ)}}},
};

static int ascending(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 60);
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++) {
        const litmus *l = &tests[i];
        wm_begin();
        wm_atomic(&memory[X], 0, "x");
        wm_atomic(&memory[Y], 0, "y");
        wm_nonatomic(&memory[D]);
        for (unsigned t = 0; t < 4 && l->threads[t][0].call; t++) {
            unsigned length = 0;
            while (length < 5 && l->threads[t][length].call) length++;
            wm_spawn(l->threads[t], length);
        }
        wm.finish = gather;
        with_memory = l->with_memory;
        found = 0;
        const double executions = wm_run();
        char text[512] = "";
        qsort(results, found, sizeof(results[0]), ascending);
        for (size_t r = 0; r < found; r++)
            snprintf(text + strlen(text), sizeof(text) - strlen(text), r ? " %" PRIx64 : "%" PRIx64, results[r]);
        printf("%-52s %6.0f executions: %s%.50s\n", l->name, executions, text, wm.error);
        if (l->error) {
            CHECK(strncmp(wm.error, l->error, strlen(l->error)) == 0, "%s: '%s'", l->name, wm.error);
        } else {
            CHECK(!wm.error[0], "%s: %s", l->name, wm.error);
            CHECK(strcmp(text, l->expected) == 0, "%s:\n got     %s\n expected %s", l->name, text, l->expected);
        }
    }
    return test_end();
}
