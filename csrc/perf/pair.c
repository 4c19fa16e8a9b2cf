/* SPDX-License-Identifier: Apache-2.0
 *
 * pair.c: two processes and a real backend. Puts beside plain memcpy of the same sizes and addresses, and latencies.
 *
 * Rank 0 measures, rank 1 checks: every byte of every measured transfer is compared on the target with what was sent,
 * and a difference ends the program before a figure is printed. Measurements of one size alternate (put, memcpy,
 * memcpy, put, ...), so that a change of the machine's speed meets both; the figures are medians of `rounds`.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"

#define SMALLEST 16u
#define LARGEST (16u << 20)
#define REGION (32ull << 20) /* sources; the targets lie behind them */
#define TIMEOUT (60 * SECOND)
#define WORDS (REGION / sizeof(uint64_t))
#define MAX_COUNT 16384u

enum { SLOT_PING, SLOT_PONG };

/* ---------------------------------------------------------------------------------------------- the two, and their
 * socket */

static int other; /* a socket to the other rank: bootstrap first, then what to check */

static void transfer(void *data, size_t bytes, bool send_it) {
    const uint64_t deadline = now_ns() + TIMEOUT;
    for (size_t done = 0; done < bytes;) {
        struct pollfd ready = {.fd = other, .events = send_it ? POLLOUT : POLLIN};
        const uint64_t now = now_ns();
        if (now >= deadline || poll(&ready, 1, (int)((deadline - now) / 1000000 + 1)) < 0)
            die("the other rank is silent");
        char *at = (char *)data + done;
        const ssize_t n = send_it ? send(other, at, bytes - done, MSG_NOSIGNAL | MSG_DONTWAIT)
                                  : recv(other, at, bytes - done, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (n <= 0) die("the other rank has ended");
        done += (size_t)n;
    }
}

static int exchange_with_other(void *context, const void *mine, uint32_t bytes, void *all, uint64_t timeout_ns,
                               char *text) {
    const uint32_t rank = *(const uint32_t *)context;
    (void)timeout_ns, (void)text; /* transfer() has a deadline, and ends the program */
    memcpy((char *)all + (size_t)rank * bytes, mine, bytes);
    transfer((char *)all + (size_t)rank * bytes, bytes, true);
    transfer((char *)all + (size_t)!rank * bytes, bytes, false);
    return 0;
}

/* Threads that are made later inherit it. */
static void keep_to(const char *cpus) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const char *at = cpus; *at;) {
        char *end;
        const unsigned long cpu = strtoul(at, &end, 10);
        if (end == at || cpu >= CPU_SETSIZE || (*end && *end != '+') || (*end && !end[1]))
            die("'%s' is no list of CPUs such as 0+2", cpus);
        CPU_SET(cpu, &set);
        at = *end ? end + 1 : end;
    }
    if (*cpus && sched_setaffinity(0, sizeof set, &set)) die("CPUs %s: %s", cpus, strerror(errno));
}

static uccl_ep_comm *join(const char *backend, uint32_t *rank) {
    keep_to(*rank ? options.other_cpus : options.cpus);
    const char *name = *rank ? options.other_device : options.device;
    const uccl_ep_config config = {.size = sizeof config,
                                   .backend = backend,
                                   .heap_bytes = 2 * REGION,
                                   .signals = 64,
                                   .ring_log2 = (uint32_t)options.ring_log2,
                                   .flags = UCCL_EP_CONFIG_NO_MERGE, /* a put is a put */
                                   .device = name[0] ? name : NULL,
                                   .backend_options = options.nic_options,
                                   .max_inflight_peer = (uint32_t)options.window,
                                   .spin = *rank ? 0 : (uint32_t)options.spin,
                                   .idle_sleep_ns = *rank ? (uint32_t)options.other_idle_sleep_ns : 0,
                                   .timeout_ns = TIMEOUT};
    const uccl_ep_bootstrap bootstrap = {.size_of_struct = sizeof bootstrap,
                                         .rank = *rank,
                                         .size = 2,
                                         .context = rank,
                                         .allgather = exchange_with_other};
    uccl_ep_comm *comm;
    must(uccl_ep_comm_create(&config, &bootstrap, &comm), "create");
    return comm;
}

static char *heap_of(uccl_ep_comm *comm) {
    uccl_ep_comm_info info = {.size_of_struct = sizeof info};
    must(uccl_ep_comm_query(comm, &info), "query");
    return info.heap;
}

/* ------------------------------------------------------------------------------------------------------------ what is
 * sent */

/* `pingpong` exchanges of signals, or the first `bytes` of the target region to be compared with the pattern of `seed`.
 */
struct order {
    uint64_t pingpong, bytes, seed;
};

