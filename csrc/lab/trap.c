/* SPDX-License-Identifier: Apache-2.0
 *
 * trap.c: doorbell pages whose stores are taken one by one.
 *
 * The page has no rights. A store to it faults; the handler reads the instruction, takes the value from the register,
 * leaves both for the NIC's thread and goes on behind the instruction. Nothing is lost or merged, as on a bus.
 *
 * A fault anywhere else is the program's own: it goes to the handler that was there before ours.
 */
#include "control.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include "raw.h"

#define MAX_TRAPS 64u
#define MAX_STORES 256u /* waiting for the thread; a power of two */

struct trap {
    _Atomic(uintptr_t) base; /* 0: free. Read by the handler */
    size_t bytes;
    lab_context *context;
    uint32_t page;
};

/* Many threads put, one takes. `turn` is the position that a slot waits for: position, then position + 1 once it is
 * full, then position + MAX_STORES when it is free again. */
struct store {
    _Atomic uint64_t turn;
    lab_context *context;
    uint64_t value;
    uint32_t page, offset, width;
};

static struct trap traps[MAX_TRAPS];
static struct store stores[MAX_STORES];
static _Atomic uint64_t put_at;
static uint64_t take_at;
static struct sigaction before;
static bool installed;

static void yield_now(void) {
    syscall(SYS_sched_yield);
}

static void put(lab_context *context, uint32_t page, uint32_t offset, uint64_t value, uint32_t width) {
    const uint64_t position = atomic_fetch_add_explicit(&put_at, 1, memory_order_relaxed);
    struct store *s = &stores[position % MAX_STORES];
    while (atomic_load_explicit(&s->turn, memory_order_acquire) != position) {
        lab_nic_wake();
        yield_now();
    }
    s->context = context;
    s->page = page;
    s->offset = offset;
    s->value = value;
    s->width = width;
    atomic_store_explicit(&s->turn, position + 1, memory_order_release);
    lab_nic_wake();
}

bool lab_trapped_next(void) {
    struct store *s = &stores[take_at % MAX_STORES];
    if (!installed || atomic_load_explicit(&s->turn, memory_order_acquire) != take_at + 1) return false;
    lab_context *context = s->context;
    const uint32_t page = s->page, offset = s->offset, width = s->width;
    const uint64_t value = s->value;
    atomic_store_explicit(&s->turn, take_at + MAX_STORES, memory_order_release);
    take_at++;
    if (context) context->device->model->store(context, page, offset, value, width);
    return true;
}

void lab_trapped_all(void) {
    for (uint32_t i = 0; i < MAX_STORES && lab_trapped_next(); i++) continue;
}

/* ------------------------------------------------------------------------------------------------- the instructions */

struct decoded {
    uint64_t value;
    uint32_t width, length; /* of the store, of the instruction */
};

#if defined(__x86_64__)

static uint64_t general(const ucontext_t *c, unsigned number) {
    static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return (uint64_t)c->uc_mcontext.gregs[order[number]];
}

/* Bytes of ModRM, SIB and displacement (Intel SDM, volume 2, 2.1.5). */
static uint32_t address_bytes(const uint8_t *modrm) {
    const unsigned mod = modrm[0] >> 6, rm = modrm[0] & 7;
    uint32_t n = 1;
    if (mod == 3) return 0; /* a register: no store */
    if (rm == 4) {
        n++;
        if (mod == 0 && (modrm[1] & 7) == 5) n += 4;
    } else if (mod == 0 && rm == 5) {
        n += 4;
    }
    return n + (mod == 1 ? 1 : mod == 2 ? 4 : 0);
}

/* MOV of a general register or an immediate to memory, and MOVNTI: what compilers make of a store to a register page.
 */
