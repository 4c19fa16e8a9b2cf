/* SPDX-License-Identifier: Apache-2.0
 *
 * events.c: what the program reads from descriptors: completion channels and asynchronous events.
 *
 * Both are pipes. The kernel's descriptors give one event a read(); libibverbs asks for the size of one, so a pipe does the
 * same. A pipe that is full would mean thousands of events that nobody reads: the lab then stops, where hardware would
 * lose nothing and we cannot.
 */
#include "control.h"

#include <errno.h>
#include <fcntl.h>
#include <rdma/ib_user_verbs.h>
#include <stdlib.h>
#include <unistd.h>

struct channel {
    lab_channel base;
    struct channel *next;
    int keep;    /* a reading end of ours: a channel that is gone must not kill the program by SIGPIPE */
    bool closed; /* by the program; a queue may still name it */
};

static struct channel *channels;

/* Away from the low numbers, which programs expect to get in order. */
static int move_up(int fd) {
    const int up = fcntl(fd, F_DUPFD_CLOEXEC, 512);
    if (up < 0) return fd; /* ulimit -n may be lower */
    close(fd);
    return up;
}

int lab_pipe(int ends[2]) {
    if (pipe2(ends, O_CLOEXEC)) return errno;
    ends[1] = move_up(ends[1]);
    if (fcntl(ends[1], F_SETFL, O_NONBLOCK) == 0) return 0;
    const int error = errno;
    close(ends[0]);
    close(ends[1]);
    return error;
}

lab_channel *lab_channel_new(lab_context *context) {
    struct channel *c = calloc(1, sizeof *c);
    int ends[2];
    if (!c) return NULL;
    const int error = lab_pipe(ends);
    if (error) {
        free(c);
        errno = error;
        return NULL;
    }
    const int keep = fcntl(ends[0], F_DUPFD_CLOEXEC, 512);
    *c = (struct channel){.base = {.context = context, .read = ends[0], .write = ends[1]}, .next = channels, .keep = keep};
    channels = c;
    return &c->base;
}

lab_channel *lab_channel_of_fd(const lab_context *context, int fd) {
    for (struct channel *c = channels; c; c = c->next)
        if (!c->closed && c->base.context == context && c->base.read == fd) return &c->base;
    return NULL;
}

bool lab_is_channel(int fd) {
    for (struct channel *c = channels; c; c = c->next)
        if (!c->closed && c->base.read == fd) return true;
    return false;
}

void lab_channel_closed(int fd) {
    for (struct channel *c = channels; c; c = c->next)
        if (c->base.read == fd) c->closed = true;
}

/* Queues that name one end before: a channel's memory lives as long as its context. */
void lab_channels_free(const lab_context *context) {
    for (struct channel **at = &channels; *at;) {
        struct channel *c = *at;
        if (c->base.context != context) {
            at = &c->next;
            continue;
        }
        *at = c->next;
        close(c->base.write);
        if (c->keep >= 0) close(c->keep);
        free(c);
    }
}

void lab_channels_forget(void) {
    channels = NULL;
}

static void report(int fd, const void *event, size_t bytes) {
    if (write(fd, event, bytes) == (ssize_t)bytes) return;
    if (errno == EPIPE || errno == EBADF) return; /* nobody can read it */
    lab_die("a program that reads none of its events has more of them than a pipe holds");
}

void lab_cq_notify(lab_cq *cq, bool solicited) {
    if (!cq->armed || (cq->solicited_only && !solicited)) return;
    cq->armed = false;
    if (!cq->channel) return;
    const struct ib_uverbs_comp_event_desc event = {.cq_handle = cq->user_handle};
    cq->events++;
    if (!((const struct channel *)(const void *)cq->channel)->closed) report(cq->channel->write, &event, sizeof event);
}

static void count(lab_context *context, enum lab_event event, uint64_t element) {
    switch (event) {
    case LAB_EVENT_DEVICE_FATAL: return;
    case LAB_EVENT_CQ_ERR: lab_event_count(context, LAB_CQ, element); return;
    case LAB_EVENT_SRQ_LIMIT: lab_event_count(context, LAB_SRQ, element); return;
    case LAB_EVENT_QP_FATAL:
    case LAB_EVENT_QP_REQ_ERR:
    case LAB_EVENT_QP_ACCESS_ERR:
    case LAB_EVENT_COMM_EST:
    case LAB_EVENT_QP_LAST_WQE: lab_event_count(context, LAB_QP, element); return;
    }
    lab_die("asynchronous event %d is not known", (int)event);
}

void lab_async_event(lab_context *context, enum lab_event event, uint64_t element) {
    if (context->async_write < 0) return;
    const struct ib_uverbs_async_event_desc text = {.element = element, .event_type = event};
    count(context, event, element);
    report(context->async_write, &text, sizeof text);
}
