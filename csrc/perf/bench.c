/* SPDX-License-Identifier: Apache-2.0
 *
 * bench.c: what the proxy costs a command, on a NIC that does nothing (noop_backend.c).
 *
 *   uccl-ep-bench BACKEND.so MODE [key=value ...]      prints one JSON object; exit status 1 if the books do not
 * balance
 *
 *   prefilled   fill the ring, then time the passes that empty it. Filling is not timed.
 *   live        producer threads post one by one (or `batch` together) while the proxy's own thread runs
 *   idle        passes with nothing to do
 *   pair        two processes that really communicate (pair.c)
 *   rdma        the same over a NIC: puts of one size, and latencies
 *
 * In all but these two, one process is rank 0 of `ranks`: its bootstrap answers for the others. Times are of
 * CLOCK_MONOTONIC. Under callgrind
 * --toggle-collect=uccl_ep_progress, prefilled and idle count exactly the proxy's instructions, the backend's included.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench.h"

#define HEAP_BYTES (256ull << 20) /* of address space: nothing is touched */
#define SIGNALS 1024u

struct options options = {.ranks = 64,
                          .targets = 1,
                          .channels = 1,
                          .ring_log2 = 11,
                          .bytes = 14336,
                          .rounds = 200,
                          .producers = 1,
                          .batch = 1,
                          .commands = 1u << 20,
                          .passes = 1u << 20,
                          .latencies = 2000,
                          .mix = "put",
                          .strategy = "ordered_atomic",
                          .complete = "cumulative"};

void die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("uccl-ep-bench: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

void must(uccl_ep_status status, const char *what) {
    if (status != UCCL_EP_OK) die("%s: %s: %s", what, uccl_ep_status_name(status), uccl_ep_last_error()->text);
}

uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * SECOND + (uint64_t)now.tv_nsec;
}

/* ---------------------------------------------------------------------------------------------------------------
 * options */

static void parse(int count, char **arguments) {
    static const struct {
        const char *name;
        uint64_t *value, most;
    } numbers[] = {
        {"ranks", &options.ranks, UCCL_EP_MAX_RANKS},
        {"targets", &options.targets, UCCL_EP_MAX_RANKS},
        {"channels", &options.channels, 64},
        {"ring_log2", &options.ring_log2, UCCL_EP_RING_MAX_LOG2},
        {"bytes", &options.bytes, 1u << 20},
        {"rounds", &options.rounds, 1000000},
        {"producers", &options.producers, 64},
        {"batch", &options.batch, 1024},
        {"commands", &options.commands, 1ull << 32},
        {"passes", &options.passes, 1ull << 32},
        {"still", &options.still, 1},
        {"window", &options.window, 65536},
        {"latencies", &options.latencies, 2000},
        {"spin", &options.spin, 1u << 31},
        {"other_idle_sleep_ns", &options.other_idle_sleep_ns, SECOND - 1},
    };
    static const struct {
        const char *name;
        char *value;
        size_t room;
    } words[] = {
        {"mix", options.mix, sizeof options.mix},
        {"strategy", options.strategy, sizeof options.strategy},
        {"complete", options.complete, sizeof options.complete},
        {"device", options.device, sizeof options.device},
        {"other_device", options.other_device, sizeof options.other_device},
        {"nic_options", options.nic_options, sizeof options.nic_options},
        {"cpus", options.cpus, sizeof options.cpus},
        {"other_cpus", options.other_cpus, sizeof options.other_cpus},
    };
    for (int i = 0; i < count; i++) {
        char *equals = strchr(arguments[i], '=');
        if (!equals) die("'%s' is not key=value", arguments[i]);
        *equals = 0;
        bool known = false;
        for (size_t k = 0; k < sizeof numbers / sizeof *numbers; k++) {
            if (strcmp(numbers[k].name, arguments[i])) continue;
            char *end;
            *numbers[k].value = strtoull(equals + 1, &end, 10);
            if (*end || end == equals + 1 || !*numbers[k].value || *numbers[k].value > numbers[k].most)
                die("%s takes 1 to %llu", arguments[i], (unsigned long long)numbers[k].most);
            known = true;
        }
        for (size_t k = 0; k < sizeof words / sizeof *words; k++) {
            if (strcmp(words[k].name, arguments[i])) continue;
            if ((size_t)snprintf(words[k].value, words[k].room, "%s", equals + 1) >= words[k].room)
                die("%s is too long", arguments[i]);
            known = true;
        }
        if (!known) die("no option '%s'", arguments[i]);
    }
    if (options.targets > options.ranks)
        die("targets=%llu and ranks=%llu", (unsigned long long)options.targets, (unsigned long long)options.ranks);
    if (options.bytes % 16) die("bytes must be a multiple of 16");
}

