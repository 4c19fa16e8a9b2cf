/* SPDX-License-Identifier: Apache-2.0
 *
 * knobs.c: knobs by name. Everything comes from the rows of VNIC_KNOBS.
 */
#include "knobs.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct row {
    const char *name, *values, *text;
    size_t offset;
} rows[] = {
#define ROW_(name, values, text) {#name, values, text, offsetof(vnic_knobs, name)},
    VNIC_KNOBS(ROW_)
#undef ROW_
};
#define ROWS (sizeof rows / sizeof *rows)

static uint64_t *field(vnic_knobs *knobs, const struct row *row) {
    return (uint64_t *)(void *)((char *)knobs + row->offset);
}

static bool enumeration(const struct row *row) {
    return strchr(row->values, '|') != NULL;
}

/* The index of a word in "a|b|c", or -1. */
static int word_index(const char *words, const char *word) {
    const size_t length = strlen(word);
    int index = 0;
    for (const char *at = words; at; index++) {
        const char *end = strchr(at, '|');
        const size_t here = end ? (size_t)(end - at) : strlen(at);
        if (here == length && !memcmp(at, word, length)) return index;
        at = end ? end + 1 : NULL;
    }
    return -1;
}

static void word_at(const char *words, uint64_t index, char *out, size_t bytes) {
    const char *at = words;
    while (index-- && at) {
        at = strchr(at, '|');
        if (at) at++;
    }
    if (!at) at = "?";
    const size_t length = strcspn(at, "|");
    snprintf(out, bytes, "%.*s", (int)length, at);
}

static bool number(const char *text, uint64_t *value) {
    if (*text < '0' || *text > '9') return false;
    char *end;
    errno = 0;
    *value = strtoull(text, &end, 0);
    return !errno && !*end;
}

static int set(vnic_knobs *knobs, const struct row *row, const char *value, char *text) {
    uint64_t n = 0;
    const bool is_number = number(value, &n);
    if (enumeration(row)) {
        const int index = word_index(row->values, value);
        if (index < 0) {
            snprintf(text, 256, "knob %s=%.40s: %s are possible", row->name, value, row->values);
            return -1;
        }
        n = (uint64_t)index;
    } else if (!strcmp(row->values, "bool") && (!is_number || n > 1)) {
        snprintf(text, 256, "knob %s=%.40s: 0 and 1 are possible", row->name, value);
        return -1;
    } else if (!strcmp(row->values, "percent") && (!is_number || n > 100)) {
        snprintf(text, 256, "knob %s=%.40s: 0 to 100 are possible", row->name, value);
        return -1;
    } else if (!is_number) {
        snprintf(text, 256, "knob %s=%.40s: a number (%s) is wanted", row->name, value, row->values);
        return -1;
    }
    *field(knobs, row) = n;
    return 0;
}

/* Letters to put in, take out or change until one is the other. */
static uint32_t distance(const char *a, const char *b) {
    uint32_t row[64];
    const size_t width = strlen(b);
    if (width >= 64) return UINT32_MAX;
    for (size_t i = 0; i <= width; i++) row[i] = (uint32_t)i;
    for (; *a; a++) {
        uint32_t corner = row[0]++;
        for (size_t i = 1; i <= width; i++) {
            const uint32_t above = row[i], changed = corner + (*a != b[i - 1]);
            row[i] = 1 + (above < row[i - 1] ? above : row[i - 1]);
            if (changed < row[i]) row[i] = changed;
            corner = above;
        }
    }
    return row[width];
}

/* There are too many of them for a text. */
static void no_such_knob(const char *key, bool of_device, char *text) {
    size_t best = 0;
    for (size_t i = 1; i < ROWS; i++)
        if (distance(key, rows[i].name) < distance(key, rows[best].name)) best = i;
    const char *nearest = distance(key, rows[best].name) <= 1 + strlen(key) / 3 ? rows[best].name : NULL;
    snprintf(text, 256, "no knob '%.30s'%s%s; uccl_ep.simulator.knobs(PROFILE) lists all%s", key,
             nearest ? "; did you mean " : "", nearest ? nearest : "",
             of_device ? "; a device also takes world, rank, profile" : "");
}

static int one(vnic_knobs *knobs, const char *key, const char *value, vnic_other_key pass, void *context, char *text) {
    for (size_t i = 0; i < ROWS; i++)
        if (!strcmp(rows[i].name, key)) return set(knobs, &rows[i], value, text);
    if (pass) {
        const int taken = pass(context, key, value, text);
        if (taken) return taken < 0 ? -1 : 0;
    }
    no_such_knob(key, pass != NULL, text);
    return -1;
}

