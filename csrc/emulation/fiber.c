/* SPDX-License-Identifier: Apache-2.0
 *
 * fiber.c: changing stacks.
 *
 * swapcontext saves the signal mask, which is a system call each way and would be most of what emulation costs; so
 * machines with many users have a few instructions here, and UCCL_EP_FIBER_PORTABLE, or another machine, takes
 * swapcontext.
 *
 * Under ThreadSanitizer the library's own files are compiled without it (CMakeLists.txt), and UCCL_EP_EMULATION_TSAN
 * says that its run-time is there.
 */
#define _GNU_SOURCE
#include "fiber.h"

#include <stdlib.h>
#include <string.h>

#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(UCCL_EP_FIBER_PORTABLE)
#define UCCL_EP_FIBER_PORTABLE 1
#endif
#ifdef UCCL_EP_FIBER_PORTABLE
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define FIBER_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FIBER_ASAN 1
#endif
#endif
#ifdef FIBER_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef UCCL_EP_EMULATION_TSAN
#include <sanitizer/tsan_interface.h>
#define NO_SYNC 1u /* __tsan_switch_to_fiber_no_sync */
#endif

static _Thread_local struct {
    fiber_home *home;
    fiber *entered;
} turn;

/* The first thing on a new stack. */
__attribute__((noreturn, used)) static void begin(void) {
    fiber_home *home = turn.home;
    fiber *f = turn.entered;
#ifdef FIBER_ASAN
    __sanitizer_finish_switch_fiber(NULL, &home->bottom, &home->bytes);
#endif
    f->body(f->argument);
    f->done = true;
    fiber_leave(home, f);
    abort();
}

#ifdef UCCL_EP_FIBER_PORTABLE

static void change(void **from, void *to) {
    ucontext_t here;
    if (!*from) *from = &here; /* the thread's own */
    swapcontext(*from, to);
}

