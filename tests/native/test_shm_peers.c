/* SPDX-License-Identifier: Apache-2.0
 *
 * test_shm_peers.c: who is at the other end of a link of the shared-memory backend: strangers, forgers, the dead, those
 * who left, forked children, and new incarnations.
 */
#include "shm_ranks.h"
#include <stdarg.h>
#include <sys/syscall.h>

/* -------------------------------------------------------------------------------------------- strangers and forgers */

static socklen_t socket_name(const papers *p, struct sockaddr_un *name) {
    shm_address address;
    memcpy(&address, p->address[0].data, sizeof(address));
    *name = (struct sockaddr_un){.sun_family = AF_UNIX};
    char *text = name->sun_path + 1;
    text += sprintf(text, "uccl_ep-");
    for (unsigned i = 0; i < SHM_ID_BYTES; i++) text += sprintf(text, "%02x", address.name[i]);
    return (socklen_t)(text - (char *)name);
}

static int dial(const papers *p) {
    struct sockaddr_un name;
    const socklen_t bytes = socket_name(p, &name);
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    CHECK(fd >= 0, "socket: %s", strerror(errno));
    CHECK(connect(fd, (struct sockaddr *)&name, bytes) == 0, "connect: %s", strerror(errno));
    return fd;
}

static void send_packet(int fd, const void *data, size_t bytes, const int *fds, unsigned n) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(16 * sizeof(int))];
    } control;
    memset(&control, 0, sizeof(control));
    struct iovec part = {.iov_base = (void *)(uintptr_t)data, .iov_len = bytes};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    if (n) {
        header.msg_control = &control;
        header.msg_controllen = CMSG_SPACE(n * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&header);
        *c = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(n * sizeof(int))};
        memcpy(CMSG_DATA(c), fds, n * sizeof(int));
    }
    CHECK(sendmsg(fd, &header, MSG_NOSIGNAL) == (ssize_t)bytes, "sendmsg: %s", strerror(errno));
}

/* An emulator takes more descriptors from the kernel than the receiver has room for, and keeps the rest. */
static bool surplus_is_dropped(void) {
    int pair[2], some[4];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0, "socketpair: %s", strerror(errno));
    for (unsigned i = 0; i < 4; i++) some[i] = pair[0];
    send_packet(pair[0], "x", 1, some, 4);
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    char byte;
    struct iovec part = {.iov_base = &byte, .iov_len = 1};
    struct msghdr header = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = CMSG_LEN(sizeof(int))};
    const unsigned before = count_fds();
    CHECK(recvmsg(pair[1], &header, MSG_CMSG_CLOEXEC) == 1, "recvmsg: %s", strerror(errno));
    const unsigned got = count_fds() - before;
    memcpy(some, CMSG_DATA(CMSG_FIRSTHDR(&header)), sizeof(int));
    close(some[0]);
    close(pair[0]);
    close(pair[1]);
    return got == 1;
}

