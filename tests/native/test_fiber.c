/* SPDX-License-Identifier: Apache-2.0
 *
 * test_fiber.c: changing stacks by swapcontext, which machines without code of their own in fiber.c take.
 */
#define UCCL_EP_FIBER_PORTABLE 1
#include "emulation/fiber.c"

#include "testing.h"

#define FIBERS 5
#define STACK (128u << 10)

typedef struct member {
    fiber_home *home;
    fiber *self;
    uint64_t sum;
    double product;
} member;

static void body(void *argument) {
    member *m = argument;
    volatile double product = 1.5;
    for (uint64_t i = 1; i <= 100; i++) {
        m->sum += i;
        product = product * 2 - 1;
        fiber_leave(m->home, m->self);
    }
    m->product = product;
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 60);
    fiber_home home = {0};
    fiber fibers[FIBERS];
    member members[FIBERS];
    char *stacks = malloc(FIBERS * STACK);
    CHECK(stacks, "out of memory");
    for (uint32_t i = 0; i < FIBERS; i++) {
        members[i] = (member){&home, &fibers[i], 0, 0};
        CHECK(fiber_prepare(&fibers[i], stacks + i * STACK, STACK, body, &members[i]), "out of memory");
    }
    for (uint32_t round = 0; round < 101; round++)
        for (uint32_t i = 0; i < FIBERS - 1; i++) {
            CHECK(!fibers[i].done, "fiber %u ended in round %u", i, round);
            fiber_enter(&home, &fibers[i]);
        }
    for (uint32_t i = 0; i < FIBERS - 1; i++) {
        CHECK(fibers[i].done, "fiber %u", i);
        CHECK_EQ(members[i].sum, 5050);
        CHECK(members[i].product > 1e29, "%g", members[i].product);
    }
    fiber_enter(&home, &fibers[FIBERS - 1]); /* one that never ends */
    for (uint32_t i = 0; i < FIBERS; i++) fiber_forget(&fibers[i]);
    free(stacks);
    return test_end();
}
