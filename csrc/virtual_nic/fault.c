/* SPDX-License-Identifier: Apache-2.0
 *
 * fault.c: faults by name.
 *
 * A fault is asked whether it strikes at the places that it is for. It counts how often it was asked there (nth), or
 * strikes with some percent, by a choice like all others. Faults that strike a rank as a whole come at a time and are
 * carried out by the owner of the fabric.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

enum key { KEY_RANK, KEY_PEER, KEY_NTH, KEY_COUNT, KEY_PERCENT, KEY_AT_NS, KEY_NS, KEY_CODE, KEYS };
static const char *const key_names[KEYS] = {"rank", "peer", "nth", "count", "percent", "at_ns", "ns", "code"};

static const struct row {
    const char *name, *keys, *text;
} rows[VNIC_FAULTS] = {
    [VNIC_FAULT_DROP] = {"drop", "rank peer nth count percent at_ns code",
                         "an operation ends with an error (code: the vendor's) and may not have been executed"},
    [VNIC_FAULT_DELAY] = {"delay", "rank peer nth count percent at_ns ns", "an operation takes so much longer"},
    [VNIC_FAULT_DUPLICATE_COMPLETION] = {"duplicate_completion", "rank peer nth count percent at_ns",
                                         "a completion comes twice"},
    [VNIC_FAULT_STRAY_COMPLETION] = {"stray_completion", "rank peer nth count percent at_ns",
                                     "a completion comes again after the connection was made anew"},
    [VNIC_FAULT_LOST_DOORBELL] = {"lost_doorbell", "rank peer nth count percent at_ns",
                                  "the NIC does not see what was posted until the next doorbell"},
    [VNIC_FAULT_ERROR_IN_BATCH] = {"error_in_batch", "rank peer nth count percent at_ns",
                                   "the operation in the middle of a batch fails (of batches of 2 and more)"},
    [VNIC_FAULT_QUEUE_ERROR] = {"queue_error", "rank peer nth count percent at_ns",
                                "the queue to a peer goes into error and flushes: at an operation, or at a time"},
    [VNIC_FAULT_RNR] = {"rnr", "rank peer nth count percent at_ns",
                        "an immediate finds no receive (rank: the target's; NICs whose immediates take one)"},
    [VNIC_FAULT_AGAIN] = {"again", "rank peer nth count percent at_ns", "a submit takes nothing and says: again"},
    [VNIC_FAULT_PARTIAL] = {"partial", "rank peer nth count percent at_ns", "a submit takes a part of the batch"},
    [VNIC_FAULT_SLOW_PEER] = {"slow_peer", "rank peer percent at_ns ns",
                              "every operation to this peer takes so much longer"},
    [VNIC_FAULT_PEER_DEATH] = {"peer_death", "rank at_ns", "the rank's process and NIC are gone"},
    [VNIC_FAULT_PEER_RETURN] = {"peer_return", "rank at_ns",
                                "the rank may open devices again, as a new incarnation; the old stay dead"},
    [VNIC_FAULT_DEVICE_LOST] = {"device_lost", "rank at_ns", "the rank's NIC is gone, its process is not"},
    [VNIC_FAULT_REGISTER_FAIL] = {"register_fail", "rank nth count percent at_ns",
                                  "a registration is refused for lack of pages"},
    [VNIC_FAULT_CALL_FAIL] = {"call_fail", "rank nth count percent at_ns",
                              "a control call of the backend fails: every entry that can fail is counted"},
    [VNIC_FAULT_MEMORY_PRESSURE] = {"memory_pressure", "rank nth count percent at_ns",
                                    "memory that the backend wants is not there"},
    [VNIC_FAULT_CLOCK_JUMP] = {"clock_jump", "at_ns ns", "virtual time jumps ahead"},
};

const char *vnic_fault_name(uint32_t i, const char **text, const char **keys) {
    if (i >= VNIC_FAULTS) return NULL;
    if (text) *text = rows[i].text;
    if (keys) *keys = rows[i].keys;
    return rows[i].name;
}

/* ------------------------------------------------------------------------------------------------------------ parse */

static int no_such_fault(const char *name, char *text) {
    size_t used = (size_t)snprintf(text, 256, "no fault '%.30s'; there are:", name);
    for (uint32_t i = 0; i < VNIC_FAULTS && used < 250; i++)
        used += (size_t)snprintf(text + used, 256 - used, " %s", rows[i].name);
    return -1;
}

static bool has_word(const char *words, const char *word) {
    const size_t length = strlen(word);
    for (const char *at = words; *at;) {
        const size_t here = strcspn(at, " ");
        if (here == length && !memcmp(at, word, length)) return true;
        at += here + (at[here] == ' ');
    }
    return false;
}

static int parse_key(const struct row *row, char *word, uint64_t values[KEYS], bool given[KEYS], char *text) {
    char *value = strchr(word, '=');
    if (value) *value++ = 0;
    for (uint32_t k = 0; value && k < KEYS; k++) {
        if (strcmp(word, key_names[k]) || !has_word(row->keys, word)) continue;
        char *end;
        errno = 0;
        values[k] = strtoull(value, &end, 0);
        if (errno || *end || *value < '0' || *value > '9') {
            snprintf(text, 256, "fault %s: %s=%.40s is no number", row->name, word, value);
            return -1;
        }
        given[k] = true;
        return 0;
    }
    snprintf(text, 256, "fault %s takes no '%.40s'; it takes: %s", row->name, word, row->keys);
    return -1;
}