int vnic_knobs_parse(vnic_knobs *knobs, const char *options, vnic_other_key pass, void *context, char *text) {
    const char *at = options ? options : "";
    while (*at) {
        char word[128];
        const size_t length = strcspn(at, ",");
        if (length >= sizeof word) {
            snprintf(text, 256, "'%.40s...' is longer than any option", at);
            return -1;
        }
        memcpy(word, at, length);
        word[length] = 0;
        at += length + (at[length] == ',');
        if (!length) continue;
        char *value = strchr(word, '=');
        if (!value) {
            snprintf(text, 256, "'%.40s': key=value is wanted", word);
            return -1;
        }
        *value++ = 0;
        if (one(knobs, word, value, pass, context, text)) return -1;
    }
    return vnic_knobs_check(knobs, text);
}

int vnic_knobs_check(const vnic_knobs *k, char *text) {
    const char *why = NULL;
    if (k->pieces > 4)
        why = "pieces: 1 to 4 are possible";
    else if (k->imm_bits > 64)
        why = "imm_bits: at most 64";
    else if (k->key_bits != 32 && k->key_bits != 64)
        why = "key_bits: 32 and 64 are possible";
    else if (!k->max_wr || k->max_wr > 1u << 24)
        why = "max_wr: 1 to 2^24 are possible";
    else if (!k->max_cqe || k->max_cqe > 1u << 26)
        why = "max_cqe: 1 to 2^26 are possible";
    else if (!k->max_msg || k->max_msg > UINT32_MAX)
        why = "max_msg: 1 to 2^32 - 1 are possible";
    else if (k->max_qp > 1u << 30)
        why = "max_qp: at most 2^30";
    else if (k->max_batch > 1u << 20)
        why = "max_batch: at most 2^20";
    else if (k->max_inline > 4096)
        why = "max_inline: at most 4096";
    else if (!k->max_sge)
        why = "max_sge: at least 1";
    else if (k->nics > 16)
        why = "nics: at most 16";
    else if (k->nics > 1 && k->ranks_per_nic > 1)
        why = "nics and ranks_per_nic cannot both be above 1";
    else if (k->delay > 1000000000ull || k->visible_delay > 1000000000ull || k->retry_ns > 1000000000000ull)
        why = "delay and visible_delay: at most a second; retry_ns: at most 1000";
    else if (k->responder_atomics > 1u << 20)
        why = "responder_atomics: at most 2^20";
    else if (k->order_write_write && k->place_order != VNIC_PLACE_STRICT && !k->relaxed)
        why = "order_write_write=1 needs place_order=strict (or relaxed=1, which takes the order away)";
    else if (k->cqe_cumulative && k->completion_order != VNIC_COMPLETES_IN_ORDER)
        why = "cqe_cumulative=1 needs completion_order=in_order";
    else if (k->read_flushes && (!k->has_read || k->completion_order != VNIC_COMPLETES_IN_ORDER))
        why = "read_flushes=1 needs has_read=1 and completion_order=in_order";
    else if (k->error_scope == VNIC_ERROR_QP && k->completion_order != VNIC_COMPLETES_IN_ORDER)
        why = "error_scope=qp needs completion_order=in_order: what is behind an error is flushed in order";
    else if (k->error_scope == VNIC_ERROR_QP && k->completion_level == VNIC_LEVEL_TX)
        why = "error_scope=qp needs completion_level=ack or delivery: an error that comes after the completion stops "
              "nothing";
    if (!why) return 0;
    snprintf(text, 256, "%s", why);
    return -1;
}

uint32_t vnic_knobs_text(const vnic_knobs *knobs, char *text, uint32_t bytes) {
    size_t used = 0;
    if (bytes) text[0] = 0;
    for (size_t i = 0; i < ROWS; i++) {
        char line[512], value[64];
        uint64_t n;
        memcpy(&n, (const char *)knobs + rows[i].offset, sizeof n);
        if (enumeration(&rows[i]))
            word_at(rows[i].values, n, value, sizeof value);
        else
            snprintf(value, sizeof value, "%llu", (unsigned long long)n);
        const int length =
            snprintf(line, sizeof line, "%s=%s  (%s) %s\n", rows[i].name, value, rows[i].values, rows[i].text);
        if (used < bytes) snprintf(text + used, bytes - used, "%s", line);
        used += (size_t)length;
    }
    return (uint32_t)used + 1;
}

const char *vnic_knob_name(uint32_t i) {
    return i < ROWS ? rows[i].name : NULL;
}

bool vnic_knob_of_world(const char *name) {
    for (size_t i = 0; i < ROWS; i++)
        if (!strcmp(rows[i].name, name)) return !strncmp(rows[i].text, "WORLD", 5);
    return false;
}
