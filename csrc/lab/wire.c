/* SPDX-License-Identifier: Apache-2.0
 *
 * wire.c: sockets between the processes of a lab.
 *
 * A frame on the wire is 8 bytes, of which the first four are its length, and its bytes, up to a multiple of 8.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "wire.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "raw.h"

#define READ_AT_ONCE (256u << 10) /* of one link in a turn: the others come to theirs */
#define KEPT (1u << 20)           /* a buffer that grew beyond this goes back once it is empty */
#define HEAD 8u
#define ACCEPT_EVERY 16u /* turns */

struct buffer {
    char *bytes;
    size_t from, to, room;
};

struct hello {
    char magic[8];
    uint32_t version, slot, bytes, zero;
    char owner[WIRE_MAX_HELLO];
};
#define MAGIC "uccl-ep"
#define VERSION 1u

struct wire_link {
    struct wire *wire;
    struct wire_link *self; /* the other end of the link to oneself */
    int socket;             /* -1: none */
    uint32_t peer;
    bool ours, greeted /* it has said who it is */, ended;
    struct buffer in, out;
    void *user;
};

struct wire {
    struct wire_config config;
    char name[64], fabric[64];
    struct hello hello;
    int socket;
    bool full, said_full; /* there was no descriptor for who wants in */
    uint32_t slot, links, turns;
    struct wire_link *link[WIRE_MAX_LINKS];
};

/* --------------------------------------------------------------------------------------------------------- buffers */

static char *room_for(struct buffer *b, size_t bytes) {
    if (b->from == b->to) b->from = b->to = 0;
    if (b->room - b->to >= bytes) return b->bytes + b->to;
    if (b->from && b->room - (b->to - b->from) >= bytes && b->from >= (b->to - b->from)) {
        memmove(b->bytes, b->bytes + b->from, b->to - b->from);
    } else {
        size_t room = b->room ? b->room : 64u << 10;
        while (room - (b->to - b->from) < bytes) room *= 2;
        char *grown = malloc(room);
        if (!grown) return NULL;
        if (b->to > b->from) memcpy(grown, b->bytes + b->from, b->to - b->from);
        free(b->bytes);
        b->bytes = grown;
        b->room = room;
    }
    b->to -= b->from;
    b->from = 0;
    return b->bytes + b->to;
}

static void took(struct buffer *b, size_t bytes) {
    b->from += bytes;
    if (b->from < b->to) return;
    b->from = b->to = 0;
    if (b->room <= KEPT) return;
    free(b->bytes);
    *b = (struct buffer){0};
}

static size_t waiting(const struct buffer *b) {
    return b->to - b->from;
}

static size_t padded(size_t bytes) {
    return (bytes + 7) & ~(size_t)7;
}

/* ----------------------------------------------------------------------------------------------------------- links */

static void say(const struct wire *w, const struct wire_link *l, const char *why) {
    char text[256];
    struct ucred peer = {0};
    socklen_t bytes = sizeof peer;
    if (l->socket >= 0) getsockopt(l->socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes);
    snprintf(text, sizeof text, "process %d (slot %d) is cut off: %s", (int)peer.pid,
             l->ours || l->greeted ? (int)l->peer : -1, why);
    if (w->config.say) w->config.say(w->config.context, text);
}

/* Freed at the end of a turn: its owner may be in the middle of it. `why` NULL: the peer is gone. */
static void end(struct wire_link *l, const char *why) {
    if (l->ended) return;
    if (why) say(l->wire, l, why);
    l->ended = true;
    if (l->socket >= 0) raw_close(l->socket);
    l->socket = -1;
    if (l->self) end(l->self, NULL);
}

static struct wire_link *link_new(struct wire *w, int socket, uint32_t peer, bool ours) {
    struct wire_link *l = w->links < WIRE_MAX_LINKS ? calloc(1, sizeof *l) : NULL;
    if (!l) return NULL;
    *l = (struct wire_link){.wire = w, .socket = socket, .peer = peer, .ours = ours};
    w->link[w->links++] = l;
    return l;
}

