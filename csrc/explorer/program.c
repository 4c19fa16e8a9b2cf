/* SPDX-License-Identifier: Apache-2.0
 *
 * program.c: reading, laying out and printing litmus programs.
 */
#include "program.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct reader {
    const char *at;
    uint32_t line;
    char *error;
    bool failed;
} reader;

static int fail(reader *r, const char *format, ...) {
    if (!r->failed) {
        char what[200];
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(what, sizeof what, format, arguments);
        va_end(arguments);
        snprintf(r->error, 256, "line %u: %s", r->line, what);
    }
    r->failed = true;
    return -1;
}

static void skip_blanks(reader *r) {
    for (;;) {
        if (*r->at == '#')
            while (*r->at && *r->at != '\n') r->at++;
        if (*r->at != ' ' && *r->at != '\t' && *r->at != '\r') return;
        r->at++;
    }
}

static bool statement_ends(reader *r) {
    skip_blanks(r);
    return !*r->at || *r->at == ';' || *r->at == '\n';
}

static bool is_name(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
}

static bool word(reader *r, char *out, size_t room) {
    skip_blanks(r);
    size_t n = 0;
    while (is_name(r->at[n]) && r->at[n] != '-') n++;
    if (!n || n >= room) return false;
    memcpy(out, r->at, n);
    out[n] = 0;
    r->at += n;
    return true;
}

static bool take(reader *r, const char *token) {
    skip_blanks(r);
    const size_t n = strlen(token);
    if (strncmp(r->at, token, n)) return false;
    /* A word must end where the token does. */
    if (is_name(token[n - 1]) && is_name(r->at[n]) && token[0] != '-') return false;
    r->at += n;
    return true;
}

static uint64_t number(reader *r, uint64_t most, const char *what) {
    skip_blanks(r);
    char *end;
    if (*r->at < '0' || *r->at > '9') {
        fail(r, "%s is a number from 0 to %" PRIu64 ", not '%.12s'", what, most, r->at);
        return 0;
    }
    const uint64_t value = strtoull(r->at, &end, 0);
    if (value > most) fail(r, "%s is at most %" PRIu64, what, most);
    r->at = end;
    return value;
}

static uint32_t small(reader *r, uint32_t most, const char *what) {
    return (uint32_t)number(r, most, what);
}

/* ---------------------------------------------------------------------------------------------------------- names */

uint8_t program_buffer(program *p, const char *name, uint32_t bytes) {
    for (uint32_t i = 0; i < p->n_buffers; i++) {
        if (strcmp(p->buffers[i].name, name)) continue;
        if (bytes > p->buffers[i].bytes) p->buffers[i].bytes = bytes;
        return (uint8_t)i;
    }
    if (p->n_buffers == MAX_BUFFERS) return UINT8_MAX;
    snprintf(p->buffers[p->n_buffers].name, sizeof p->buffers[0].name, "%s", name);
    p->buffers[p->n_buffers].bytes = bytes;
    return (uint8_t)p->n_buffers++;
}

uint16_t program_label(program *p, const char *name) {
    for (uint32_t i = 0; i < p->n_labels; i++)
        if (!strcmp(p->labels[i], name)) return (uint16_t)i;
    if (p->n_labels == MAX_LABELS) return NO_LABEL;
    snprintf(p->labels[p->n_labels], sizeof p->labels[0], "%s", name);
    return (uint16_t)p->n_labels++;
}

/* "a", "a+16", into buffer and offset. */
static void place(reader *r, program *p, uint8_t *out, uint32_t *at) {
    char name[12];
    if (!word(r, name, sizeof name)) {
        fail(r, "a buffer's name (at most 11 letters and digits) is missing");
        return;
    }
    *at = take(r, "+") ? small(r, MAX_BYTES, "an offset") : 0;
    *out = program_buffer(p, name, 0);
    if (*out == UINT8_MAX) fail(r, "more than %u buffers", MAX_BUFFERS);
}

static void grow(program *p, uint8_t which, uint32_t bytes) {
    if (which < p->n_buffers && bytes > p->buffers[which].bytes) p->buffers[which].bytes = bytes;
}

static uint16_t label(reader *r, program *p) {
    char name[12];
    if (!word(r, name, sizeof name)) {
        fail(r, "a label's name (at most 11 letters and digits) is missing");
        return NO_LABEL;
    }
    const uint16_t i = program_label(p, name);
    if (i == NO_LABEL) fail(r, "more than %u labels", MAX_LABELS);
    return i;
}