static void strangers(void) {
    static rank ranks[2];
    static papers all[2];
    test_rng rng = test_rng_at(9);
    int held[300];
    const bool surplus = surplus_is_dropped();
    if (!surplus) printf("  left out: packets with too many descriptors\n");
    unsigned n_held = 0;
    for (uint32_t i = 0; i < 2; i++) {
        rank_open(&ranks[i], i, 2, 64 * KIB, 64);
        all[i] = rank_papers(&ranks[i]);
    }
    /* Who takes it for a stream does not even get in. */
    struct sockaddr_un name;
    const socklen_t bytes = socket_name(&all[1], &name);
    const int stream = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(stream >= 0 && connect(stream, (struct sockaddr *)&name, bytes) != 0, "a stream got in");
    close(stream);
    const unsigned fds_before = count_fds();
    rank_start(&ranks[0], all);
    rank_start(&ranks[1], all);
    while (n_held < 100) held[n_held++] = dial(&all[1]); /* silent, and more than there is room for */
    for (unsigned i = 0; i < 200; i++) {
        const int fd = dial(&all[1]); /* rank 1 is the one that is called */
        shm_message message = {.magic = SHM_MESSAGE_MAGIC, .version = SHM_VERSION, .kind = SHM_HELLO};
        for (unsigned k = 0; k < SHM_ID_BYTES; k++) message.proof[k] = (uint8_t)test_random(&rng);
        int some[16];
        for (unsigned k = 0; k < 16; k++) some[k] = fd;
        switch (test_below(&rng, 8)) {
        case 0:
            send_packet(fd, "GET / HTTP/1.1\r\n\r\n", 18, NULL, 0);
            break;
        case 1:
            send_packet(fd, &message, sizeof(message) / 2, NULL, 0);
            break;
        case 2:
            send_packet(fd, &message, sizeof(message), NULL, 0);
            break;
        case 3:
            send_packet(fd, &message, sizeof(message), some, 3);
            break;
        case 4:
            send_packet(fd, &message, sizeof(message), some, surplus ? 4 + 12 * (i % 2) : 3);
            break;
        case 5:
            message.kind = SHM_GOODBYE;
            send_packet(fd, &message, sizeof(message), some, 1);
            break;
        case 6:
            shutdown(fd, SHUT_RDWR);
            break;
        default:
            break; /* says nothing */
        }
        if (test_below(&rng, 4))
            held[n_held++] = fd;
        else
            close(fd);
        if (i % 16 == 15) table->connect_poll(ranks[1].endpoint[0], 0);
    }
    UNTIL(mesh_connected(ranks, 2), "strangers kept the ranks apart");
    for (unsigned i = 0; i < 2; i++) rank_import(&ranks[i], all);
    const uccl_ep_operation op = op_add(0, 5, 0);
    submit_all(&ranks[0], 0, 1, &op, 1);
    CHECK_EQ(*word(&ranks[1], 0), 5);
    uccl_ep_event event;
    for (unsigned i = 0; i < 2; i++) CHECK_EQ(table->events(ranks[i].endpoint[0], &event, 1), 0);
    for (unsigned i = 0; i < n_held; i++) close(held[i]);
    for (unsigned i = 0; i < 400; i++) CHECK_EQ(table->events(ranks[1].endpoint[0], &event, 1), 0);
    CHECK_EQ(count_fds(), fds_before + 2); /* the two ends of the link */
    for (unsigned i = 0; i < 2; i++) rank_close(&ranks[i]);
}

/* A member of the job that sends memory which could kill us, or describes it wrongly: refused, and told so. */
static void forged_memory(void) {
    enum {
        UNSEALED,
        PIPE,
        SMALL,
        FAR_OFFSET,
        LONG_REGION,
        MISALIGNED,
        NO_FD,
        EXTRA_FD,
        NOT_WRITABLE,
        NO_PROOF,
        GENUINE,
        CASES
    };
    for (int what = 0; what < CASES; what++) {
        static rank r;
        rank_open(&r, 1, 2, 64 * KIB, 64);
        const papers mine = rank_papers(&r);
        shm_address address;
        memcpy(&address, mine.address[0].data, sizeof(address));
        const int fd = dial(&mine);
        shm_message message = {.magic = SHM_MESSAGE_MAGIC,
                               .version = SHM_VERSION,
                               .kind = SHM_HELLO,
                               .regions = {{.id = 1, .bytes = 4096, .access = RIGHTS}}};
        memset(message.name, 7, sizeof(message.name));
        memcpy(message.proof, address.token, sizeof(message.proof));
        int pipes[2];
        CHECK(pipe2(pipes, O_CLOEXEC) == 0, "pipe: %s", strerror(errno));
        int memory = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        CHECK(memory >= 0 && ftruncate(memory, what == SMALL ? 100 : 8192) == 0, "memfd: %s", strerror(errno));
        if (what != UNSEALED) CHECK(fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0, "seal");
        if (what == NOT_WRITABLE) CHECK(fcntl(memory, F_ADD_SEALS, F_SEAL_WRITE) == 0, "seal");
        if (what == FAR_OFFSET) message.regions[0].offset = UINT64_MAX - 4095;
        if (what == LONG_REGION) message.regions[0].bytes = UINT64_MAX - 4095, message.regions[0].offset = 4096;
        if (what == NO_PROOF) message.proof[0] ^= 1;
        if (what == MISALIGNED) message.regions[0].offset = 4;
        const int fds[2] = {what == PIPE ? pipes[0] : memory, memory};
        send_packet(fd, &message, sizeof(message), fds, what == NO_FD ? 0 : what == EXTRA_FD ? 2 : 1);
        address.rank = 0;
        memset(address.name, 7, sizeof(address.name));
        CHECK_OK(table->connect(r.endpoint[0], 0, &address, sizeof(address)));
        shm_message answer;
        int status;
        ssize_t answered = -1;
        if (what == NO_PROOF) { /* a stranger: dropped in silence, whatever else it knows */
            UNTIL((status = table->connect_poll(r.endpoint[0], 0), answered = recv(fd, &answer, sizeof(answer), 0)) ==
                      0,
                  "it was not dropped: %d", status);
            CHECK_EQ(status, UCCL_EP_IN_PROGRESS);
            goto next;
        }
        UNTIL((status = table->connect_poll(r.endpoint[0], 0)) != UCCL_EP_IN_PROGRESS, "case %d: nothing happened",
              what);
        answered = recv(fd, &answer, sizeof(answer), 0);
        CHECK(answered == sizeof(answer) && answer.magic == SHM_MESSAGE_MAGIC, "case %d: no answer", what);
        if (what == GENUINE) {
            CHECK_OK(status);
            CHECK_EQ(answer.kind, SHM_WELCOME);
            CHECK(memcmp(answer.proof, address.token, sizeof(answer.proof)) == 0, "the welcome proves nothing");
        } else {
            CHECK(status == UCCL_EP_E_REGISTRATION || (what == NOT_WRITABLE && status == UCCL_EP_E_SYSTEM),
                  "case %d: %d %s", what, status, said);
            CHECK(answer.kind == SHM_REJECT && answer.text[0], "case %d: it was not told", what);
        }
    next:
        close(fd);
        close(memory);
        close(pipes[0]);
        close(pipes[1]);
        rank_close(&r);
    }
}