static void link_free(struct wire_link *l) {
    if (l->socket >= 0) raw_close(l->socket);
    free(l->in.bytes);
    free(l->out.bytes);
    free(l);
}

bool wire_send(struct wire_link *l, const struct iovec *parts, uint32_t n) {
    if (l->ended) return false;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < n; i++) bytes += parts[i].iov_len;
    if (!bytes || bytes > l->wire->config.max_frame || waiting(&l->out) + bytes > l->wire->config.max_waiting) {
        end(l, bytes && bytes <= l->wire->config.max_frame ? "it does not take what it is sent" : "a frame too long");
        return false;
    }
    char *at = room_for(&l->out, HEAD + padded(bytes));
    if (!at) {
        end(l, "no memory for what it is to be sent");
        return false;
    }
    memset(at, 0, HEAD);
    memcpy(at, &(uint32_t){(uint32_t)bytes}, sizeof(uint32_t));
    char *to = at + HEAD;
    for (uint32_t i = 0; i < n; i++) {
        if (parts[i].iov_len) memcpy(to, parts[i].iov_base, parts[i].iov_len);
        to += parts[i].iov_len;
    }
    memset(to, 0, padded(bytes) - bytes);
    l->out.to += HEAD + padded(bytes);
    return true;
}

static void greet(struct wire_link *l) {
    wire_send(l, &(struct iovec){&l->wire->hello, sizeof l->wire->hello}, 1);
}

static bool is_ours(int socket) {
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    return !getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) && peer.uid == geteuid();
}

/* ------------------------------------------------------------------------------------------------------- addresses */