static uint8_t slot(reader *r) {
    skip_blanks(r);
    if (*r->at != 's') fail(r, "a signal is s0, s1, ... and not '%.12s'", r->at);
    r->at++;
    return (uint8_t)small(r, MAX_SLOTS - 1, "a signal");
}

/* ---------------------------------------------------------------------------------------------------- statements */

static void post(reader *r, program *p, litmus_op *o) {
    o->channel = (uint8_t)small(r, p->channels - 1, "a channel");
    if (!take(r, "->")) fail(r, "'->' and the target's rank come next, not '%.12s'", r->at);
    o->target = (uint8_t)small(r, p->ranks - 1, "a target");
    const bool puts = o->kind == OP_PUT || o->kind == OP_PUT_SIGNAL, signals = o->kind & 2 && o->kind < OP_FLUSH;
    if (puts) {
        place(r, p, &o->to, &o->at);
        o->bytes = small(r, MAX_BYTES / 2, "a length");
        o->from = o->to;
        o->from_at = o->at;
    }
    if (signals) o->slot = slot(r);
    while (!r->failed && !statement_ends(r)) {
        if (signals && take(r, "+")) {
            o->explicit_add = true;
            o->value = number(r, UINT64_MAX, "an add");
        } else if (puts && take(r, "from")) {
            place(r, p, &o->from, &o->from_at);
        } else if (take(r, "as")) {
            o->label = label(r, p);
        } else {
            fail(r, "'+N', 'from BUFFER' or 'as LABEL' may come next, not '%.12s'", r->at);
        }
    }
    if (puts) {
        grow(p, o->to, o->at + o->bytes);
        grow(p, o->from, o->from_at + o->bytes);
    }
}

static void wait_signal(reader *r, program *p, litmus_op *o) {
    o->slot = slot(r);
    o->explicit_add = take(r, ">=");
    o->value = number(r, UINT64_MAX, "how many signals to wait for");
    if (!take(r, "from")) return;
    o->of_rank = small(r, p->ranks - 1, "a rank");
    if (take(r, ".")) o->of_channel = small(r, p->channels - 1, "a channel");
}

static const struct {
    const char *name;
    op_kind kind;
} statements[] = {{"put", OP_PUT},         {"signal", OP_SIGNAL},     {"put_signal", OP_PUT_SIGNAL},
                  {"flush", OP_FLUSH},     {"store", OP_STORE},       {"read", OP_READ},
                  {"see", OP_SEE},         {"wait", OP_WAIT},         {"quiet", OP_QUIET},
                  {"source", OP_SOURCE},   {"complete", OP_COMPLETE}, {"free", OP_FREE},
                  {"barrier", OP_BARRIER}, {"until", OP_UNTIL},       {"claim", OP_CLAIM}};
#define STATEMENTS (sizeof statements / sizeof *statements)

static void statement(reader *r, program *p, uint32_t rank, const char *name) {
    litmus_op o = {.label = NO_LABEL, .of_rank = ANY, .of_channel = ANY};
    for (size_t i = 0; i < STATEMENTS; i++)
        if (!strcmp(statements[i].name, name)) o.kind = (uint8_t)statements[i].kind;
    switch (o.kind) {
    case 0:
        fail(r,
             "no operation '%s': put, signal, put_signal, flush, store, read, see, wait, quiet, source, "
             "complete, free, barrier, until or claim",
             name);
        return;
    case OP_PUT:
    case OP_SIGNAL:
    case OP_PUT_SIGNAL:
    case OP_FLUSH:
        post(r, p, &o);
        break;
    case OP_STORE:
    case OP_READ:
        place(r, p, &o.to, &o.at);
        o.bytes = small(r, MAX_BYTES / 2, "a length");
        grow(p, o.to, o.at + o.bytes);
        break;
    case OP_SEE:
        o.slot = slot(r);
        break;
    case OP_WAIT:
        wait_signal(r, p, &o);
        break;
    case OP_QUIET:
    case OP_SOURCE:
        o.channel = statement_ends(r) ? UINT8_MAX : (uint8_t)small(r, p->channels - 1, "a channel");
        break;
    case OP_COMPLETE:
    case OP_FREE:
        o.label = label(r, p);
        break;
    case OP_UNTIL:
    case OP_CLAIM:
        place(r, p, &o.to, &o.at);
        o.label = label(r, p);
        break;
    default:
        break;
    }
    if (r->failed) return;
    if ((o.bytes | o.at | o.from_at) % 8) {
        fail(r, "offsets and lengths are multiples of 8");
        return;
    }
    if (p->n[rank] == MAX_OPS) {
        fail(r, "more than %u operations of a rank", MAX_OPS);
        return;
    }
    p->ops[rank][p->n[rank]++] = o;
}

