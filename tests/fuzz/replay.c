/* SPDX-License-Identifier: Apache-2.0
 *
 * replay.c: a fuzz target without libFuzzer: runs the inputs that it is given, or random ones that a seed makes.
 *
 *   fuzz_X FILE|FOLDER...
 *   fuzz_X -runs=N [-seed=S] [-max_len=BYTES] [FILE|FOLDER...]     the options of libFuzzer's that mean the same here
 */
#include <dirent.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuzz.h"

static char current[4096];

static void say_input(int signal_number) {
    static const char before[] = "input: ", after[] = "\n";
    if (write(2, before, sizeof before - 1) < 0 || write(2, current, strlen(current)) < 0 || write(2, after, 1) < 0)
        _exit(1);
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static unsigned replay_file(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) {
        fprintf(stderr, "%s cannot be read\n", path);
        exit(2);
    }
    uint8_t *data = malloc(1 << 20);
    if (!data) abort();
    const size_t size = fread(data, 1, 1 << 20, file);
    fclose(file);
    snprintf(current, sizeof current, "%s", path);
    /* Of its exact size, so that a sanitizer sees a byte too many. */
    uint8_t *exact = malloc(size ? size : 1);
    if (!exact) abort();
    memcpy(exact, data, size);
    free(data);
    LLVMFuzzerTestOneInput(exact, size);
    free(exact);
    return 1;
}

static unsigned replay(const char *path) {
    struct stat info;
    if (stat(path, &info) == 0 && !S_ISDIR(info.st_mode)) return replay_file(path);
    DIR *folder = opendir(path);
    if (!folder) {
        fprintf(stderr, "%s cannot be read\n", path);
        exit(2);
    }
    unsigned n = 0;
    for (struct dirent *entry; (entry = readdir(folder));) {
        char inside[4096];
        if (entry->d_name[0] == '.') continue;
        snprintf(inside, sizeof inside, "%.2000s/%.255s", path, entry->d_name);
        n += replay_file(inside);
    }
    closedir(folder);
    return n;
}

static uint64_t next(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    return *state ^= *state << 17;
}

static void random_inputs(uint64_t runs, uint64_t seed, uint64_t longest) {
    for (uint64_t run = 0; run < runs; run++) {
        uint64_t state = (seed * 1000003u + run + 1) * 0x9e3779b97f4a7c15ull | 1;
        const size_t size = (size_t)(next(&state) % (longest + 1));
        uint8_t *data = malloc(size ? size : 1);
        if (!data) abort();
        for (size_t i = 0; i < size; i++) data[i] = (uint8_t)(next(&state) >> 32);
        snprintf(current, sizeof current, "run %" PRIu64 " of -seed=%" PRIu64 " -max_len=%" PRIu64, run, seed, longest);
        LLVMFuzzerTestOneInput(data, size);
        free(data);
    }
}

int main(int argc, char **argv) {
    uint64_t runs = 0, seed = 1, longest = 512;
    unsigned replayed = 0;
    signal(SIGABRT, say_input);
    for (int i = 1; i < argc; i++) {
        unsigned long long value;
        if (sscanf(argv[i], "-runs=%llu", &value) == 1) {
            runs = value;
        } else if (sscanf(argv[i], "-seed=%llu", &value) == 1) {
            seed = value;
        } else if (sscanf(argv[i], "-max_len=%llu", &value) == 1) {
            longest = value;
        } else if (argv[i][0] == '-') {
            fprintf(stderr, "usage: %s [-runs=N] [-seed=S] [-max_len=BYTES] [FILE|FOLDER...]\n", argv[0]);
            return 2;
        } else {
            replayed += replay(argv[i]);
        }
    }
    random_inputs(runs, seed, longest);
    printf("%u inputs replayed, %" PRIu64 " random ones with seed %" PRIu64 "\n", replayed, runs, seed);
    return 0;
}
