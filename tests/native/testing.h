/* SPDX-License-Identifier: Apache-2.0
 *
 * testing.h: what every native test shares: start and end, seeded random numbers, checks, a watchdog.
 *
 *   int main(int argc, char **argv) {
 *       test_begin(argc, argv, 60);              // argv[1] is the seed; a hang ends after 60 s with a message
 *       test_rng rng = test_rng_at(0);           // stream 0 of this run's seed; give each thread a stream
 *       CHECK(1 + 1 == 2, "in round %d", round); // a failure prints place, text and seed, and ends the process
 *       CHECK_EQ(got, expected);
 *       return test_end();
 *   }
 *
 * UCCL_EP_TEST_SCALE multiplies the amount of work (test_scaled): 1 by default, 0.01 under sanitizers and emulators.
 * Any thread may call CHECK, test_scaled and the generator of its own.
 */
#ifndef UCCL_EP_TESTING_H
#define UCCL_EP_TESTING_H

#include <inttypes.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static uint64_t test_seed_value = 1;
static const char *test_name = "test";
static char test_hang_text[256];
static unsigned test_longest = ~0u; /* no watchdog of this process is set to more seconds */

/* _exit: other threads may still be using what exit handlers would take away. */
__attribute__((noreturn)) static inline void test_fail_now(void) {
    fprintf(stderr, "replay: %s %" PRIu64 "\n", test_name, test_seed_value);
    fflush(NULL);
    _exit(1);
}

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s: not true: %s: ", __FILE__, __LINE__, __func__, #condition);                    \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fputc('\n', stderr);                                                                                       \
            test_fail_now();                                                                                           \
        }                                                                                                              \
    } while (0)

/* Integers of any width and sign up to 64 bits, printed as signed and as bits. */
#define CHECK_EQ(got, expected)                                                                                        \
    do {                                                                                                               \
        const uint64_t check_got_ = (uint64_t)(got), check_expected_ = (uint64_t)(expected);                           \
        if (check_got_ != check_expected_) {                                                                           \
            fprintf(stderr,                                                                                            \
                    "%s:%d: %s: %s is %" PRId64 " (0x%" PRIx64 "), expected %s, %" PRId64 " (0x%" PRIx64 ")\n",        \
                    __FILE__, __LINE__, __func__, #got, (int64_t)check_got_, check_got_, #expected,                    \
                    (int64_t)check_expected_, check_expected_);                                                        \
            test_fail_now();                                                                                           \
        }                                                                                                              \
    } while (0)

/* Only what may be called in a signal handler. */
static inline void test_on_alarm(int signal_number) {
    (void)signal_number;
    const ssize_t written = write(STDERR_FILENO, test_hang_text, strlen(test_hang_text));
    (void)written;
    _exit(1);
}

/* Start the watchdog afresh: the process fails when `seconds` pass without test_end. */
static inline void test_deadline(unsigned seconds) {
    if (seconds > test_longest) seconds = test_longest;
    snprintf(test_hang_text, sizeof(test_hang_text), "%s: not finished after %u s\nreplay: %s %" PRIu64 "\n", test_name,
             seconds, test_name, test_seed_value);
    signal(SIGALRM, test_on_alarm);
    alarm(seconds);
}

static inline void test_begin(int argc, char **argv, unsigned seconds) {
    if (argc > 0) test_name = argv[0];
    if (argc > 1) {
        char *end = NULL;
        test_seed_value = strtoull(argv[1], &end, 0);
        if (!*argv[1] || *end) {
            fprintf(stderr, "usage: %s [seed]\n", test_name);
            _exit(2);
        }
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("%s: seed %" PRIu64 "\n", test_name, test_seed_value);
    test_deadline(seconds);
}

static inline int test_end(void) {
    alarm(0);
    printf("%s: ok\n", test_name);
    return 0;
}

/* `amount` times UCCL_EP_TEST_SCALE, at least 1. */
static inline uint64_t test_scaled(uint64_t amount) {
    const char *text = getenv("UCCL_EP_TEST_SCALE");
    if (!text || !*text) return amount;
    char *end = NULL;
    const double scale = strtod(text, &end);
    CHECK(!*end && scale > 0 && scale <= 1000, "UCCL_EP_TEST_SCALE=%s is no factor in (0, 1000]", text);
    const double scaled = (double)amount * scale;
    return scaled < 1 ? 1 : (uint64_t)scaled;
}

static inline uint64_t test_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

/* SplitMix64: one word of state, passes the usual batteries, any seed is a good one. */
typedef struct test_rng {
    uint64_t state;
} test_rng;

static inline uint64_t test_random(test_rng *rng) {
    uint64_t z = (rng->state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

/* An independent stream of this run's seed. */
static inline test_rng test_rng_at(uint64_t stream) {
    test_rng rng = {test_seed_value};
    rng.state = test_random(&rng) ^ (stream * 0xd1342543de82ef95ull);
    test_random(&rng);
    return rng;
}

/* Uniform in 0 .. limit - 1, limit > 0; the bias of the product is below limit / 2^64. */
static inline uint64_t test_below(test_rng *rng, uint64_t limit) {
    __extension__ typedef unsigned __int128 u128;
    return (uint64_t)(((u128)test_random(rng) * limit) >> 64);
}

#endif
