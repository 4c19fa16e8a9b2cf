/* SPDX-License-Identifier: Apache-2.0
 *
 * test_lab_trap.c: stores to trapped doorbell pages come one by one, whole, in the order of each thread; other faults
 * go where they went before.
 */
#include <setjmp.h>
#include <sys/mman.h>

#include "lab_plane.h"

#define THREADS 4u

static lab_context *context;
static uint64_t got[THREADS + 1]; /* values of a thread so far */
static struct {
    uint32_t page, offset, width;
    uint64_t value;
} last;

static void store(lab_context *of, uint32_t page, uint32_t offset, uint64_t value, uint32_t width) {
    CHECK(of == context, "another context");
    last.page = page;
    last.offset = offset;
    last.width = width;
    last.value = value;
    if (page != 9) return;
    const uint64_t thread = value >> 56;
    CHECK(thread < THREADS && (value & 0xffffffff) == got[thread]++, "thread %" PRIu64 ": %" PRIx64, thread, value);
}

static struct lab_model model = {.name = "trap", .store = store};
static lab_device device = {.model = &model};

/* Written in assembler where the compiler could choose another instruction. */
static void all_stores(volatile uint8_t *page) {
    const struct {
        uint32_t width;
        uint64_t value;
    } as[] = {{8, 0x1122334455667788ull}, {4, 0x55667788}, {2, 0x7788}, {1, 0x88}};
    for (uint32_t i = 0; i < 4; i++) {
        volatile uint8_t *at = page + 8 * (i + 1);
        switch (as[i].width) {
        case 8:
            *(volatile uint64_t *)(volatile void *)at = as[i].value;
            break;
        case 4:
            *(volatile uint32_t *)(volatile void *)at = (uint32_t)as[i].value;
            break;
        case 2:
            *(volatile uint16_t *)(volatile void *)at = (uint16_t)as[i].value;
            break;
        default:
            *at = (uint8_t)as[i].value;
        }
        memset(&last, 0, sizeof last);
        CHECK(lab_trapped_next(), "store %u is lost", i);
        CHECK_EQ(last.page, 7);
        CHECK_EQ(last.offset, 8 * (i + 1));
        CHECK_EQ(last.width, as[i].width);
        CHECK_EQ(last.value, as[i].value);
        CHECK(!lab_trapped_next(), "store %u comes twice", i);
    }
#if defined(__x86_64__)
    uint64_t high = 0xfedcba9876543210ull;
    /* Registers above the eighth, an index, a displacement of four bytes, immediates, MOVNTI, a high byte. */
#define FORM_(text, wanted, bytes, where)                                                                              \
    do {                                                                                                               \
        register uint64_t r9 __asm__("r9") = high;                                                                     \
        register volatile uint8_t *r12 __asm__("r12") = page;                                                          \
        __asm__ volatile(text : : "r"(r9), "r"(r12), "a"(high), "c"((uint64_t)2) : "memory");                          \
        CHECK(lab_trapped_next(), "%s is lost", text);                                                                 \
        CHECK_EQ(last.value, wanted);                                                                                  \
        CHECK_EQ(last.width, bytes);                                                                                   \
        CHECK_EQ(last.offset, where);                                                                                  \
    } while (0)
    FORM_("movq %%r9, (%%r12)", high, 8, 0);
    FORM_("movq %%r9, 8(%%r12)", high, 8, 8);
    FORM_("movl %%r9d, 1024(%%r12)", high & 0xffffffff, 4, 1024);
    FORM_("movq %%r9, 16(%%r12,%%rcx,8)", high, 8, 32);
    FORM_("movq $-5, (%%r12)", (uint64_t)-5, 8, 0);
    FORM_("movl $0x12345678, 2048(%%r12)", 0x12345678, 4, 2048);
    FORM_("movw $0x1234, (%%r12)", 0x1234, 2, 0);
    FORM_("movb $0x12, 3(%%r12)", 0x12, 1, 3);
    FORM_("movnti %%r9, 64(%%r12)", high, 8, 64);
    FORM_("movb %%r9b, 5(%%r12)", high & 0xff, 1, 5);
#undef FORM_
#endif
}

static void *many(void *argument) {
    volatile uint64_t *page = *(volatile uint64_t **)argument;
    const uint64_t thread = (uint64_t)((void **)argument)[1];
    for (uint64_t i = 0; i < test_scaled(2000); i++) page[thread] = thread << 56 | i;
    return NULL;
}

/* More than the 256 that may wait: the others wait in the handler until there is room. */
static void threads(volatile uint64_t *page) {
    pthread_t t[THREADS];
    void *arguments[THREADS][2];
    for (uintptr_t i = 0; i < THREADS; i++) {
        arguments[i][0] = (void *)(uintptr_t)page;
        arguments[i][1] = (void *)i;
        CHECK_EQ(pthread_create(&t[i], NULL, many, arguments[i]), 0);
    }
    uint64_t left = THREADS * test_scaled(2000);
    while (left) left -= lab_trapped_next();
    for (uint32_t i = 0; i < THREADS; i++) CHECK_EQ(pthread_join(t[i], NULL), 0);
    CHECK(!lab_trapped_next(), "one store more than there were");
    for (uint32_t i = 0; i < THREADS; i++) CHECK_EQ(got[i], test_scaled(2000));
}

static sigjmp_buf back;

static void elsewhere(int number) {
    (void)number;
    siglongjmp(back, 1);
}

static bool faults(volatile uint8_t *at) {
    if (sigsetjmp(back, 1)) return true;
    *at = 1;
    return false;
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 120);
    void *first, *second;
    const struct sigaction before = {.sa_handler = elsewhere};
    sigaction(SIGSEGV, &before, NULL);
    context = lab_context_new(&device, 1000);
    CHECK_EQ(lab_trap(context, 7, 4096, &first), 0);
    CHECK_EQ(lab_trap(context, 9, 4096, &second), 0);
    CHECK(lab_trapping(), "nobody traps");
    all_stores(first);
    threads(second);
    void *nothing = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(faults(nothing), "a fault of the program's own is swallowed");
    CHECK(!lab_trapped_next(), "and taken for a doorbell");
    /* What waits for a context that ends is forgotten with it, and its page is no doorbell any more. */
    *(volatile uint64_t *)first = 1;
    last.page = 0;
    lab_context_free(context);
    while (lab_trapped_next()) continue;
    CHECK_EQ(last.page, 0);
    CHECK(faults(first), "a doorbell of nobody");
    return test_end();
}