/* Word i of the pattern (splitmix64): no two words, and no two seeds, alike. */
static uint64_t pattern(uint64_t seed, uint64_t i) {
    uint64_t z = (seed << 32) + i * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

static void fill(char *at, uint64_t bytes, uint64_t seed) {
    for (uint64_t i = 0; i < bytes / sizeof(uint64_t); i++) ((uint64_t *)at)[i] = pattern(seed, i);
}

/* The first byte that is wrong, or `bytes`. */
static uint64_t first_wrong(const char *at, uint64_t bytes, uint64_t seed) {
    for (uint64_t i = 0; i < bytes / sizeof(uint64_t); i++)
        if (((const uint64_t *)at)[i] != pattern(seed, i)) return i * sizeof(uint64_t);
    return bytes;
}

/* Rank 1: does what rank 0 orders until that closes its end. */
static void serve(const char *backend) {
    uint32_t rank = 1;
    uccl_ep_comm *comm = join(backend, &rank);
    const char *target = heap_of(comm) + REGION;
    uint64_t pings = 0;
    struct order order;
    for (;;) {
        transfer(&order, sizeof order, false);
        if (!order.pingpong && !order.bytes) break;
        if (order.bytes > REGION) die("an order for %llu bytes", (unsigned long long)order.bytes);
        for (uint64_t i = 0; i < order.pingpong; i++) {
            must(uccl_ep_wait_signal(comm, SLOT_PING, ++pings, 0, TIMEOUT, NULL), "wait for a ping");
            must(uccl_ep_signal(comm, 0, 0, SLOT_PONG, 1, TIMEOUT, NULL), "pong");
        }
        uint64_t answer = first_wrong(target, order.bytes, order.seed);
        transfer(&answer, sizeof answer, true);
    }
    must(uccl_ep_quiet(comm, UCCL_EP_NO_CHANNEL, TIMEOUT), "quiet");
    uint64_t answer = 0;
    transfer(&answer, sizeof answer, true);
    uccl_ep_comm_destroy(comm);
}

/* Rank 0: no figure without this. */
static void check_there(uint64_t bytes, uint64_t seed, uint64_t size) {
    struct order order = {.bytes = bytes, .seed = seed};
    uint64_t wrong;
    transfer(&order, sizeof order, true);
    transfer(&wrong, sizeof wrong, false);
    if (wrong != bytes)
        die("DATA CHECK FAILED: puts of %llu bytes: byte %llu of %llu is wrong at the target. No figures are given",
            (unsigned long long)size, (unsigned long long)wrong, (unsigned long long)bytes);
}

/* --------------------------------------------------------------------------------------------------------------
 * measurements */

static double time_puts(uccl_ep_comm *comm, uint64_t size, uint64_t slots, uint64_t count) {
    const uint64_t begin = now_ns();
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t at = i % slots * size;
        must(uccl_ep_put(comm, 0, 1, at, REGION + at, size, TIMEOUT, NULL), "put");
    }
    must(uccl_ep_quiet(comm, 0, TIMEOUT), "quiet");
    return (double)(now_ns() - begin) / (double)count;
}

static double time_copies(const char *from, char *to, uint64_t size, uint64_t slots, uint64_t count) {
    const uint64_t begin = now_ns();
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t at = i % slots * size;
        memcpy(to + at, from + at, size);
        __asm__ volatile("" ::: "memory"); /* every copy, whatever the compiler thinks of the next one */
    }
    return (double)(now_ns() - begin) / (double)count;
}

static void bandwidth(uccl_ep_comm *comm, char *heap, char *plain, uint64_t size, double *puts, double *copies) {
    static uint64_t seed;
    uint64_t slots = REGION / size;
    if (slots > MAX_COUNT) slots = MAX_COUNT;
    const uint64_t count = slots < 4 ? 4 : slots;
    for (uint64_t round = 0; round < options.rounds; round++) {
        fill(heap, slots * size, ++seed);
        for (uint64_t k = 0; k < 2; k++) {
            if (k == round % 2)
                puts[round] = time_puts(comm, size, slots, count);
            else
                copies[round] = time_copies(heap, plain, size, slots, count);
        }
        check_there(slots * size, seed, size);
        if (first_wrong(plain, slots * size, seed) != slots * size) die("memcpy gave other bytes");
    }
    const double put = median(puts, options.rounds), copy = median(copies, options.rounds);
    printf("{\"what\": \"put\", \"bytes\": %llu, \"count\": %llu, \"rounds\": %llu, \"put_ns\": %.2f, \"memcpy_ns\": "
           "%.2f, "
           "\"checked_bytes\": %llu}\n",
           (unsigned long long)size, (unsigned long long)count, (unsigned long long)options.rounds, put, copy,
           (unsigned long long)(slots * size * options.rounds));
}

#define LATENCIES 2000u /* of each kind, at most */

static void put_latency(uccl_ep_comm *comm, char *heap, uint64_t size) {
    static double ns[LATENCIES];
    const uint64_t n = options.latencies;
    const uint64_t seed = 1u << 30 | size;
    fill(heap, size, seed);
    for (uint32_t i = 0; i < n; i++) {
        const uint64_t begin = now_ns();
        must(uccl_ep_put(comm, 0, 1, 0, REGION, size, TIMEOUT, NULL), "put");
        must(uccl_ep_quiet(comm, 0, TIMEOUT), "quiet");
        ns[i] = (double)(now_ns() - begin);
    }
    check_there(size, seed, size);
    const double middle = median(ns, n);
    printf("{\"what\": \"put_quiet\", \"bytes\": %llu, \"count\": %llu, \"ns\": %.0f, \"p10_ns\": %.0f, \"p90_ns\": "
           "%.0f}\n",
           (unsigned long long)size, (unsigned long long)n, middle, ns[n / 10], ns[n * 9 / 10]);
}