static bool decode(const ucontext_t *c, struct decoded *d) {
    const uint8_t *const start = (const uint8_t *)(uintptr_t)c->uc_mcontext.gregs[REG_RIP], *at = start;
    bool word = false;
    uint8_t rex = 0;
    if (*at == 0x66) {
        word = true;
        at++;
    }
    if ((*at & 0xf0) == 0x40) rex = *at++;
    d->width = rex & 8 ? 8 : word ? 2 : 4;
    uint8_t opcode = *at++;
    if (opcode == 0x0f) {
        if (*at++ != 0xc3 || word) return false; /* MOVNTI */
        opcode = 0x89;
    }
    if (opcode == 0x88 || opcode == 0xc6) d->width = 1;
    const uint32_t n = address_bytes(at);
    const unsigned reg = (unsigned)(at[0] >> 3 & 7) | (rex & 4 ? 8 : 0);
    if (!n) return false;
    at += n;
    if (opcode == 0x89) {
        d->value = general(c, reg);
    } else if (opcode == 0x88) {
        const bool high = !rex && reg >= 4; /* AH, CH, DH, BH */
        d->value = high ? general(c, reg - 4) >> 8 : general(c, reg);
    } else if (opcode == 0xc7 && !(reg & 7)) {
        int32_t immediate = 0;
        const uint32_t bytes = d->width == 2 ? 2 : 4;
        memcpy(&immediate, at, bytes);
        d->value = (uint64_t)(int64_t)immediate;
        at += bytes;
    } else if (opcode == 0xc6 && !(reg & 7)) {
        d->value = *at++;
    } else {
        return false;
    }
    d->length = (uint32_t)(at - start);
    return true;
}

static void step(ucontext_t *c, const struct decoded *d) {
    c->uc_mcontext.gregs[REG_RIP] += d->length;
}

static bool is_store(const ucontext_t *c) {
    return c->uc_mcontext.gregs[REG_ERR] & 2; /* page fault error code: write */
}

#elif defined(__aarch64__)

static uint32_t instruction(const ucontext_t *c) {
    return *(const uint32_t *)(uintptr_t)c->uc_mcontext.pc;
}

/* STR, STUR and STLR of a general register (Arm ARM, C4.1: loads and stores); those with write-back move the base. */
static bool decode(const ucontext_t *c, struct decoded *d) {
    const uint32_t i = instruction(c);
    const bool offset = (i & 0x3fc00000) == 0x39000000,
               other = (i & 0x3fe00000) == 0x38000000 || (i & 0x3fe00c00) == 0x38200800,
               release = (i & 0x3ffffc00) == 0x089ffc00;
    if (!offset && !other && !release) return false;
    d->width = 1u << (i >> 30);
    d->value = (i & 31) == 31 ? 0 : c->uc_mcontext.regs[i & 31];
    d->length = 4;
    return true;
}

static void step(ucontext_t *c, const struct decoded *d) {
    const uint32_t i = instruction(c);
    if ((i & 0x3fe00400) == 0x38000400) { /* post- and pre-index */
        const int64_t by = (int64_t)((uint64_t)(i >> 12 & 0x1ff) << 55) >> 55;
        const uint32_t base = i >> 5 & 31;
        if (base == 31)
            c->uc_mcontext.sp += (uint64_t)by;
        else
            c->uc_mcontext.regs[base] += (uint64_t)by;
    }
    c->uc_mcontext.pc += d->length;
}

static bool is_store(const ucontext_t *c) {
    return (instruction(c) & 0x0a400000) == 0x08000000 || (instruction(c) & 0x3fc00000) == 0x39000000;
}

#else

static bool decode(const ucontext_t *c, struct decoded *d) {
    (void)c, (void)d;
    return false;
}

static void step(ucontext_t *c, const struct decoded *d) {
    (void)c, (void)d;
}

static bool is_store(const ucontext_t *c) {
    (void)c;
    return false;
}

#endif

/* ------------------------------------------------------------------------------------------------------- the handler
 */

static void not_ours(int number, siginfo_t *info, void *context) {
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN) {
        /* A fault that is ignored comes again: the default it is. It is raised anew by going back to the instruction.
         */
        const struct sigaction end = {.sa_handler = SIG_DFL};
        installed = false;
        sigaction(number, &end, NULL);
    } else {
        before.sa_handler(number);
    }
}