/* -------------------------------------------------------------------------------------------------------------------
 * setup */

/* This process for every rank: the blobs of a no-op device say nothing that differs. */
static int answer_for_all(void *context, const void *mine, uint32_t bytes, void *all, uint64_t timeout_ns, char *text) {
    (void)context, (void)timeout_ns, (void)text;
    for (uint64_t rank = 0; rank < options.ranks; rank++) memcpy((char *)all + rank * bytes, mine, bytes);
    return 0;
}

/* For counting: a clock that stands still, so that what is done a few hundred times a second is not done by chance. */
static uint64_t still_clock(void *context) {
    (void)context;
    return SECOND;
}

static uccl_ep_comm *make(const char *backend, uccl_ep_progress_mode progress) {
    const bool each = !strcmp(options.complete, "each"), hold = !strcmp(options.strategy, "sender_hold");
    if (!each && strcmp(options.complete, "cumulative")) die("complete is cumulative or each");
    if (!hold && strcmp(options.strategy, "ordered_atomic")) die("strategy is ordered_atomic or sender_hold");
    const uccl_ep_config config = {.size = sizeof config,
                                   .backend = backend,
                                   .backend_options = each ? "complete=each" : "",
                                   .heap_bytes = HEAP_BYTES,
                                   .signals = SIGNALS,
                                   .channels = (uint32_t)options.channels,
                                   .ring_log2 = (uint32_t)options.ring_log2,
                                   .strategy = hold ? UCCL_EP_STRATEGY_SENDER_HOLD : UCCL_EP_STRATEGY_ORDERED_ATOMIC,
                                   .progress = progress,
                                   .clock = options.still ? still_clock : NULL};
    const uccl_ep_bootstrap bootstrap = {
        .size_of_struct = sizeof bootstrap, .size = (uint32_t)options.ranks, .allgather = answer_for_all};
    uccl_ep_comm *comm;
    must(uccl_ep_comm_create(&config, &bootstrap, &comm), "create");
    return comm;
}

/* Command `i` of the mix. Puts of "put" lie apart, those of "put_adjacent" side by side, where the proxy may join them.
 */
static uccl_ep_command command_of(uint64_t i) {
    uccl_ep_command c = {.target = (uint32_t)(i % options.targets)};
    const bool adjacent = !strcmp(options.mix, "put_adjacent");
    c.op = !strcmp(options.mix, "put") || adjacent ? UCCL_EP_OP_PUT
           : !strcmp(options.mix, "put_signal")    ? UCCL_EP_OP_PUT_SIGNAL
           : !strcmp(options.mix, "signal")        ? UCCL_EP_OP_SIGNAL
                                                   : UCCL_EP_OP_INVALID;
    if (c.op == UCCL_EP_OP_INVALID) die("mix is put, put_adjacent, put_signal or signal");
    if (uccl_ep_op_has_put(c.op)) {
        const uint64_t room = HEAP_BYTES / 2 / options.bytes;
        c.local = (adjacent ? i : 2 * i) % room * options.bytes;
        c.remote = c.local;
        c.bytes = (uint32_t)options.bytes;
        c.granularity = 16;
    }
    if (uccl_ep_op_has_signal(c.op)) c.slot = (uint32_t)(i % SIGNALS), c.add = 1;
    return c;
}