static bool header(reader *r, program *p, const char *name) {
    if (!strcmp(name, "ranks"))
        p->ranks = small(r, MAX_RANKS, "ranks");
    else if (!strcmp(name, "channels"))
        p->channels = small(r, MAX_CHANNELS, "channels");
    else if (!strcmp(name, "proxies"))
        p->proxies = small(r, MAX_CHANNELS, "proxies");
    else if (!strcmp(name, "ring"))
        p->ring_log2 = small(r, 8, "the ring's log2");
    else if (!strcmp(name, "granularity"))
        p->granularity = small(r, 16, "the granularity");
    else if (!strcmp(name, "message"))
        p->message = small(r, 1u << 20, "the longest message");
    else if (!strcmp(name, "inflight"))
        p->inflight = small(r, 1u << 20, "the operations in flight");
    else if (!strcmp(name, "inflight_peer"))
        p->inflight_peer = small(r, 1u << 20, "the operations in flight to a peer");
    else if (!strcmp(name, "inflight_bytes"))
        p->inflight_bytes = small(r, 1u << 30, "the bytes in flight");
    else if (!strcmp(name, "single_writer"))
        p->single_writer = true;
    else if (!strcmp(name, "first_ticket"))
        p->first_ticket = number(r, INT64_MAX, "the first ticket");
    else if (!strcmp(name, "first_sequence"))
        p->first_sequence = number(r, UINT64_MAX, "the first sequence");
    else if (!strcmp(name, "wrong")) { /* "wrong PUT-5 on efa cxi": names have dashes here */
        for (uint32_t i = 0; !statement_ends(r); i++) {
            char part[24];
            size_t n = 0;
            while (is_name(r->at[n]) && n + 1 < sizeof part) part[n] = r->at[n], n++;
            if (!n) return fail(r, "'wrong CLAUSE on PROFILE ...'"), true;
            part[n] = 0;
            r->at += n;
            if (!i)
                snprintf(p->wrong, sizeof p->wrong, "%.7s", part);
            else if (i > 1 || strcmp(part, "on"))
                snprintf(p->breaks + strlen(p->breaks), sizeof p->breaks - strlen(p->breaks), "%s%s",
                         p->breaks[0] ? " " : "", part);
        }
    } else
        return false;
    return true;
}

int program_parse(program *p, const char *text, char *error) {
    memset(p, 0, sizeof *p);
    *p = (program){.ranks = 2, .channels = 1, .proxies = 1, .ring_log2 = 4, .granularity = 16};
    reader r = {.at = text, .line = 1, .error = error};
    uint32_t rank = ANY;
    while (!r.failed) {
        skip_blanks(&r);
        if (!*r.at) break;
        if (*r.at == ';' || *r.at == '\n') {
            r.line += *r.at++ == '\n';
            continue;
        }
        char name[16];
        if (!word(&r, name, sizeof name)) {
            fail(&r, "'%.12s' begins no statement", r.at);
            break;
        }
        if (name[0] == 'r' && name[1] >= '0' && name[1] <= '9' && !name[2] && take(&r, ":")) {
            rank = (uint32_t)(name[1] - '0');
            if (rank >= p->ranks) fail(&r, "rank %u of %u", rank, p->ranks);
            continue;
        }
        if (!(rank == ANY && header(&r, p, name))) {
            if (rank == ANY)
                fail(&r,
                     "'%s' before the first 'r0:': ranks, channels, proxies, ring, granularity, message, inflight, "
                     "inflight_peer, inflight_bytes, single_writer, first_ticket, first_sequence or wrong",
                     name);
            else
                statement(&r, p, rank, name);
        }
        if (!r.failed && !statement_ends(&r)) fail(&r, "'%.12s' is too much", r.at);
    }
    if (r.failed) return -1;
    return program_lay_out(p, error);
}

/* ---------------------------------------------------------------------------------------------------------- layout */