/* ----------------------------------------------------------------------------------------------------------- deaths */

#define ORPHAN (MAX_RANKS - 1) /* its note */

/* How rank 1 ends. */
static enum { KILLED, KILLED_WITH_ORPHAN, KILLED_WITHOUT_PIDFD, EXITS, LEAVES, ENDS } doomed_how;

/* Stands before the C library's: a kernel or sandbox that refuses pidfd_open. */
__attribute__((visibility("default"))) long syscall(long number, ...) {
    static long (*next)(long, ...);
    if (!next) *(void **)&next = dlsym(RTLD_NEXT, "syscall");
    va_list arguments;
    va_start(arguments, number);
    long a[6];
    for (unsigned i = 0; i < 6; i++) a[i] = va_arg(arguments, long);
    va_end(arguments);
    if (number == SYS_pidfd_open && doomed_how == KILLED_WITHOUT_PIDFD) {
        errno = EPERM;
        return -1;
    }
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

static void with_a_death(board *b, uint32_t me) {
    rank r;
    rank_join(&r, b, me, 64 * KIB);
    uccl_ep_event event;
    if (me == 1 && doomed_how == LEAVES) { /* leaves in order, and stays alive */
        rank_close(&r);
        atomic_store(&b->notes[1], 1);
        UNTIL(atomic_load(&b->notes[0]) == 2, "rank 0 did not finish");
        return;
    }
    if (me == 1) {
        atomic_store(&b->notes[1], (uint64_t)getpid());
        if (doomed_how == KILLED_WITH_ORPHAN ||
            doomed_how == KILLED_WITHOUT_PIDFD) { /* a child keeps copies of all descriptors, and outlives us */
            const pid_t child = fork();
            CHECK(child >= 0, "fork: %s", strerror(errno));
            if (child == 0) {
                test_deadline(60);
                for (;;) pause();
            }
            atomic_store(&b->notes[ORPHAN], (uint64_t)child);
        }
        if (doomed_how == EXITS) _exit(0); /* without a goodbye */
        const uccl_ep_operation ops[2] = {op_write(0, 0, 4096, 0), op_add(1, 1, 0)};
        for (uccl_ep_completion done[2];;) { /* dies in here */
            for (uint32_t to = 0; to < b->ranks; to++) submit_all(&r, 0, to, ops, 2);
            table->poll(r.endpoint[0], done, 2);
            table->poll(r.endpoint[0], done, 2);
            table->poll(r.endpoint[0], done, 2);
            table->poll(r.endpoint[0], done, 2);
        }
    }
    if (me == 0 && doomed_how != LEAVES && doomed_how != EXITS) {
        UNTIL(__atomic_load_n(word(&r, 1), __ATOMIC_ACQUIRE) > 0, "rank 1 never started");
        kill((pid_t)atomic_load(&b->notes[1]), SIGKILL);
    }
    uint32_t accepted;
    const uccl_ep_operation op = op_add(2 + me, 1, 0);
    if (doomed_how == LEAVES) UNTIL(atomic_load(&b->notes[1]) == 1, "rank 1 did not leave");
    for (unsigned e = 0; e < 2; e++) { /* each endpoint is told, once */
        UNTIL(table->events(r.endpoint[e], &event, 1) == 1, "rank %u was not told of the end", me);
        CHECK_EQ(event.kind, doomed_how == LEAVES ? UCCL_EP_EVENT_PEER_CLOSED : UCCL_EP_EVENT_PEER_LOST);
        CHECK_EQ(event.peer, 1);
        CHECK(strstr(event.text, "rank 1"), "the text is: %s", event.text);
        for (unsigned i = 0; i < 100; i++) CHECK_EQ(table->events(r.endpoint[e], &event, 1), 0);
    }
    CHECK_REFUSED(table->submit(r.endpoint[0], 1, &op, 1, 0, &accepted), UCCL_EP_E_PEER_LOST, "rank 1");
    CHECK_EQ(accepted, 0);
    CHECK_OK(table->disconnect(r.endpoint[0], 1));
    CHECK_REFUSED(table->connect(r.endpoint[0], 1, b->papers[1].address[0].data, b->papers[1].address[0].bytes),
                  UCCL_EP_E_PEER_LOST, "rank 1");
    /* The rest goes on. */
    for (uint32_t to = 0; to < b->ranks; to++)
        if (to != 1) submit_all(&r, 0, to, &op, 1);
    for (uint32_t from = 0; from < b->ranks; from++)
        if (from != 1)
            UNTIL(__atomic_load_n(word(&r, 2 + from), __ATOMIC_ACQUIRE) == 1, "rank %u is silent towards rank %u", from,
                  me);
    if (me == 0) {
        UNTIL(atomic_load(&b->notes[2]) == 2, "rank 2 did not finish");
        atomic_store(&b->notes[0], 2);
    } else {
        atomic_store(&b->notes[me], 2);
        UNTIL(atomic_load(&b->notes[0]) == 2, "rank 0 did not finish");
    }
    rank_close(&r);
}

static void deaths(void) {
    static const char *const names[ENDS] = {
        [KILLED] = "SIGKILL",
        [KILLED_WITH_ORPHAN] = "SIGKILL, and a forked child lives on",
        [KILLED_WITHOUT_PIDFD] = "the same where pidfd_open is refused",
        [EXITS] = "_exit",
        [LEAVES] = "orderly close",
    };
    for (doomed_how = KILLED; doomed_how < ENDS; doomed_how++) {
        board *b = board_open(3);
        pid_t pids[3];
        for (uint32_t i = 0; i < 3; i++) pids[i] = spawn(with_a_death, b, i);
        for (uint32_t i = 0; i < 3; i++) reap(pids[i], i == 1 && doomed_how < EXITS ? SIGKILL : 0);
        if (b->notes[ORPHAN]) kill((pid_t)b->notes[ORPHAN], SIGKILL);
        munmap(b, sizeof(*b));
        printf("  %s: noticed\n", names[doomed_how]);
    }
}

/* Puts until it is killed. */
static void busy(board *b, uint32_t me) {
    rank r;
    rank_join(&r, b, me, 64 * KIB);
    atomic_store(&b->notes[me], 1);
    uccl_ep_operation ops[2] = {op_write(0, 0, 4096, 0), op_add(me, 1, 0)};
    ops[0].flags = ops[1].flags = 0;
    for (uint32_t to = 0, accepted;; to = (to + 1) % b->ranks) {
        const int status = table->submit(r.endpoint[0], to, ops, 2, 0, &accepted);
        CHECK(status == UCCL_EP_OK || status == UCCL_EP_E_PEER_LOST, "status %d: %s", status, said);
    }
}

/* All ranks killed in traffic: no name remains, and the next start finds nothing in its way. */
static void nothing_remains(void) {
    const unsigned rounds = (unsigned)test_scaled(20);
    for (unsigned round = 0; round < rounds; round++) {
        board *b = board_open(4);
        pid_t pids[4];
        for (uint32_t i = 0; i < 4; i++) pids[i] = spawn(busy, b, i);
        for (uint32_t i = 0; i < 4; i++) UNTIL(atomic_load(&b->notes[i]) == 1, "rank %u did not start", i);
        for (uint32_t i = 0; i < 4; i++) CHECK(kill(pids[i], SIGKILL) == 0, "kill: %s", strerror(errno));
        for (uint32_t i = 0; i < 4; i++) reap(pids[i], SIGKILL);
        char line[512];
        FILE *names = fopen("/proc/net/unix", "re");
        CHECK(names, "/proc/net/unix: %s", strerror(errno));
        while (fgets(line, sizeof(line), names))
            for (uint32_t i = 0; i < 4; i++) {
                struct sockaddr_un name;
                socket_name(&b->papers[i], &name);
                CHECK(!strstr(line, name.sun_path + 1), "rank %u left %s", i, line);
            }
        fclose(names);
        munmap(b, sizeof(*b));
    }
}

/* What a fork leaves: the child reads its own memory, may close the device, and nobody notices. */
static void forked_child(void) {
    static rank ranks[2];
    static papers all[2];
    mesh_open(ranks, 2, all, 64 * KIB, 64);
    memset(ranks[0].base[0], 0x42, 64 * KIB);
    fflush(NULL);
    const unsigned maps = count_maps();
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *probe = mmap(NULL, page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(probe != MAP_FAILED && madvise(probe, page, MADV_DONTFORK) == 0, "madvise: %s", strerror(errno));
    const pid_t pid = fork();
    CHECK(pid >= 0, "fork: %s", strerror(errno));
    if (pid == 0) {
        test_deadline(60);
        CHECK_EQ(ranks[0].base[0][100], 0x42);
        if (msync(probe, page, MS_ASYNC) == 0)
            printf("  left out: an emulator does not know MADV_DONTFORK\n");
        else
            CHECK_EQ(count_maps(), maps - 2 * UCCL_EP_REGIONS); /* peers' memory is not here */
        fflush(stdout);
        table->device_close(ranks[0].device);
        _exit(0);
    }
    reap(pid, 0);
    munmap(probe, page);
    uccl_ep_event event;
    const uccl_ep_operation ops[2] = {op_write(0, 0, 64 * KIB, 0), op_add(0, 1, 0)};
    for (unsigned i = 0; i < 2; i++) CHECK_EQ(table->events(ranks[i].endpoint[0], &event, 1), 0);
    submit_all(&ranks[0], 0, 1, ops, 2);
    submit_all(&ranks[1], 0, 0, ops, 2);
    CHECK(memcmp(ranks[0].base[0], ranks[1].base[0], 64 * KIB) == 0 && ranks[1].base[0][99] == 0x42, "put after fork");
    for (unsigned i = 0; i < 2; i++) rank_close(&ranks[i]);
}

/* The end of one peer says nothing about those before. */
static void each_end_once(void) {
    static rank ranks[3];
    static papers all[3];
    mesh_open(ranks, 3, all, 64 * KIB, 64);
    for (uint32_t i = 2; i > 0; i--) {
        rank_close(&ranks[i]);
        uccl_ep_event events[4];
        for (unsigned e = 0; e < 2; e++) {
            UNTIL(table->events(ranks[0].endpoint[e], events, 4) == 1, "the end of rank %u", i);
            CHECK_EQ(events[0].peer, i);
            CHECK_EQ(table->events(ranks[0].endpoint[e], events, 4), 0);
        }
    }
    rank_close(&ranks[0]);
}

/* A peer that comes back as a new process has a new address; the old connection is replaced. */
static void new_incarnation(void) {
    static rank ranks[2];
    static papers all[2];
    mesh_open(ranks, 2, all, 64 * KIB, 64);
    for (uint32_t reborn = 0; reborn < 2; reborn++) {
        rank *stays = &ranks[1 - reborn], *goes = &ranks[reborn];
        rank_close(goes);
        rank_open(goes, reborn, 2, 64 * KIB, 64);
        all[reborn] = rank_papers(goes);
        for (uint32_t e = 0; e < 2; e++) {
            CHECK_OK(table->disconnect(stays->endpoint[e], reborn));
            CHECK_OK(
                table->connect(stays->endpoint[e], reborn, all[reborn].address[e].data, all[reborn].address[e].bytes));
        }
        rank_start(goes, all);
        UNTIL(mesh_connected(ranks, 2), "the new incarnation was not let in");
        rank_import(stays, all);
        rank_import(goes, all);
        uccl_ep_operation op = op_add(3, 9 + reborn, 0);
        submit_all(stays, 1, reborn, &op, 1);
        submit_all(goes, 1, 1 - reborn, &op, 1);
        CHECK_EQ(*word(goes, 3), 9 + reborn);
    }
    for (unsigned i = 0; i < 2; i++) rank_close(&ranks[i]);
}

int main(int argc, char **argv) {
    static const shm_test tests[] = {
        {"strangers at the door", strangers}, {"forged memory", forged_memory},         {"deaths", deaths},
        {"all are killed", nothing_remains},  {"each end is told once", each_end_once}, {"forked child", forked_child},
        {"new incarnations", new_incarnation}};
    return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0]), 300);
}
