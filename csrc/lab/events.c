/* SPDX-License-Identifier: Apache-2.0
 *
 * events.c: what the program reads from descriptors: completion channels and asynchronous events.
 *
 * Both are pipes. The kernel's descriptors give one event a read(); libibverbs asks for the size of one, so a pipe does
 * the same. A pipe that is full would mean thousands of events that nobody reads: the lab then stops, where hardware
 * would lose nothing and we cannot.
 */
#include "control.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <rdma/ib_user_verbs.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "raw.h"

struct channel {
    lab_channel base;
    struct channel *next;
};

static struct channel *channels;

/* Away from the low numbers, which programs expect to get in order. */
static int move_up(int fd) {
    const int up = raw_fcntl(fd, F_DUPFD_CLOEXEC, 512);
    if (up < 0) return fd; /* ulimit -n may be lower */
    raw_close(fd);
    return up;
}

int lab_pipe(int ends[2]) {
    if (pipe2(ends, O_CLOEXEC)) return errno;
    ends[1] = move_up(ends[1]);
    if (raw_fcntl(ends[1], F_SETFL, O_NONBLOCK) == 0) return 0;
    const int error = errno;
    raw_close(ends[0]);
    raw_close(ends[1]);
    return error;
}

/* A reading end may be closed by the program, and its number be something else by now. */
static bool same_pipe(int read_end, int write_end) {
    struct stat one, other;
    return !fstat(read_end, &one) && !fstat(write_end, &other) && S_ISFIFO(one.st_mode) && one.st_ino == other.st_ino &&
           one.st_dev == other.st_dev;
}

static bool nobody_reads(int write_end) {
    struct pollfd p = {.fd = write_end};
    return poll(&p, 1, 0) == 1 && p.revents & POLLERR;
}

/* The program says nothing when it closes its end. A program with a channel for each connection would run out of
 * descriptors. */
static void sweep(void) {
    for (struct channel **at = &channels; *at;) {
        struct channel *c = *at;
        if (c->base.queues || !nobody_reads(c->base.write)) {
            at = &c->next;
            continue;
        }
        *at = c->next;
        raw_close(c->base.write);
        free(c);
    }
}

lab_channel *lab_channel_new(lab_context *context) {
    sweep();
    struct channel *c = calloc(1, sizeof *c);
    int ends[2];
    if (!c) return NULL;
    const int error = lab_pipe(ends);
    if (error) {
        free(c);
        errno = error;
        return NULL;
    }
    *c = (struct channel){.base = {.context = context, .read = ends[0], .write = ends[1]}, .next = channels};
    channels = c;
    return &c->base;
}

lab_channel *lab_channel_of_fd(const lab_context *context, int fd) {
    for (struct channel *c = channels; c; c = c->next)
        if (c->base.context == context && same_pipe(fd, c->base.write)) return &c->base;
    return NULL;
}

/* Queues that name one end before. */
void lab_channels_free(const lab_context *context) {
    for (struct channel **at = &channels; *at;) {
        struct channel *c = *at;
        if (c->base.context != context) {
            at = &c->next;
            continue;
        }
        *at = c->next;
        raw_close(c->base.write);
        free(c);
    }
}

void lab_channels_forget(void) {
    channels = NULL;
}

/* Where the program has closed its end there is nobody to tell, and no reason to die of SIGPIPE. */
static void report(int fd, const void *event, size_t bytes) {
    sigset_t pipe, before, pending;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    sigpending(&pending);
    pthread_sigmask(SIG_BLOCK, &pipe, &before);
    const ssize_t n = raw_write(fd, event, bytes);
    const int error = errno;
    if (n < 0 && error == EPIPE && !sigismember(&pending, SIGPIPE)) {
        const struct timespec now = {0};
        while (sigtimedwait(&pipe, NULL, &now) < 0 && errno == EINTR) continue;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (n == (ssize_t)bytes || error == EPIPE) return;
    lab_die("a program that reads none of its events has more of them than a pipe holds");
}

void lab_cq_notify(lab_cq *cq, bool solicited) {
    if (!cq->armed || (cq->solicited_only && !solicited)) return;
    cq->armed = false;
    if (!cq->channel) return;
    const struct ib_uverbs_comp_event_desc event = {.cq_handle = cq->user_handle};
    cq->events++;
    report(cq->channel->write, &event, sizeof event);
}

/* What the event is of; 0: the device. */
static enum lab_kind kind_of(uint32_t event) {
    switch (event) {
    case LAB_EVENT_DEVICE_FATAL:
        return 0;
    case LAB_EVENT_CQ_ERR:
        return LAB_CQ;
    case LAB_EVENT_SRQ_LIMIT:
        return LAB_SRQ;
    case LAB_EVENT_QP_FATAL:
    case LAB_EVENT_QP_REQ_ERR:
    case LAB_EVENT_QP_ACCESS_ERR:
    case LAB_EVENT_COMM_EST:
    case LAB_EVENT_QP_LAST_WQE:
        return LAB_QP;
    }
    lab_die("asynchronous event %u is not known", event);
}

void lab_async_event(lab_context *context, enum lab_event event, uint64_t element) {
    if (context->async_write < 0) return;
    const struct ib_uverbs_async_event_desc text = {.element = element, .event_type = event};
    if (kind_of(event)) lab_event_count(context, kind_of(event), element);
    report(context->async_write, &text, sizeof text);
}

/* ---------------------------------------------------------------------------------------------------------- withdrawal
 */

/* An object that ends takes along its events that nobody has read: its library waits for what was read, and for no
 * more. The others are put back in order; a reader of then waits for them as for any. Returns how many are gone. */
static uint32_t withdraw(int read_end, int write_end, size_t bytes, uint64_t element, enum lab_kind kind) {
    union {
        struct ib_uverbs_comp_event_desc completion;
        struct ib_uverbs_async_event_desc other;
    } event;
    char path[32];
    uint32_t n = 0;
    int waiting = 0;
    snprintf(path, sizeof path, "/proc/self/fd/%d", read_end);
    /* A description of our own, since a read() of ours must not wait. */
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return 0;
    if (raw_ioctl(fd, FIONREAD, &waiting)) waiting = 0;
    for (size_t left = (size_t)waiting / bytes; left && read(fd, &event, bytes) == (ssize_t)bytes; left--) {
        const bool its = bytes == sizeof event.completion
                             ? event.completion.cq_handle == element
                             : event.other.element == element && kind_of(event.other.event_type) == kind;
        if (its)
            n++;
        else
            report(write_end, &event, bytes);
    }
    raw_close(fd);
    return n;
}

uint32_t lab_cq_events(lab_cq *cq) {
    const lab_channel *channel = cq->channel;
    if (channel && same_pipe(channel->read, channel->write))
        cq->events -=
            withdraw(channel->read, channel->write, sizeof(struct ib_uverbs_comp_event_desc), cq->user_handle, LAB_CQ);
    return cq->events;
}

uint32_t lab_async_withdraw(const lab_context *context, enum lab_kind kind, uint64_t element) {
    if (!same_pipe(context->async_read, context->async_write)) return 0;
    return withdraw(context->async_read, context->async_write, sizeof(struct ib_uverbs_async_event_desc), element,
                    kind);
}