static int lay_out_signals(program *p, char *error) {
    for (uint32_t t = 0; t < p->ranks; t++)
        for (uint32_t s = 0; s < MAX_SLOTS; s++) {
            uint32_t count[MAX_RANKS][MAX_CHANNELS] = {{0}}, fields = 0, most = 0;
            bool explicit_add = false;
            for (uint32_t r = 0; r < p->ranks; r++)
                for (uint32_t i = 0; i < p->n[r]; i++) {
                    const litmus_op *o = &p->ops[r][i];
                    if ((o->kind != OP_SIGNAL && o->kind != OP_PUT_SIGNAL) || o->target != t || o->slot != s) continue;
                    explicit_add |= o->explicit_add;
                    if (!count[r][o->channel]++) fields++;
                    if (count[r][o->channel] > most) most = count[r][o->channel];
                }
            if (explicit_add || !fields) continue;
            uint32_t width = fields == 1 ? 64 : 1;
            while (fields > 1 && (1u << width) <= most) width++;
            if (fields > 1 && fields * width > 64) {
                snprintf(error, 256, "signal s%u of rank %u: %u senders of up to %u signals do not fit 64 bits", s, t,
                         fields, most);
                return -1;
            }
            p->width[t][s] = (uint8_t)width;
            uint32_t shift = 0;
            for (uint32_t r = 0; r < p->ranks; r++)
                for (uint32_t c = 0; c < p->channels; c++)
                    if (count[r][c]) p->shift[t][s][r][c] = (uint8_t)shift, shift += width;
        }
    return 0;
}

int program_lay_out(program *p, char *error) {
    if (!p->ranks || !p->channels || !p->proxies || p->proxies > p->channels || !p->ring_log2 ||
        (p->granularity != 4 && p->granularity != 16)) {
        snprintf(error, 256, "ranks 1 to %u, channels 1 to %u, proxies 1 to channels, ring 1 to 8, granularity 4 or 16",
                 MAX_RANKS, MAX_CHANNELS);
        return -1;
    }
    uint32_t offset = 0;
    for (uint32_t i = 0; i < p->n_buffers; i++) {
        p->buffers[i].offset = offset;
        /* A gap of 64 bytes behind each, so that a byte too many shows. */
        offset += (p->buffers[i].bytes + 63) / 64 * 64 + 64;
    }
    if (offset > MAX_BYTES) {
        snprintf(error, 256, "the buffers take %u bytes: %u are the most", offset, MAX_BYTES);
        return -1;
    }
    bool given[MAX_LABELS] = {false};
    for (uint32_t r = 0; r < p->ranks; r++)
        for (uint32_t i = 0; i < p->n[r]; i++) {
            const litmus_op *o = &p->ops[r][i];
            if (o->kind > OP_FLUSH || o->label == NO_LABEL) continue;
            if (given[o->label]) {
                snprintf(error, 256, "the label %s is given twice", p->labels[o->label]);
                return -1;
            }
            given[o->label] = true;
        }
    for (uint32_t r = 0; r < p->ranks; r++)
        for (uint32_t i = 0; i < p->n[r]; i++) {
            const litmus_op *o = &p->ops[r][i];
            if (o->kind > OP_FLUSH && o->label != NO_LABEL && !given[o->label]) {
                snprintf(error, 256, "nobody gives the label %s", p->labels[o->label]);
                return -1;
            }
            if ((o->kind == OP_PUT || o->kind == OP_PUT_SIGNAL) && (o->bytes | o->at | o->from_at) % p->granularity) {
                snprintf(error, 256, "a put of %u bytes at granularity %u", o->bytes, p->granularity);
                return -1;
            }
        }
    p->laid_out = true;
    return lay_out_signals(p, error);
}

uint32_t program_heap(const program *p) {
    if (!p->n_buffers) return 0;
    const buffer *last = &p->buffers[p->n_buffers - 1];
    return last->offset + (last->bytes + 63) / 64 * 64 + 64;
}

bool program_has_single_writers(const program *p) {
    uint32_t writer[MAX_RANKS][MAX_SLOTS] = {{0}}; /* rank + 1 */
    for (uint32_t rank = 0; rank < p->ranks; rank++)
        for (uint32_t i = 0; i < p->n[rank]; i++) {
            const litmus_op *o = &p->ops[rank][i];
            if (o->kind != OP_SIGNAL && o->kind != OP_PUT_SIGNAL) continue;
            uint32_t *w = &writer[o->target][o->slot];
            if (*w && *w != rank + 1) return false;
            *w = rank + 1;
        }
    return true;
}

