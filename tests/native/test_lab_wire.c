/* SPDX-License-Identifier: Apache-2.0
 *
 * The wire between processes of the lab: who finds whom, what is cut off, and that nobody waits for anybody. Several
 * wires of one process stand for several processes; the one that is killed is a process.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <sched.h>
#include <stdbool.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "lab/wire.h"
#include "testing.h"

#define MAX_FRAME 300000u

struct end {
    struct wire *wire;
    uint64_t frames, bytes, gone;
    test_rng expected;
    bool checks, echoes;
    const char *answer; /* to each frame: why its sender is cut off */
    char said[256];
};

static char fabric[40];
static char big[MAX_FRAME + 1];

static const char *frame(void *context, struct wire_link *link, const void *bytes, uint32_t n) {
    struct end *e = context;
    CHECK(!((uintptr_t)bytes & 7), "an address that is not aligned");
    e->frames++;
    e->bytes += n;
    if (e->checks) {
        const uint32_t expected = 1 + (uint32_t)test_below(&e->expected, MAX_FRAME);
        CHECK_EQ(n, expected);
        CHECK(((const char *)bytes)[0] == (char)n && ((const char *)bytes)[n - 1] == (char)(n == 1 ? n : ~n), "bytes");
    }
    if (e->echoes && !wire_is_ours(link)) wire_send(link, &(struct iovec){(void *)(uintptr_t)bytes, n}, 1);
    return e->answer;
}

static void gone(void *context, struct wire_link *link) {
    (void)link;
    ((struct end *)context)->gone++;
}

static void say(void *context, const char *text) {
    struct end *e = context;
    snprintf(e->said, sizeof e->said, "%s", text);
}

static int open_end(struct end *e, const char *hello, uint32_t slots, uint64_t max_waiting) {
    memset(e, 0, sizeof *e);
    const struct wire_config config = {.name = "uccl_ep-test",
                                       .fabric = fabric,
                                       .slots = slots,
                                       .max_frame = MAX_FRAME,
                                       .max_waiting = max_waiting,
                                       .hello = hello,
                                       .hello_bytes = (uint32_t)strlen(hello),
                                       .frame = frame,
                                       .gone = gone,
                                       .say = say,
                                       .context = e};
    return wire_open(&e->wire, &config);
}

static void open_two(struct end *a, struct end *b) {
    CHECK_EQ(open_end(a, "one", 8, 1u << 30), 0);
    CHECK_EQ(open_end(b, "one", 8, 1u << 30), 0);
    CHECK(wire_slot(a->wire) == 0 && wire_slot(b->wire) == 1, "slots");
}

static void close_two(struct end *a, struct end *b) {
    wire_close(a->wire);
    wire_close(b->wire);
}

static void test_slots(void) {
    struct end e[3];
    CHECK_EQ(open_end(&e[0], "one", 2, 1u << 30), 0);
    CHECK_EQ(open_end(&e[1], "one", 2, 1u << 30), 0);
    CHECK_EQ(open_end(&e[2], "one", 2, 1u << 30), ENOSPC);
    wire_close(e[0].wire);
    CHECK_EQ(open_end(&e[2], "one", 2, 1u << 30), 0);
    CHECK_EQ(wire_slot(e[2].wire), 0);
    struct wire_link *link;
    CHECK_EQ(wire_reach(e[1].wire, 7, &link), ECONNREFUSED);
    wire_close(e[2].wire);
    CHECK_EQ(wire_reach(e[1].wire, 0, &link), ECONNREFUSED);
    wire_close(e[1].wire);
}

static void send_random(struct wire_link *link, test_rng *rng) {
    const uint32_t n = 1 + (uint32_t)test_below(rng, MAX_FRAME);
    big[0] = (char)n;
    char last = (char)~n;
    const struct iovec parts[3] = {{big, n > 1 ? n - 1 : 1}, {NULL, 0}, {&last, n > 1}};
    CHECK(wire_send(link, parts, 3), "sent");
}

/* Both fill the other's socket before anybody reads: what does not fit waits, and all of it arrives, in order. */
static void test_both_full(void) {
    struct end e[2];
    struct wire_link *link[2];
    open_two(&e[0], &e[1]);
    const uint64_t amount = 20 + test_scaled(100);
    for (uint32_t i = 0; i < 2; i++) {
        CHECK_EQ(wire_reach(e[i].wire, 1 - i, &link[i]), 0);
        e[1 - i].expected = test_rng_at(i);
        e[1 - i].checks = true;
    }
    for (uint32_t i = 0; i < 2; i++) {
        test_rng rng = test_rng_at(i);
        for (uint64_t k = 0; k < amount; k++) send_random(link[i], &rng);
        for (uint32_t turns = 0; turns < 50; turns++) wire_turn(e[i].wire);
    }
    while (e[0].frames < amount || e[1].frames < amount)
        for (uint32_t i = 0; i < 2; i++) wire_turn(e[i].wire);
    /* On its link each asked; answers come on the same. */
    struct wire_link *same;
    CHECK(wire_reach(e[0].wire, 1, &same) == 0 && same == link[0] && wire_known(e[0].wire, 1) == same, "one link");
    e[0].checks = e[1].checks = false;
    e[1].echoes = true;
    const uint64_t before = e[0].frames;
    CHECK(wire_send(link[0], &(struct iovec){big, 5}, 1), "sent");
    while (e[0].frames == before)
        for (uint32_t i = 0; i < 2; i++) wire_turn(e[i].wire);
    CHECK(!e[0].gone && !e[1].gone && !*e[0].said && !*e[1].said, "%s%s", e[0].said, e[1].said);
    close_two(&e[0], &e[1]);
}