static void come_true(void *context, uint64_t argument) {
    struct vnic_fabric *f = context;
    const struct fault *x = &f->faults[argument];
    note(f, NOTE_FAULT, x->rank, x->peer, (uint32_t)x->id, 0, 0);
    f->stats.faults++;
    if (x->id == VNIC_FAULT_QUEUE_ERROR)
        vnic_queue_error(f, x->rank, x->peer);
    else if (f->on_fault)
        f->on_fault(f->on_fault_context, x->id, x->rank, x->parameter);
}

void vnic_on_fault(struct vnic_fabric *f,
                   void (*call)(void *context, vnic_fault_id id, uint32_t rank, uint64_t parameter), void *context) {
    f->on_fault = call;
    f->on_fault_context = context;
}

int vnic_fault_add(struct vnic_fabric *f, const char *fault_text, char *text) {
    char copy[256];
    if (snprintf(copy, sizeof copy, "%s", fault_text) >= (int)sizeof copy) {
        snprintf(text, 256, "a fault takes 255 characters");
        return -1;
    }
    if (f->n_faults == MAX_FAULTS) {
        snprintf(text, 256, "%u faults at a time are possible", MAX_FAULTS);
        return -1;
    }
    char *rest = NULL;
    const char *name = strtok_r(copy, " ", &rest);
    const struct row *row = NULL;
    for (uint32_t i = 0; name && i < VNIC_FAULTS; i++)
        if (!strcmp(rows[i].name, name)) row = &rows[i];
    if (!row) return no_such_fault(name ? name : "", text);
    uint64_t values[KEYS] = {0};
    bool given[KEYS] = {false};
    for (char *word = strtok_r(NULL, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        if (parse_key(row, word, values, given, text)) return -1;
    struct fault x = {.id = (vnic_fault_id)(row - rows),
                      .rank = given[KEY_RANK] ? (uint32_t)values[KEY_RANK] : VNIC_ANY,
                      .peer = given[KEY_PEER] ? (uint32_t)values[KEY_PEER] : VNIC_ANY,
                      .percent = given[KEY_PERCENT] ? (uint32_t)values[KEY_PERCENT] : 100,
                      .nth = values[KEY_NTH],
                      .has_nth = given[KEY_NTH],
                      .count = given[KEY_COUNT] ? values[KEY_COUNT]
                               : given[KEY_NTH] ? 1
                                                : UINT64_MAX,
                      .at_ns = values[KEY_AT_NS],
                      .parameter = given[KEY_CODE] ? values[KEY_CODE] : values[KEY_NS],
                      .active = true};
    const char *why = NULL;
    const bool whole =
        x.id == VNIC_FAULT_PEER_DEATH || x.id == VNIC_FAULT_PEER_RETURN || x.id == VNIC_FAULT_DEVICE_LOST;
    const bool at_time =
        whole || x.id == VNIC_FAULT_CLOCK_JUMP ||
        (x.id == VNIC_FAULT_QUEUE_ERROR && !given[KEY_NTH] && !given[KEY_PERCENT] && !given[KEY_COUNT]);
    if (given[KEY_PERCENT] && values[KEY_PERCENT] > 100) why = "percent: 0 to 100 are possible";
    if (given[KEY_NTH] && !x.nth) why = "nth counts from 1";
    if ((given[KEY_RANK] && values[KEY_RANK] >= f->config.ranks) ||
        (given[KEY_PEER] && values[KEY_PEER] >= f->config.ranks))
        why = "rank= and peer= are ranks of the world";
    if ((whole || at_time) && x.id != VNIC_FAULT_CLOCK_JUMP && (!given[KEY_RANK] || x.rank >= f->config.ranks))
        why = "rank= is needed, one of the world";
    if (at_time && x.id == VNIC_FAULT_QUEUE_ERROR && !given[KEY_PEER]) why = "peer= is needed, or nth= or percent=";
    if ((x.id == VNIC_FAULT_DELAY || x.id == VNIC_FAULT_SLOW_PEER || x.id == VNIC_FAULT_CLOCK_JUMP) && !given[KEY_NS])
        why = "ns= is needed";
    if (why) {
        snprintf(text, 256, "fault %s: %s", row->name, why);
        return -1;
    }
    const uint32_t index = f->n_faults++;
    f->faults[index] = x;
    vnic_hash_mix(f, (uint64_t)x.id << 8 | 0xfa);
    if (!at_time)
        f->fault_mask |= 1u << x.id;
    else if (x.at_ns <= f->now)
        come_true(f, index);
    else
        vnic_call_at(f, x.at_ns, come_true, f, index);
    return 0;
}

/* ----------------------------------------------------------------------------------------------------------- strike */

bool fault_strikes(struct vnic_fabric *f, vnic_fault_id id, uint32_t rank, uint32_t peer, uint64_t *parameter) {
    bool strikes = false;
    for (uint32_t i = 0; i < f->n_faults; i++) {
        struct fault *x = &f->faults[i];
        if (x->id != id || (x->rank != VNIC_ANY && x->rank != rank) || (x->peer != VNIC_ANY && x->peer != peer) ||
            x->at_ns > f->now || !x->count)
            continue;
        x->seen++;
        if (x->has_nth && x->seen < x->nth) continue;
        if (!vnic_chance(f, VNIC_CHOICE_FAULT, rank, x->percent)) continue;
        if (x->count != UINT64_MAX) x->count--;
        if (parameter) *parameter = x->parameter;
        strikes = true;
        f->stats.faults++;
        note(f, NOTE_FAULT, rank, peer, (uint32_t)id, 0, 0);
        vnic_hash_mix(f, (uint64_t)id << 8 | 0xfb);
    }
    return strikes;
}

bool vnic_fault_strikes(struct vnic_fabric *f, vnic_fault_id id, uint32_t rank, uint32_t peer, uint64_t *parameter) {
    return fault(f, id, rank, peer, parameter);
}