static void on_fault(int number, siginfo_t *info, void *context) {
    const int error = errno;
    const uintptr_t at = (uintptr_t)info->si_addr;
    struct trap *t = NULL;
    for (uint32_t i = 0; i < MAX_TRAPS && !t; i++) {
        const uintptr_t base = atomic_load_explicit(&traps[i].base, memory_order_acquire);
        if (base && at >= base && at < base + traps[i].bytes) t = &traps[i];
    }
    struct decoded d = {0};
    if (!t) {
        not_ours(number, info, context);
    } else if (!is_store(context) || !decode(context, &d)) {
        static const char text[] = "uccl-ep lab: an access to a doorbell page that is no plain store of a general "
                                   "register: it cannot be taken\n";
        if (raw_write(STDERR_FILENO, text, sizeof text - 1) < 0) abort();
        abort();
    } else {
        if (d.width < 8) d.value &= (1ull << 8 * d.width) - 1;
        put(t->context, t->page, (uint32_t)(at - atomic_load_explicit(&t->base, memory_order_relaxed)), d.value,
            d.width);
        step(context, &d);
    }
    errno = error;
}

static int install(void) {
    if (installed) return 0;
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    sigemptyset(&action.sa_mask);
    for (uint64_t i = 0; i < MAX_STORES; i++) atomic_init(&stores[i].turn, i);
    if (sigaction(SIGSEGV, &action, &before)) return errno;
    installed = true;
    return 0;
}

int lab_trap(lab_context *context, uint32_t page, size_t bytes, void **address) {
#if !defined(__x86_64__) && !defined(__aarch64__)
    return ENOTSUP;
#endif
    struct trap *t = NULL;
    for (uint32_t i = 0; i < MAX_TRAPS && !t; i++)
        if (!traps[i].base) t = &traps[i];
    if (!t) return ENOSPC;
    const int error = install();
    if (error) return error;
    void *memory = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return errno;
    t->bytes = bytes;
    t->context = context;
    t->page = page;
    atomic_store_explicit(&t->base, (uintptr_t)memory, memory_order_release);
    *address = memory;
    return 0;
}

/* The pages stay mapped, if the program has not unmapped them: a late store then is a fault of the program's, and no
 * store to somebody else's memory. */
void lab_untrap(lab_context *context) {
    for (uint32_t i = 0; i < MAX_TRAPS; i++)
        if (traps[i].context == context) {
            atomic_store_explicit(&traps[i].base, 0, memory_order_release);
            traps[i].context = NULL;
        }
    const uint64_t end = atomic_load(&put_at);
    for (uint64_t at = take_at; at < end; at++) {
        struct store *s = &stores[at % MAX_STORES];
        if (atomic_load_explicit(&s->turn, memory_order_acquire) == at + 1 && s->context == context) s->context = NULL;
    }
}

bool lab_trapping(void) {
    return installed;
}

void lab_trap_chain(const struct sigaction *action, struct sigaction *old) {
    const struct sigaction was = before;
    if (action) before = *action;
    if (old) *old = was;
}

void lab_trap_unmapped(uintptr_t start, size_t bytes) {
    for (uint32_t i = 0; i < MAX_TRAPS; i++) {
        const uintptr_t base = atomic_load_explicit(&traps[i].base, memory_order_acquire);
        if (base && base >= start && base + traps[i].bytes <= start + bytes)
            atomic_store_explicit(&traps[i].base, 0, memory_order_release);
    }
}

void lab_traps_forget(void) {
    for (uint32_t i = 0; i < MAX_TRAPS; i++) atomic_store(&traps[i].base, 0);
    for (uint64_t i = 0; i < MAX_STORES; i++) atomic_store(&stores[i].turn, i);
    atomic_store(&put_at, 0);
    take_at = 0;
}