/* ------------------------------------------------------------------------------------------------------------------
 * results */

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double median(double *values, uint64_t n) {
    qsort(values, n, sizeof *values, by_value);
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

/* No figure without proof that the work was done: every command taken, issued as what it is, and complete. */
static uccl_ep_proxy_stats balance(uccl_ep_comm *comm, uint64_t posted) {
    uccl_ep_proxy_stats stats;
    must(uccl_ep_proxy_query(comm, 0, &stats), "stats");
    uint64_t complete = 0, failed = 0;
    for (uint32_t i = 0; i < options.channels; i++) {
        uccl_ep_channel_stats channel;
        must(uccl_ep_channel_query(comm, i, &channel), "stats");
        complete += channel.complete;
        failed += channel.failed;
    }
    const uint64_t each = strcmp(options.mix, "put_signal") ? 1 : 2;
    if (stats.commands != posted || complete != posted || failed || stats.operations + stats.merged != each * posted ||
        stats.stale)
        die("posted %llu, taken %llu, complete %llu, failed %llu, operations %llu, merged %llu, stale %llu",
            (unsigned long long)posted, (unsigned long long)stats.commands, (unsigned long long)complete,
            (unsigned long long)failed, (unsigned long long)stats.operations, (unsigned long long)stats.merged,
            (unsigned long long)stats.stale);
    return stats;
}

static void print_common(const char *mode) {
    printf("{\"mode\": \"%s\", \"mix\": \"%s\", \"ranks\": %llu, \"targets\": %llu, \"channels\": %llu, \"ring_log2\": "
           "%llu, "
           "\"bytes\": %llu, \"strategy\": \"%s\", \"complete\": \"%s\", ",
           mode, options.mix, (unsigned long long)options.ranks, (unsigned long long)options.targets,
           (unsigned long long)options.channels, (unsigned long long)options.ring_log2,
           (unsigned long long)options.bytes, options.strategy, options.complete);
}

/* --------------------------------------------------------------------------------------------------------------------
 * modes */

static void prefilled(const char *backend) {
    uccl_ep_comm *comm = make(backend, UCCL_EP_PROGRESS_CALLER);
    const uint32_t slots = 1u << options.ring_log2;
    uccl_ep_words *words = malloc(slots * sizeof *words);
    double *ns = malloc(options.rounds * sizeof *ns);
    if (!words || !ns) die("no memory");
    uint64_t posted = 0, passes = 0;
    for (uint64_t round = 0; round < options.rounds; round++) {
        for (uint32_t k = 0; k < options.channels; k++) {
            for (uint32_t i = 0; i < slots; i++) {
                const uccl_ep_command command = command_of(posted + i);
                must(uccl_ep_encode(&command, &words[i]), "encode");
            }
            must(uccl_ep_post_raw(comm, k, words, slots, 0, NULL), "post");
            posted += slots;
        }
        const uint64_t limit = passes + 1000 + 16ull * slots * options.channels;
        uccl_ep_ring ring;
        must(uccl_ep_channel_ring(comm, (uint32_t)options.channels - 1, &ring), "ring");
        const uint64_t end = (round + 1) * slots;
        bool left = true;
        const uint64_t begin = now_ns();
        while (left) {
            must(uccl_ep_progress(comm, NULL), "progress");
            left = __atomic_load_n(&ring.counters->complete, __ATOMIC_ACQUIRE) != end;
            if (++passes > limit) die("the ring does not get empty");
        }
        ns[round] = (double)(now_ns() - begin) / (double)(slots * options.channels);
    }
    for (uint32_t k = 0; k < options.channels; k++) must(uccl_ep_quiet(comm, k, SECOND), "quiet");
    const uccl_ep_proxy_stats stats = balance(comm, posted);
    const double middle = median(ns, options.rounds);
    print_common("prefilled");
    printf("\"commands\": %llu, \"operations\": %llu, \"submits\": %llu, \"completions\": %llu, \"merged\": %llu, "
           "\"passes\": %llu, \"rounds\": %llu, \"ns_per_command\": %.3f, \"ns_per_command_best\": %.3f, "
           "\"ns_per_command_p90\": %.3f}\n",
           (unsigned long long)posted, (unsigned long long)stats.operations, (unsigned long long)stats.submits,
           (unsigned long long)stats.completions, (unsigned long long)stats.merged, (unsigned long long)passes,
           (unsigned long long)options.rounds, middle, ns[0], ns[options.rounds * 9 / 10]);
    free(words);
    free(ns);
    uccl_ep_comm_destroy(comm);
}

typedef struct producer {
    uccl_ep_comm *comm;
    pthread_barrier_t *start;
    pthread_t thread;
    uint64_t index;
} producer;

static void *produce(void *argument) {
    producer *p = argument;
    const uint32_t channel = (uint32_t)(p->index % options.channels);
    uccl_ep_command *commands = malloc(options.batch * sizeof *commands);
    if (!commands) die("no memory");
    for (uint64_t i = 0; i < options.batch; i++) commands[i] = command_of(p->index * options.batch + i);
    pthread_barrier_wait(p->start);
    for (uint64_t done = 0; done < options.commands; done += options.batch) {
        if (options.batch > 1) {
            must(uccl_ep_post_many(p->comm, channel, commands, (uint32_t)options.batch, 60 * SECOND, NULL), "post");
            continue;
        }
        const uccl_ep_command c = command_of(p->index + done);
        must(c.op == UCCL_EP_OP_PUT
                 ? uccl_ep_put(p->comm, channel, c.target, c.local, c.remote, c.bytes, 60 * SECOND, NULL)
             : c.op == UCCL_EP_OP_SIGNAL ? uccl_ep_signal(p->comm, channel, c.target, c.slot, c.add, 60 * SECOND, NULL)
                                         : uccl_ep_put_signal(p->comm, channel, c.target, c.local, c.remote, c.bytes,
                                                              c.slot, c.add, 60 * SECOND, NULL),
             "post");
    }
    free(commands);
    return NULL;
}

static void live(const char *backend) {
    options.commands = (options.commands + options.batch - 1) / options.batch * options.batch;
    uccl_ep_comm *comm = make(backend, UCCL_EP_PROGRESS_THREADS);
    producer *producers = calloc(options.producers, sizeof *producers);
    pthread_barrier_t start;
    if (!producers || pthread_barrier_init(&start, NULL, (unsigned)options.producers + 1)) die("no memory");
    for (uint64_t i = 0; i < options.producers; i++) {
        producers[i] = (producer){.comm = comm, .start = &start, .index = i};
        if (pthread_create(&producers[i].thread, NULL, produce, &producers[i])) die("no thread");
    }
    pthread_barrier_wait(&start);
    const uint64_t begin = now_ns();
    for (uint64_t i = 0; i < options.producers; i++) pthread_join(producers[i].thread, NULL);
    must(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, 60 * SECOND), "quiet");
    const uint64_t end = now_ns();
    const uint64_t posted = options.commands * options.producers;
    const uccl_ep_proxy_stats stats = balance(comm, posted);
    print_common("live");
    printf("\"producers\": %llu, \"batch\": %llu, \"commands\": %llu, \"passes\": %llu, \"sleeps\": %llu, "
           "\"ns_per_command\": %.3f, \"longest_gap_ns\": %llu}\n",
           (unsigned long long)options.producers, (unsigned long long)options.batch, (unsigned long long)posted,
           (unsigned long long)stats.passes, (unsigned long long)stats.sleeps, (double)(end - begin) / (double)posted,
           (unsigned long long)stats.longest_gap_ns);
    free(producers);
    pthread_barrier_destroy(&start);
    uccl_ep_comm_destroy(comm);
}