static socklen_t address_of(const struct wire *w, uint32_t slot, struct sockaddr_un *a) {
    *a = (struct sockaddr_un){.sun_family = AF_UNIX};
    const int n =
        snprintf(a->sun_path + 1, sizeof a->sun_path - 1, "%s/%u/%s/%u", w->name, (unsigned)geteuid(), w->fabric, slot);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

int wire_open(struct wire **wire, const struct wire_config *config) {
    if (!config->slots || config->slots > WIRE_MAX_SLOTS || config->hello_bytes > WIRE_MAX_HELLO ||
        config->max_frame < sizeof(struct hello) || strlen(config->name) >= sizeof((*wire)->name) ||
        strlen(config->fabric) >= sizeof((*wire)->fabric) || strlen(config->name) + strlen(config->fabric) > 80)
        return EINVAL;
    struct wire *w = calloc(1, sizeof *w);
    if (!w) return ENOMEM;
    w->config = *config;
    strcpy(w->name, config->name);
    strcpy(w->fabric, config->fabric);
    w->socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int error = w->socket < 0 ? errno : EADDRINUSE;
    for (w->slot = 0; error == EADDRINUSE && w->slot < config->slots; w->slot++) {
        struct sockaddr_un a;
        const socklen_t length = address_of(w, w->slot, &a);
        error = bind(w->socket, (struct sockaddr *)&a, length) ? errno : 0;
        if (!error) break;
    }
    if (!error && listen(w->socket, 128)) error = errno;
    if (error) {
        if (w->socket >= 0) raw_close(w->socket);
        free(w);
        return error == EADDRINUSE ? ENOSPC : error;
    }
    w->hello = (struct hello){.magic = MAGIC, .version = VERSION, .slot = w->slot, .bytes = config->hello_bytes};
    if (config->hello_bytes) memcpy(w->hello.owner, config->hello, config->hello_bytes);
    *wire = w;
    return 0;
}

void wire_close(struct wire *w) {
    for (uint32_t i = 0; i < w->links; i++) link_free(w->link[i]);
    raw_close(w->socket);
    free(w);
}

uint32_t wire_slot(const struct wire *w) {
    return w->slot;
}

struct wire_link *wire_known(const struct wire *w, uint32_t slot) {
    for (uint32_t i = 0; i < w->links; i++)
        if (w->link[i]->ours && w->link[i]->peer == slot && !w->link[i]->ended) return w->link[i];
    return NULL;
}

int wire_reach(struct wire *w, uint32_t slot, struct wire_link **link) {
    *link = wire_known(w, slot);
    if (*link) return 0;
    if (slot >= w->config.slots) return ECONNREFUSED;
    if (w->links + 2 > WIRE_MAX_LINKS) return ENOSPC;
    if (slot == w->slot) {
        struct wire_link *there = link_new(w, -1, slot, false);
        *link = there ? link_new(w, -1, slot, true) : NULL;
        if (!*link) {
            if (there) end(there, NULL);
            return ENOMEM;
        }
        (*link)->self = there;
        there->self = *link;
        there->greeted = (*link)->greeted = true;
        return 0;
    }
    const int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (s < 0) return errno;
    struct sockaddr_un a;
    const socklen_t length = address_of(w, slot, &a);
    int error = connect(s, (struct sockaddr *)&a, length) ? errno : 0;
    if (!error && !is_ours(s)) error = ECONNREFUSED; /* somebody else sits on the name */
    *link = error ? NULL : link_new(w, s, slot, true);
    if (!*link) {
        raw_close(s);
        return error ? error : ENOMEM;
    }
    greet(*link);
    return 0;
}

bool wire_is_ours(const struct wire_link *l) {
    return l->ours;
}

uint32_t wire_peer(const struct wire_link *l) {
    return l->peer;
}

void **wire_user(struct wire_link *l) {
    return &l->user;
}

/* ------------------------------------------------------------------------------------------------------------ turns */

static bool take_hello(struct wire_link *l, const char *frame, uint32_t bytes) {
    const struct wire *w = l->wire;
    struct hello h;
    if (bytes != sizeof h) {
        end(l, "it does not speak as a process of the lab");
        return false;
    }
    memcpy(&h, frame, sizeof h);
    const char *why = NULL;
    if (memcmp(h.magic, MAGIC, sizeof h.magic) || h.bytes > WIRE_MAX_HELLO)
        why = "it does not speak as a process of the lab";
    else if (h.version != VERSION || h.bytes != w->hello.bytes || memcmp(h.owner, w->hello.owner, h.bytes))
        why = "it is of another version of uccl_ep: run the same one everywhere";
    else if (h.slot >= w->config.slots || (l->ours && h.slot != l->peer))
        why = "it names a slot that it cannot have";
    if (why) {
        end(l, why);
        return false;
    }
    l->peer = h.slot;
    l->greeted = true;
    return true;
}

static uint32_t hand_on(struct wire_link *l) {
    uint32_t frames = 0;
    while (!l->ended && waiting(&l->in) >= HEAD) {
        uint32_t head[2];
        memcpy(head, l->in.bytes + l->in.from, sizeof head);
        if (!head[0] || head[0] > l->wire->config.max_frame || head[1]) {
            end(l, l->greeted ? "a frame of no length that there is" : "it does not speak as a process of the lab");
            break;
        }
        if (waiting(&l->in) < HEAD + padded(head[0])) break;
        const char *frame = l->in.bytes + l->in.from + HEAD;
        if (!l->greeted) {
            if (!take_hello(l, frame, head[0])) break;
        } else {
            const char *why = l->wire->config.frame(l->wire->config.context, l, frame, head[0]);
            if (why) {
                end(l, why);
                break;
            }
            frames++;
        }
        took(&l->in, HEAD + padded(head[0]));
    }
    return frames;
}

/* The buffer grows with what came, never by what a peer announces. */
static void read_link(struct wire_link *l) {
    for (uint32_t bytes = 0; bytes < READ_AT_ONCE;) {
        const size_t room = waiting(&l->in) > 32u << 10 ? waiting(&l->in) : 32u << 10;
        char *to = room_for(&l->in, room);
        if (!to) {
            end(l, "no memory for what it sends");
            return;
        }
        const ssize_t n = recv(l->socket, to, l->in.room - l->in.to, 0);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n <= 0) {
            hand_on(l); /* what it said before its end counts */
            end(l, NULL);
            return;
        }
        l->in.to += (size_t)n;
        bytes += (uint32_t)n;
        if ((size_t)n < room) return;
    }
}

