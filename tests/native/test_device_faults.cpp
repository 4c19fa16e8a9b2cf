// SPDX-License-Identifier: Apache-2.0
//
// test_device_faults.cpp: device.h broken on purpose, one clause at a time: the tests of device.h must notice each.
//
// They are compiled once more, with fault points that are not the constant false, and run in a process each, which must
// fail and say what is expected of it: a test that fails for another reason has noticed nothing. ThreadSanitizer, which
// makes all this slow, is for what only it can see.
#include <sys/wait.h>
#include <unistd.h>

// X(name, clause, tests, seconds that waits last, seconds that the tests may last, what the test says)
#define FAULTS(X)                                                                                                      \
    X(no_fence, "PUB-1", post_main, 120, 500, "stores a command without a fence")                                      \
    X(parity_in_one_word, "PUB-1", post_main, 120, 500, "slot.word[0] >> 63 is")                                       \
    X(lanes_wait_alone, "PUB-2", post_main, 2, 500, "refused is")                                                      \
    X(overwrite_full_ring, "PRG-3", post_main, 120, 500, "tail_cache is")                                              \
    X(give_up_unnoticed, "PRG-3", post_main, 120, 500, "gave_up[0] is")                                                \
    X(last_error_wins, "ERR-2", calls_main, 120, 500, "took the place of the first")                                   \
    X(deadline_ignored, "ERR-1", calls_main, 120, 8, "not finished after 8 s")                                         \
    X(abort_ignored, "ABT-1", calls_main, 1, 500, "results->status[i] is")                                             \
    X(failure_ignored, "ERR-2", calls_main, 1, 500, "results->status[i] is")                                           \
    X(first_bank_only, "SIG-6", calls_main, 1, 500, "results->status[i] is")                                           \
    X(quiet_early, "QUI-1", calls_main, 120, 500, "results->status[i] is")                                             \
    X(quiet_source_early, "QUI-0", calls_main, 120, 500, "results->status[i] is")                                      \
    X(quiet_one_channel, "QUI-2", calls_main, 120, 500, "came back too early")                                         \
    X(poll_never_done, "QUI-3", calls_main, 120, 500, "s is")                                                          \
    X(closed_ignored, "PRG-3", calls_main, 1, 500, "results->status[i] is")                                            \
    X(loss_ignored, "ERR-5", calls_main, 1, 500, "results->status[i] is")                                              \
    X(loss_of_any_ends, "ERR-5", calls_main, 2, 500, "results->status[i] is")                                          \
    X(value_not_distance, "LIM-1", calls_main, 2, 500, "check_signal_values")                                          \
    X(poster_hands_over_early, "PUB-1", post_main, 120, 500, "data race")

static struct {
#define FAULT_FIELD(name, clause, tests, patience, limit, text) bool name;
    FAULTS(FAULT_FIELD)
#undef FAULT_FIELD
} fault_on;
#define UCCL_EP_DEVICE_FAULT(name) (fault_on.name)

#define main calls_main
#include "test_device.cpp"
#undef main
#define main post_main
#include "test_device_post.cpp"
#undef main

#if defined(__SANITIZE_THREAD__)
#define SEES_RACES true
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SEES_RACES true
#endif
#endif
#ifndef SEES_RACES
#define SEES_RACES false
#endif

// What the tests say, run in a process; false: they found nothing.
static bool fail(int (*tests)(int, char **), unsigned patience, unsigned limit, const char *text, char **argv,
                 std::vector<char> &all) {
    FILE *said = tmpfile();
    CHECK(said, "tmpfile");
    fflush(nullptr);
    const pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (!child) {
        bench_timeout = patience * second;
        test_longest = limit;
        if (!strcmp(text, "came back too early")) early_ms = 500;
        setenv("UCCL_EP_TEST_SCALE", "0.05", 1);
        if (dup2(fileno(said), 1) < 0 || dup2(fileno(said), 2) < 0) _exit(3);
        const int status = tests(2, argv);
        fflush(nullptr);
        _exit(status);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child, "waitpid");
    rewind(said);
    all[fread(all.data(), 1, all.size() - 1, said)] = 0;
    fclose(said);
    return !WIFEXITED(status) || WEXITSTATUS(status) != 0;
}

static void check(const char *name, int (*tests)(int, char **), unsigned patience, unsigned limit, const char *text,
                  char **argv) {
    std::vector<char> all(1 << 16);
    // On a busy machine a wait that is to end well may run out of little patience first: once more with ten times as
    // much.
    for (bool told = false; !told; patience *= 10) {
        CHECK(fail(tests, patience, limit, text, argv, all), "%s: not noticed: %s", name, all.data());
        told = strstr(all.data(), text);
        CHECK(told || patience < 10, "%s: noticed, but not for \"%s\": %s", name, text, all.data());
    }
    printf("%s: noticed\n", name);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 580);
    char seed[32];
    snprintf(seed, sizeof seed, "%" PRIu64, test_seed_value);
    char *arguments[] = {argv[0], seed, nullptr};
#define FAULT_CHECK(name, clause, tests, patience, limit, text)                                                        \
    if (SEES_RACES == !strcmp(text, "data race")) {                                                                    \
        fault_on.name = true;                                                                                          \
        check(#name " (" clause ")", tests, patience, limit, text, arguments);                                         \
        fault_on.name = false;                                                                                         \
    }
    FAULTS(FAULT_CHECK)
    return test_end();
}
