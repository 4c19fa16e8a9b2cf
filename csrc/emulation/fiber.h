/* SPDX-License-Identifier: Apache-2.0
 *
 * fiber.h: a stack of one's own on the caller's thread, and the way there and back.
 */
#ifndef UCCL_EP_EMULATION_FIBER_H
#define UCCL_EP_EMULATION_FIBER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fiber {
    void *context; /* where it stopped; portable: its ucontext_t */
    char *stack;
    size_t stack_bytes;
    void (*body)(void *argument);
    void *argument;
    bool done;
    void *fake_stack, *tsan; /* what sanitizers know of it */
} fiber;

/* What a thread keeps while it is inside a fiber. */
typedef struct fiber_home {
    void *context;
    void *fake_stack, *tsan;
    const void *bottom;
    size_t bytes;
} fiber_home;

/* False: no memory (portable form). The stack is the caller's. */
bool fiber_prepare(fiber *f, char *stack, size_t stack_bytes, void (*body)(void *argument), void *argument);
void fiber_forget(fiber *f); /* also of one that has not ended: its stack is then never looked at again */

/* Go on with f until it calls fiber_leave, or its body returns (f->done). */
void fiber_enter(fiber_home *home, fiber *f);
void fiber_leave(fiber_home *home, fiber *f);

/* ThreadSanitizer: fibers are not ordered by taking turns; what orders them says so. */
void fiber_release(void *what);
void fiber_acquire(void *what);

#endif