static uint32_t write_link(struct wire_link *l) {
    uint32_t sends = 0;
    while (!l->ended && waiting(&l->out)) {
        const ssize_t n = raw_send(l->socket, l->out.bytes + l->out.from, waiting(&l->out), MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) break;
        if (n < 0) {
            /* It is gone. What it said before may still lie here: read_link finds the end. */
            l->out.from = l->out.to = 0;
            break;
        }
        took(&l->out, (size_t)n);
        sends++;
    }
    return sends;
}

/* accept4() looks for a descriptor first, and complains also where there is nobody. */
static bool somebody_waits(const struct wire *w) {
    struct pollfd p = {.fd = w->socket, .events = POLLIN};
    return poll(&p, 1, 0) == 1;
}

static void accept_some(struct wire *w) {
    for (uint32_t i = 0; i < 8; i++) {
        const int s = accept4(w->socket, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        w->full = s < 0 && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED && somebody_waits(w);
        if (w->full && !w->said_full && w->config.say) {
            w->said_full = true;
            w->config.say(w->config.context, "no descriptor is left to let another process in (ulimit -n)");
        }
        if (s < 0) return;
        struct wire_link *l = is_ours(s) ? link_new(w, s, 0, false) : NULL;
        if (l) {
            greet(l);
            continue;
        }
        say(w, &(struct wire_link){.socket = s}, is_ours(s) ? "there are too many links" : "it is of another user");
        raw_close(s);
    }
}

static uint32_t push(struct wire *w) {
    uint32_t sends = 0;
    for (uint32_t i = 0; i < w->links; i++)
        if (!w->link[i]->ended && !w->link[i]->self) sends += write_link(w->link[i]);
    return sends;
}

void wire_push(struct wire *w) {
    push(w);
}

uint32_t wire_turn(struct wire *w) {
    uint32_t done = 0;
    if (w->turns++ % ACCEPT_EVERY == 0) accept_some(w);
    /* Links that are made meanwhile come at the end. */
    for (uint32_t i = 0; i < w->links; i++) {
        struct wire_link *l = w->link[i];
        if (l->ended) continue;
        if (l->self) {
            if (!waiting(&l->in)) { /* what the other end sent */
                const struct buffer swap = l->in;
                l->in = l->self->out;
                l->self->out = swap;
            }
        } else {
            read_link(l);
        }
        done += hand_on(l);
    }
    done += push(w);
    for (uint32_t i = 0; i < w->links;) {
        struct wire_link *l = w->link[i];
        if (!l->ended) {
            i++;
            continue;
        }
        w->link[i] = w->link[--w->links];
        if (w->config.gone) w->config.gone(w->config.context, l);
        if (l->self) l->self->self = NULL;
        link_free(l);
        done++;
    }
    return done;
}

uint32_t wire_waits(struct wire *w, struct pollfd *fds) {
    uint32_t n = 0;
    w->turns = 0; /* who waited looks at everything */
    /* Who wants in and cannot be let in would wake us for ever: it is looked at whenever something else has. */
    if (!w->full) fds[n++] = (struct pollfd){.fd = w->socket, .events = POLLIN};
    for (uint32_t i = 0; i < w->links; i++) {
        const struct wire_link *l = w->link[i];
        if (l->socket < 0) continue;
        fds[n++] = (struct pollfd){.fd = l->socket, .events = (short)(POLLIN | (waiting(&l->out) ? POLLOUT : 0))};
    }
    return n;
}