static void test_to_oneself(void) {
    struct end e;
    struct wire_link *link;
    CHECK_EQ(open_end(&e, "one", 8, 1u << 30), 0);
    CHECK_EQ(wire_reach(e.wire, 0, &link), 0);
    e.echoes = true;
    for (uint32_t i = 0; i < 1000; i++) CHECK(wire_send(link, &(struct iovec){big, 100}, 1), "sent");
    while (e.frames < 2000) wire_turn(e.wire);
    CHECK_EQ(e.bytes, 200000);
    wire_close(e.wire);
}

/* -------------------------------------------------------------------------------------------------------- who is bad
 */

static int raw(uint32_t slot) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    const int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int n =
        snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "uccl_ep-test/%u/%s/%u", (unsigned)geteuid(), fabric, slot);
    CHECK(!connect(s, (struct sockaddr *)&a, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)),
          "connect: %s", strerror(errno));
    return s;
}

/* Until it is closed; what it is greeted with does not matter here. */
static void turn_until_closed(struct end *e, int s) {
    char bytes[4096];
    for (;;) {
        wire_turn(e->wire);
        const ssize_t n = recv(s, bytes, sizeof bytes, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN)) break;
        sched_yield();
    }
    close(s);
}

static void test_garbage(void) {
    struct end a, b, other;
    open_two(&a, &b);
    test_rng rng = test_rng_at(9);
    b.echoes = true;
    for (uint32_t round = 0; round < 200; round++) {
        char bytes[512];
        for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (char)test_random(&rng);
        const uint32_t length = round % 4 == 0 ? 88u : round % 4 == 1 ? UINT32_MAX : 0;
        if (round % 4 < 3) memcpy(bytes, &length, 4), memset(bytes + 4, 0, 4);
        const int s = raw(0);
        CHECK(send(s, bytes, sizeof bytes, MSG_NOSIGNAL) == sizeof bytes, "send");
        a.said[0] = 0;
        turn_until_closed(&a, s);
        CHECK(strstr(a.said, "does not speak"), "%s", a.said);
    }
    /* Half a greeting, and then nothing more: it is no error, and nothing is left of it. */
    int s = raw(0);
    CHECK(send(s, "\x50\0\0", 3, MSG_NOSIGNAL) == 3, "send");
    shutdown(s, SHUT_WR);
    turn_until_closed(&a, s);
    /* Another version. */
    CHECK_EQ(open_end(&other, "two", 8, 1u << 30), 0);
    struct wire_link *link;
    CHECK_EQ(wire_reach(other.wire, 0, &link), 0);
    CHECK(wire_send(link, &(struct iovec){big, 9}, 1), "sent");
    while (!other.gone) {
        wire_turn(other.wire);
        wire_turn(a.wire);
    }
    CHECK(strstr(a.said, "another version") && !a.frames, "%s", a.said);
    wire_close(other.wire);
    /* A frame that the owner does not like. */
    CHECK_EQ(wire_reach(b.wire, 0, &link), 0);
    a.answer = "it says nonsense";
    CHECK(wire_send(link, &(struct iovec){big, 9}, 1), "sent");
    while (!b.gone) {
        wire_turn(b.wire);
        wire_turn(a.wire);
    }
    CHECK(strstr(a.said, "nonsense") && strstr(a.said, "slot 1"), "%s", a.said);
    /* The good ones go on. */
    a.answer = NULL;
    CHECK_EQ(wire_reach(b.wire, 0, &link), 0);
    const uint64_t before = a.frames;
    CHECK(wire_send(link, &(struct iovec){big, 9}, 1), "sent");
    while (a.frames == before) {
        wire_turn(b.wire);
        wire_turn(a.wire);
    }
    close_two(&a, &b);
}