bool program_breaks_on(const program *p, const char *profile) {
    const size_t n = strlen(profile);
    for (const char *at = p->breaks; (at = strstr(at, profile)); at++)
        if ((at == p->breaks || at[-1] == ' ') && (!at[n] || at[n] == ' ')) return true;
    return false;
}

uint32_t program_operations(const program *p) {
    uint32_t n = 0;
    for (uint32_t r = 0; r < p->ranks; r++)
        for (uint32_t i = 0; i < p->n[r]; i++) n += p->ops[r][i].kind <= OP_FLUSH;
    return n;
}

/* --------------------------------------------------------------------------------------------------------- printing */

typedef struct printer {
    char *text;
    uint32_t room, used;
} printer;

static void say(printer *out, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int n = vsnprintf(out->used < out->room ? out->text + out->used : NULL,
                            out->used < out->room ? out->room - out->used : 0, format, arguments);
    va_end(arguments);
    out->used += (uint32_t)n;
}

static void say_place(printer *out, const program *p, uint8_t which, uint32_t at) {
    say(out, " %s", p->buffers[which].name);
    if (at) say(out, "+%u", at);
}

static void say_op(printer *out, const program *p, const litmus_op *o) {
    for (size_t i = 0; i < STATEMENTS; i++)
        if (statements[i].kind == o->kind) say(out, "%s", statements[i].name);
    const bool puts = o->kind == OP_PUT || o->kind == OP_PUT_SIGNAL;
    if (o->kind <= OP_FLUSH) say(out, " %u ->%u", o->channel, o->target);
    if (puts || o->kind == OP_STORE || o->kind == OP_READ) {
        say_place(out, p, o->to, o->at);
        say(out, " %u", o->bytes);
    }
    if (o->kind == OP_SIGNAL || o->kind == OP_PUT_SIGNAL || o->kind == OP_SEE || o->kind == OP_WAIT)
        say(out, " s%u", o->slot);
    if (o->kind <= OP_PUT_SIGNAL && o->explicit_add) say(out, " +%" PRIu64, o->value);
    if (o->kind == OP_WAIT) {
        say(out, " %s%" PRIu64, o->explicit_add ? ">=" : "", o->value);
        if (o->of_rank != ANY) say(out, " from %u", o->of_rank);
        if (o->of_channel != ANY) say(out, ".%u", o->of_channel);
    }
    if (puts && (o->from != o->to || o->from_at != o->at)) {
        say(out, " from");
        say_place(out, p, o->from, o->from_at);
    }
    if ((o->kind == OP_QUIET || o->kind == OP_SOURCE) && o->channel != UINT8_MAX) say(out, " %u", o->channel);
    if (o->kind == OP_UNTIL || o->kind == OP_CLAIM) say_place(out, p, o->to, o->at);
    if (o->label != NO_LABEL) say(out, "%s %s", o->kind <= OP_FLUSH ? " as" : "", p->labels[o->label]);
}

uint32_t program_print(const program *p, char *text, uint32_t bytes) {
    printer out = {text, bytes, 0};
    say(&out, "ranks %u; channels %u; proxies %u; ring %u; granularity %u", p->ranks, p->channels, p->proxies,
        p->ring_log2, p->granularity);
    if (p->message) say(&out, "; message %u", p->message);
    if (p->inflight) say(&out, "; inflight %u", p->inflight);
    if (p->inflight_peer) say(&out, "; inflight_peer %u", p->inflight_peer);
    if (p->inflight_bytes) say(&out, "; inflight_bytes %u", p->inflight_bytes);
    if (p->single_writer) say(&out, "; single_writer");
    if (p->first_ticket) say(&out, "; first_ticket %" PRIu64, p->first_ticket);
    if (p->first_sequence) say(&out, "; first_sequence %" PRIu64, p->first_sequence);
    say(&out, "\n");
    if (p->wrong[0]) say(&out, "wrong %s on %s\n", p->wrong, p->breaks);
    for (uint32_t r = 0; r < p->ranks; r++) {
        say(&out, "r%u:", r);
        for (uint32_t i = 0; i < p->n[r]; i++) {
            say(&out, "%s", i ? "; " : " ");
            say_op(&out, p, &p->ops[r][i]);
        }
        say(&out, "\n");
    }
    return out.used + 1;
}