static void signal_latency(uccl_ep_comm *comm) {
    static double ns[LATENCIES];
    const uint64_t n = options.latencies;
    struct order order = {.pingpong = n};
    transfer(&order, sizeof order, true);
    for (uint32_t i = 0; i < n; i++) {
        const uint64_t begin = now_ns();
        must(uccl_ep_signal(comm, 0, 1, SLOT_PING, 1, TIMEOUT, NULL), "ping");
        must(uccl_ep_wait_signal(comm, SLOT_PONG, i + 1, 1, TIMEOUT, NULL), "wait for a pong");
        ns[i] = (double)(now_ns() - begin) / 2;
    }
    uint64_t answer;
    transfer(&answer, sizeof answer, false);
    const double middle = median(ns, n);
    printf("{\"what\": \"signal\", \"count\": %llu, \"ns\": %.0f, \"p10_ns\": %.0f, \"p90_ns\": %.0f}\n",
           (unsigned long long)n, middle, ns[n / 10], ns[n * 9 / 10]);
}

/* Rank 1 is a child, which returns never. */
static pid_t start_other(const char *backend) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends)) die("socketpair: %s", strerror(errno));
    const pid_t child = fork();
    if (child < 0) die("fork: %s", strerror(errno));
    other = ends[child == 0];
    close(ends[child != 0]);
    if (!child) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        serve(backend);
        exit(0);
    }
    return child;
}

static void end_other(uccl_ep_comm *comm, pid_t child) {
    struct order end = {0};
    uint64_t answer;
    transfer(&end, sizeof end, true);
    transfer(&answer, sizeof answer, false);
    uccl_ep_comm_destroy(comm);
    int status;
    if (waitpid(child, &status, 0) != child || status) die("the other rank ended with status %d", status);
}

/* `commands` puts of `bytes` over a NIC, `rounds` times, and latencies: for a transport's own benchmark beside it. */
void rdma(const char *backend) {
    if (options.bytes > REGION) die("bytes=%llu: at most %llu", (unsigned long long)options.bytes, REGION);
    const pid_t child = start_other(backend);
    uint32_t rank = 0;
    uccl_ep_comm *comm = join(backend, &rank);
    char *heap = heap_of(comm);
    /* As perftest does: the same page over and over, or the same message. It holds the same bytes whichever is last. */
    const uint64_t size = options.bytes, most = size < 4096 ? 4096 / size : 1;
    const uint64_t slots = options.commands < most ? options.commands : most;
    double *puts = malloc(options.rounds * sizeof *puts);
    if (!puts) die("no memory");
    signal_latency(comm);
    put_latency(comm, heap, SMALLEST);
    uccl_ep_proxy_stats before, after;
    must(uccl_ep_proxy_query(comm, 0, &before), "query");
    for (uint64_t round = 0; round < options.rounds; round++) {
        fill(heap, slots * size, round + 1);
        puts[round] = time_puts(comm, size, slots, options.commands);
        check_there(slots * size, round + 1, size);
    }
    must(uccl_ep_proxy_query(comm, 0, &after), "query");
    printf(
        "{\"what\": \"put\", \"bytes\": %llu, \"count\": %llu, \"rounds\": %llu, \"put_ns\": %.2f, \"submits\": %llu, "
        "\"completions\": %llu, \"reads\": %llu, \"sleeps\": %llu}\n",
        (unsigned long long)size, (unsigned long long)options.commands, (unsigned long long)options.rounds,
        median(puts, options.rounds), (unsigned long long)(after.submits - before.submits),
        (unsigned long long)(after.completions - before.completions),
        (unsigned long long)(after.flushes - before.flushes), (unsigned long long)(after.sleeps - before.sleeps));
    free(puts);
    end_other(comm, child);
}

void pair(const char *backend) {
    const pid_t child = start_other(backend);
    uint32_t rank = 0;
    uccl_ep_comm *comm = join(backend, &rank);
    char *heap = heap_of(comm);
    char *plain = mmap(NULL, REGION, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    double *puts = malloc(options.rounds * sizeof *puts), *copies = malloc(options.rounds * sizeof *copies);
    if (plain == MAP_FAILED || !puts || !copies) die("no memory");
    /* Pages and translations of both targets are there before anything is measured. */
    fill(heap, REGION, 1u << 31);
    memcpy(plain, heap, REGION);
    time_puts(comm, LARGEST, REGION / LARGEST, REGION / LARGEST);
    check_there(REGION, 1u << 31, LARGEST);

    signal_latency(comm);
    for (uint64_t size = SMALLEST; size <= 1u << 20; size *= 16) put_latency(comm, heap, size);
    for (uint64_t size = SMALLEST; size <= LARGEST; size *= 4) bandwidth(comm, heap, plain, size, puts, copies);

    free(puts);
    free(copies);
    munmap(plain, REGION);
    end_other(comm, child);
}