/* Whoever does not take what it is sent is cut off; a frame that is too long goes nowhere. */
static void test_limits(void) {
    struct end a, b;
    struct wire_link *link;
    CHECK_EQ(open_end(&a, "one", 8, 1u << 20), 0);
    CHECK_EQ(open_end(&b, "one", 8, 1u << 30), 0);
    CHECK_EQ(wire_reach(a.wire, 1, &link), 0);
    uint32_t sent = 0;
    while (wire_send(link, &(struct iovec){big, MAX_FRAME}, 1)) sent++;
    CHECK(sent >= 3 && sent <= 4 && strstr(a.said, "does not take"), "%u: %s", sent, a.said);
    CHECK(!wire_send(link, &(struct iovec){big, 1}, 1), "an ended link");
    wire_turn(a.wire);
    CHECK_EQ(a.gone, 1);
    CHECK_EQ(wire_reach(a.wire, 1, &link), 0);
    CHECK(!wire_send(link, &(struct iovec){big, MAX_FRAME + 1u}, 1), "too long a frame");
    close_two(&a, &b);
}

/* Without a descriptor nobody is let in, which is said once and wakes nobody; with one again, who waits is. */
static void test_no_descriptor(void) {
    struct end a, b;
    struct wire_link *link;
    struct rlimit before, none;
    struct pollfd fds[8];
    open_two(&a, &b);
    CHECK(!getrlimit(RLIMIT_NOFILE, &before), "getrlimit");
    none = before;
    none.rlim_cur = (rlim_t)dup(STDERR_FILENO);
    close((int)none.rlim_cur);
    CHECK(!setrlimit(RLIMIT_NOFILE, &none), "setrlimit");
    wire_turn(b.wire);
    CHECK(!*b.said && wire_waits(b.wire, fds) == 1, "nobody wants in: %s", b.said);
    CHECK(!setrlimit(RLIMIT_NOFILE, &before), "setrlimit");
    CHECK_EQ(wire_reach(a.wire, 1, &link), 0);
    none.rlim_cur++; /* the link has taken one */
    CHECK(!setrlimit(RLIMIT_NOFILE, &none), "setrlimit");
    wire_turn(b.wire);
    CHECK(strstr(b.said, "ulimit -n"), "%s", b.said);
    CHECK_EQ(wire_waits(b.wire, fds), 0);
    b.said[0] = 0;
    wire_turn(b.wire);
    CHECK(!*b.said && wire_waits(b.wire, fds) == 0, "%s", b.said);
    CHECK(!setrlimit(RLIMIT_NOFILE, &before), "setrlimit");
    CHECK(wire_send(link, &(struct iovec){big, 9}, 1), "sent");
    while (!b.frames) {
        wire_turn(a.wire);
        wire_turn(b.wire);
    }
    CHECK_EQ(wire_waits(b.wire, fds), 2);
    close_two(&a, &b);
}

static void test_death(void) {
    const pid_t parent = getpid();
    int ready[2];
    CHECK(!pipe(ready), "pipe");
    fflush(NULL);
    const pid_t child = fork();
    if (!child) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        struct end e;
        if (getppid() != parent || open_end(&e, "one", 8, 1u << 30) || write(ready[1], "", 1) != 1) _exit(1);
        struct wire_link *link;
        e.echoes = true;
        while (e.frames < 10) {
            wire_turn(e.wire);
            sched_yield();
        }
        if (wire_reach(e.wire, 1, &link)) _exit(1);
        for (uint32_t i = 0; i < 10; i++) wire_turn(e.wire);
        if (write(ready[1], "", 1) != 1) _exit(1);
        for (;;) pause();
    }
    struct end e;
    struct wire_link *link;
    char byte;
    CHECK(read(ready[0], &byte, 1) == 1, "the child has its slot");
    CHECK_EQ(open_end(&e, "one", 8, 1u << 30), 0);
    CHECK_EQ(wire_slot(e.wire), 1);
    CHECK_EQ(wire_reach(e.wire, 0, &link), 0);
    for (uint32_t i = 0; i < 10; i++) CHECK(wire_send(link, &(struct iovec){big, 5000}, 1), "sent");
    while (e.frames < 10) wire_turn(e.wire);
    CHECK(read(ready[0], &byte, 1) == 1, "the child is there");
    CHECK(!kill(child, SIGKILL) && waitpid(child, NULL, 0) == child, "killed");
    while (e.gone < 2) wire_turn(e.wire); /* both ways */
    CHECK_EQ(wire_reach(e.wire, 0, &link), ECONNREFUSED);
    struct end next;
    CHECK_EQ(open_end(&next, "one", 8, 1u << 30), 0); /* and nothing is left of it */
    CHECK_EQ(wire_slot(next.wire), 0);
    close_two(&e, &next);
    close(ready[0]);
    close(ready[1]);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 120);
    snprintf(fabric, sizeof fabric, "test-%d", (int)getpid());
    test_slots();
    test_both_full();
    test_to_oneself();
    test_garbage();
    test_limits();
    test_no_descriptor();
    test_death();
    return test_end();
}