static void idle(const char *backend) {
    uccl_ep_comm *comm = make(backend, UCCL_EP_PROGRESS_CALLER);
    const uint64_t part = options.passes / 64 ? options.passes / 64 : 1;
    double ns[64];
    for (uint32_t i = 0; i < 64; i++) {
        const uint64_t begin = now_ns();
        for (uint64_t k = 0; k < part; k++) must(uccl_ep_progress(comm, NULL), "progress");
        ns[i] = (double)(now_ns() - begin) / (double)part;
    }
    const uccl_ep_proxy_stats stats = balance(comm, 0);
    print_common("idle");
    printf("\"passes\": %llu, \"idle_passes\": %llu, \"ns_per_pass\": %.3f}\n", (unsigned long long)stats.passes,
           (unsigned long long)stats.idle_passes, median(ns, 64));
    uccl_ep_comm_destroy(comm);
}

int main(int count, char **arguments) {
    if (count < 3) die("usage: uccl-ep-bench BACKEND.so prefilled|live|idle|pair|rdma [key=value ...]");
    parse(count - 3, arguments + 3);
    if (!strcmp(arguments[2], "prefilled"))
        prefilled(arguments[1]);
    else if (!strcmp(arguments[2], "live"))
        live(arguments[1]);
    else if (!strcmp(arguments[2], "idle"))
        idle(arguments[1]);
    else if (!strcmp(arguments[2], "pair"))
        pair(arguments[1]);
    else if (!strcmp(arguments[2], "rdma"))
        rdma(arguments[1]);
    else
        die("no mode '%s': prefilled, live, idle, pair or rdma", arguments[2]);
    return 0;
}