bool fiber_prepare(fiber *f, char *stack, size_t stack_bytes, void (*body)(void *argument), void *argument) {
    memset(f, 0, sizeof *f);
    ucontext_t *context = calloc(1, sizeof *context);
    if (!context) return false;
    getcontext(context);
    context->uc_stack.ss_sp = stack;
    context->uc_stack.ss_size = stack_bytes;
    makecontext(context, (void (*)(void))begin, 0);
    *f = (fiber){.context = context, .stack = stack, .stack_bytes = stack_bytes, .body = body, .argument = argument};
#else

/* change(void **from, void *to): save what a callee keeps, on the stack; *from = the stack pointer; take up `to`. */
void uccl_ep_fiber_change(void **from, void *to) __attribute__((visibility("hidden")));
#define change uccl_ep_fiber_change

#if defined(__x86_64__)
#define SAVED_WORDS 8 /* floating-point control, r15, r14, r13, r12, rbx, rbp, return address */
#define RETURN_WORD 7
__asm__(".text\n"
        ".globl uccl_ep_fiber_change\n"
        ".hidden uccl_ep_fiber_change\n"
        ".type uccl_ep_fiber_change, @function\n"
        "uccl_ep_fiber_change:\n"
        "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n    pushq %r15\n"
        "    subq $8, %rsp\n    stmxcsr (%rsp)\n    fnstcw 4(%rsp)\n"
        "    movq %rsp, (%rdi)\n    movq %rsi, %rsp\n"
        "    ldmxcsr (%rsp)\n    fldcw 4(%rsp)\n    addq $8, %rsp\n"
        "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n"
        "    ret\n"
        ".size uccl_ep_fiber_change, . - uccl_ep_fiber_change\n");
#else
#define SAVED_WORDS 20 /* x19 to x30, d8 to d15 */
#define RETURN_WORD 11
__asm__(".text\n"
        ".globl uccl_ep_fiber_change\n"
        ".hidden uccl_ep_fiber_change\n"
        ".type uccl_ep_fiber_change, %function\n"
        "uccl_ep_fiber_change:\n"
        "    sub sp, sp, #160\n"
        "    stp x19, x20, [sp]\n    stp x21, x22, [sp, #16]\n    stp x23, x24, [sp, #32]\n"
        "    stp x25, x26, [sp, #48]\n    stp x27, x28, [sp, #64]\n    stp x29, x30, [sp, #80]\n"
        "    stp d8, d9, [sp, #96]\n    stp d10, d11, [sp, #112]\n    stp d12, d13, [sp, #128]\n"
        "    stp d14, d15, [sp, #144]\n"
        "    mov x9, sp\n    str x9, [x0]\n    mov sp, x1\n"
        "    ldp x19, x20, [sp]\n    ldp x21, x22, [sp, #16]\n    ldp x23, x24, [sp, #32]\n"
        "    ldp x25, x26, [sp, #48]\n    ldp x27, x28, [sp, #64]\n    ldp x29, x30, [sp, #80]\n"
        "    ldp d8, d9, [sp, #96]\n    ldp d10, d11, [sp, #112]\n    ldp d12, d13, [sp, #128]\n"
        "    ldp d14, d15, [sp, #144]\n"
        "    add sp, sp, #160\n"
        "    ret\n"
        ".size uccl_ep_fiber_change, . - uccl_ep_fiber_change\n");
#endif

bool fiber_prepare(fiber *f, char *stack, size_t stack_bytes, void (*body)(void *argument), void *argument) {
    /* A frame as change() leaves it, which returns into begin(); a zero above it ends a debugger's walk. The stack is
     * 16-byte aligned where begin() is entered, less the return address on x86. */
    uintptr_t *words = (uintptr_t *)(((uintptr_t)stack + stack_bytes) & ~(uintptr_t)15) - 4 - SAVED_WORDS;
    memset(words, 0, (SAVED_WORDS + 4) * sizeof *words);
#if defined(__x86_64__)
    words++;
    words[0] = 0x037f00001f80u; /* the defaults: all exceptions masked */
#endif
    words[RETURN_WORD] = (uintptr_t)begin;
    *f = (fiber){.context = words, .stack = stack, .stack_bytes = stack_bytes, .body = body, .argument = argument};
#endif
#ifdef UCCL_EP_EMULATION_TSAN
    f->tsan = __tsan_create_fiber(0);
#endif
    return true;
}

void fiber_forget(fiber *f) {
#ifdef UCCL_EP_EMULATION_TSAN
    if (f->tsan) __tsan_destroy_fiber(f->tsan);
#endif
#ifdef UCCL_EP_FIBER_PORTABLE
    free(f->context);
#endif
    memset(f, 0, sizeof *f);
}

void fiber_enter(fiber_home *home, fiber *f) {
    turn.home = home;
    turn.entered = f;
#ifdef UCCL_EP_FIBER_PORTABLE
    home->context = NULL;
#endif
#ifdef FIBER_ASAN
    __sanitizer_start_switch_fiber(&home->fake_stack, f->stack, f->stack_bytes);
#endif
#ifdef UCCL_EP_EMULATION_TSAN
    home->tsan = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(f->tsan, NO_SYNC);
#endif
    change(&home->context, f->context);
#ifdef FIBER_ASAN
    __sanitizer_finish_switch_fiber(home->fake_stack, NULL, NULL);
#endif
}

void fiber_leave(fiber_home *home, fiber *f) {
#ifdef FIBER_ASAN
    __sanitizer_start_switch_fiber(f->done ? NULL : &f->fake_stack, home->bottom, home->bytes);
#endif
#ifdef UCCL_EP_EMULATION_TSAN
    /* What a fiber did comes before what its thread does after its end. */
    __tsan_switch_to_fiber(home->tsan, f->done ? 0 : NO_SYNC);
#endif
    change(&f->context, home->context);
#ifdef FIBER_ASAN
    __sanitizer_finish_switch_fiber(f->fake_stack, &home->bottom, &home->bytes);
#endif
}

void fiber_release(void *what) {
#ifdef UCCL_EP_EMULATION_TSAN
    __tsan_release(what);
#else
    (void)what;
#endif
}

void fiber_acquire(void *what) {
#ifdef UCCL_EP_EMULATION_TSAN
    __tsan_acquire(what);
#else
    (void)what;
#endif
}
