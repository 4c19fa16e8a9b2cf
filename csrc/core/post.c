/* SPDX-License-Identifier: Apache-2.0
 *
 * post.c: what a host thread does to post. The device's twin is device.h.
 */
#include <sched.h>
#include <stdio.h>

#include "internal.h"

/* A target that this channel may still send to, or why not (ERR-6). Cheap: one load. */
static uccl_ep_status check_target(uccl_ep_comm *comm, uint32_t channel, uint32_t target) {
    if (target >= comm->size) return fail_local(UCCL_EP_E_RANGE, "PUT-4", "rank %u of %u", target, comm->size);
    const closure *k = &comm->closures[(size_t)channel * comm->size + target];
    if (LIKELY(!atomic_load_explicit(&k->closed, memory_order_acquire)) || FAULT(no_incarnation)) return UCCL_EP_OK;
    const bool lost = bitmap_test(comm->lost, target);
    fail_local(lost ? UCCL_EP_E_PEER_LOST : UCCL_EP_E_CLOSED, "ERR-6",
               lost ? "rank %u is lost: channel %u sends nothing to it any more; go on without it, or reset"
                    : "commands to rank %u on channel %u are refused after an earlier failure (see errors()), or it "
                      "was excluded: "
                      "reset gives it a new incarnation",
               target, channel);
    last_error_slot()->peer = target;
    last_error_slot()->channel = channel;
    return (uccl_ep_status)last_error_slot()->status;
}

static uccl_ep_status refuse_channel(const uccl_ep_comm *comm, uint32_t channel_index) {
    if (channel_index >= comm->channels)
        return fail_local(UCCL_EP_E_RANGE, "PUT-4", "channel %u of %u", channel_index, comm->channels);
    const uint32_t device = comm->device_channels;
    if (device == comm->channels)
        return fail_local(UCCL_EP_E_INVALID, "", "all %u channels are posted to by kernels: make one more for the host",
                          device);
    return fail_local(UCCL_EP_E_INVALID, "",
                      "channel %u is posted to by kernels (0 to %u are): the host posts on %u to %u", channel_index,
                      device - 1, device, comm->channels - 1);
}

static uccl_ep_status check_channel(uccl_ep_comm *comm, uint32_t channel_index) {
    const uccl_ep_status status = check_usable(comm);
    if (UNLIKELY(status != UCCL_EP_OK)) return status;
    /* One comparison for both ends: those of the device come first. */
    if (UNLIKELY(channel_index - comm->device_channels >= comm->channels - comm->device_channels))
        return refuse_channel(comm, channel_index);
    if (UNLIKELY(__atomic_load_n(&comm->channel_of[channel_index]->counters->status, __ATOMIC_ACQUIRE) ==
                 UCCL_EP_CHANNEL_CLOSED)) {
        fail_local(UCCL_EP_E_CLOSED, "PRG-3", "channel %u is closed: see errors(), then reset", channel_index);
        last_error_slot()->channel = channel_index;
        return UCCL_EP_E_CLOSED;
    }
    return UCCL_EP_OK;
}

/* What of a command only its own sender's sizes can tell, for single posts and batches alike. The texts are kept out of
 * the way of those that are in order. */
#define COLD __attribute__((cold, noinline))

COLD static uccl_ep_status refuse_span(const uccl_ep_comm *comm, uint64_t local, uint64_t remote, uint64_t bytes) {
    return fail_local(UCCL_EP_E_RANGE, "PUT-4",
                      "%llu bytes from offset %llu to offset %llu leave the heap of %llu bytes",
                      (unsigned long long)bytes, (unsigned long long)local, (unsigned long long)remote,
                      (unsigned long long)comm->config.heap_bytes);
}
static inline uccl_ep_status check_span(const uccl_ep_comm *comm, uint64_t local, uint64_t remote, uint64_t bytes) {
    const uint64_t heap = comm->config.heap_bytes;
    if (LIKELY(bytes <= heap && local <= heap - bytes && remote <= heap - bytes)) return UCCL_EP_OK;
    return refuse_span(comm, local, remote, bytes);
}

COLD static uccl_ep_status refuse_slot(const uccl_ep_comm *comm, uint32_t slot) {
    return fail_local(UCCL_EP_E_RANGE, "SIG-1", "slot %u of %u signals", slot, comm->config.signals);
}
static inline uccl_ep_status check_slot(const uccl_ep_comm *comm, uint32_t slot) {
    return LIKELY(slot < comm->config.signals) ? UCCL_EP_OK : refuse_slot(comm, slot);
}

COLD static uccl_ep_status refuse_count(const uccl_ep_ring *ring, uint32_t n) {
    return fail_local(UCCL_EP_E_RANGE, "PUB-2", "%u commands together on a ring of %llu slots", n,
                      (unsigned long long)uccl_ep_ring_slots(ring));
}
static inline uccl_ep_status check_count(const uccl_ep_ring *ring, uint32_t n) {
    return LIKELY(n <= uccl_ep_ring_slots(ring)) ? UCCL_EP_OK : refuse_count(ring, n);
}

static uccl_ep_status no_space(uccl_ep_comm *comm, uint32_t channel, uint64_t n, uint64_t timeout_ns) {
    const uccl_ep_status status = fail_local(
        UCCL_EP_E_DEADLINE, "PRG-3",
        "the ring of channel %u had no room for %llu commands within %.3f s, and tickets were reserved: the channel is "
        "closed. See report() for whom it waits",
        channel, (unsigned long long)n,
        (double)(timeout_ns == UCCL_EP_TIMEOUT_DEFAULT ? comm->config.timeout_ns : timeout_ns) / 1e9);
    last_error_slot()->channel = channel;
    last_error_slot()->rank = comm->rank;
    return status;
}

/* Reserve without waiting: nothing is reserved if there is no room. */
static uccl_ep_status reserve_now(const uccl_ep_ring *ring, uint64_t n, uint64_t *first) {
    for (;;) {
        uint64_t head = __atomic_load_n(&ring->producer->head, __ATOMIC_RELAXED);
        if (!uccl_ep_ring_has_space(ring, head, n)) {
            /* Others posted meanwhile: then the tail may be beyond this head, which looks like no room. */
            if (head != __atomic_load_n(&ring->producer->head, __ATOMIC_RELAXED)) continue;
            return fail_local(UCCL_EP_E_AGAIN, "PRG-3", "the ring of channel %u has no room for %llu commands now",
                              ring->channel, (unsigned long long)n);
        }
        if (__atomic_compare_exchange_n(&ring->producer->head, &head, head + n, true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
            *first = head;
            return UCCL_EP_OK;
        }
    }
}

#define LONGEST_NAP_NS 1000000u

/* A nap is meant to last while an eighth to a half of the ring is emptied: a shorter one takes the CPU, for a few
 * slots, from who empties it; a longer one may leave the ring empty. */
static void learn_nap(struct channel *c, const uccl_ep_ring *ring, uint64_t end, uint32_t nap_ns) {
    const uint64_t slots = uccl_ep_ring_slots(ring);
    const uint64_t room = slots - (end - __atomic_load_n(&ring->counters->tail, __ATOMIC_RELAXED));
    if (room < slots / 8 && 2 * nap_ns <= LONGEST_NAP_NS)
        nap_ns *= 2;
    else if (room > slots / 2 && nap_ns > WAIT_NAP_NS)
        nap_ns /= 2;
    atomic_store_explicit(&c->nap_ns, nap_ns, memory_order_relaxed);
}

/* Until the slots of `n` tickets from `first` on are free. */
static uccl_ep_status wait_for_room(uccl_ep_comm *comm, const uccl_ep_ring *ring, uint64_t first, uint64_t n,
                                    uint64_t timeout_ns) {
    const uint64_t deadline = deadline_of(comm, timeout_ns);
    struct channel *c = comm->channel_of[ring->channel];
    uint32_t nap_ns = atomic_load_explicit(&c->nap_ns, memory_order_relaxed);
    if (!nap_ns) nap_ns = WAIT_NAP_NS;
    /* A ring of commands goes before these. If it has not moved by the end of the spins, it lasts longer than a nap,
     * and the CPU is better used by who empties it. */
    backoff b = {0};
    while (!uccl_ep_ring_has_space(ring, first, n)) {
        uccl_ep_status status = check_channel(comm, ring->channel);
        const uint64_t now = comm_now(comm);
        if (status == UCCL_EP_OK && now >= deadline) status = no_space(comm, ring->channel, n, timeout_ns);
        if (status != UCCL_EP_OK) {
            /* Reserved and never stored: the ring cannot go past it. */
            if (!FAULT(give_up_unnoticed)) __atomic_store_n(ring->gave_up, 1, __ATOMIC_RELEASE);
            return status;
        }
        b.nap_ns = deadline - now < nap_ns ? (uint32_t)(deadline - now) : nap_ns;
        backoff_wait(comm, &b);
    }
    if (b.turns >= WAIT_SPINS) learn_nap(c, ring, first + n, nap_ns);
    return UCCL_EP_OK;
}

/* Reserve n tickets together and wait until all their slots are free (PUB-2). */
static uccl_ep_status reserve(uccl_ep_comm *comm, const uccl_ep_ring *ring, uint64_t n, uint64_t timeout_ns,
                              uint64_t *first) {
    if (!timeout_ns) return reserve_now(ring, n, first);
    if (FAULT(reserve_race)) {
        *first = __atomic_load_n(&ring->producer->head, __ATOMIC_RELAXED);
        sched_yield();
        if (__atomic_load_n(&ring->producer->head, __ATOMIC_RELAXED) < *first + n)
            __atomic_store_n(&ring->producer->head, *first + n, __ATOMIC_RELAXED);
    } else {
        *first = uccl_ep_ring_reserve(ring, n);
    }
    if (LIKELY(uccl_ep_ring_has_space(ring, *first, n)) || FAULT(overwrite_full_ring)) return UCCL_EP_OK;
    return wait_for_room(comm, ring, *first, n, timeout_ns);
}

/* No more than the ring has slots. */
static uccl_ep_status post_words(uccl_ep_comm *comm, uint32_t channel, const uccl_ep_words *words, uint32_t n,
                                 uint64_t timeout_ns, uint64_t *ticket) {
    const uccl_ep_ring *ring = &comm->rings[channel];
    uint64_t first;
    const uccl_ep_status status = reserve(comm, ring, n, timeout_ns, &first);
    if (UNLIKELY(status != UCCL_EP_OK)) return status;
    for (uint32_t i = 0; i < n; i++) uccl_ep_ring_store(ring, first + i, words[i]);
    if (ticket) *ticket = first + n - 1;
    return UCCL_EP_OK;
}

/* A put, and a signal if `signal`: as many commands as it takes. Only the last carries the signal. */
static uccl_ep_status post_put(uccl_ep_comm *comm, uint32_t channel, uint32_t target, uint64_t local, uint64_t remote,
                               uint64_t bytes, bool signal, uint32_t slot, uint64_t add, uint64_t timeout_ns,
                               uint64_t *ticket) {
    uccl_ep_status status = check_channel(comm, channel);
    if (UNLIKELY(status != UCCL_EP_OK)) return status;
    if (UNLIKELY((status = check_target(comm, channel, target)) != UCCL_EP_OK)) return status;
    const uint64_t granularity = comm->config.granularity;
    if (UNLIKELY((local | remote | bytes) & (granularity - 1)))
        return fail_local(UCCL_EP_E_ALIGNMENT, "PUT-4",
                          "source offset %llu, target offset %llu and length %llu must be multiples of %llu",
                          (unsigned long long)local, (unsigned long long)remote, (unsigned long long)bytes,
                          (unsigned long long)granularity);
    if (UNLIKELY((status = check_span(comm, local, remote, bytes)) != UCCL_EP_OK)) return status;
    if (signal && UNLIKELY((status = check_slot(comm, slot)) != UCCL_EP_OK)) return status;
    if (FAULT(truncate_length)) bytes &= 0xffff;
    if (FAULT(wrap_offset_4g)) remote &= 0xffffffffu;

    const uint64_t largest = UCCL_EP_MAX_COMMAND_BYTES(granularity);
    /* What PUT_SIGNAL's narrow fields cannot hold becomes a put and a signal. */
    const bool separate = signal && (add > UCCL_EP_FIELD_MAX(ADD) || slot > UCCL_EP_FIELD_MAX(SLOT));
    uccl_ep_words words[BATCH_OPERATIONS];
    const uint64_t slots = uccl_ep_ring_slots(&comm->rings[channel]);
    const uint32_t room = slots < BATCH_OPERATIONS ? (uint32_t)slots : BATCH_OPERATIONS;
    uint32_t n = 0;
    bool first = true;
    for (bool put_left = true, signal_left = separate; put_left || signal_left; first = false) {
        uccl_ep_command command = {.target = target};
        if (put_left) {
            const uint64_t piece = bytes < largest ? bytes : largest;
            put_left = bytes != piece;
            command.op = signal && !separate && !put_left ? UCCL_EP_OP_PUT_SIGNAL : UCCL_EP_OP_PUT;
            command.local = local;
            command.remote = remote;
            command.bytes = (uint32_t)piece;
            command.granularity = (uint32_t)granularity;
            local += piece, remote += piece, bytes -= piece;
        } else {
            command.op = UCCL_EP_OP_SIGNAL;
            signal_left = false;
        }
        if (command.op != UCCL_EP_OP_PUT) command.slot = slot, command.add = add;
        status = uccl_ep_encode(&command, &words[n++]);
        UCCL_EP_ASSERT(status == UCCL_EP_OK);
        if (n < room && (put_left || signal_left)) continue;
        if (LIKELY(n == 1 && first)) return post_words(comm, channel, words, 1, timeout_ns, ticket);
        status = post_words(comm, channel, words, n, timeout_ns, ticket);
        if (status != UCCL_EP_OK) return status;
        n = 0;
        /* A poll that got its first part in goes on with the deadline of a wait: half a put is no answer. */
        if (!timeout_ns) timeout_ns = UCCL_EP_TIMEOUT_DEFAULT;
    }
    return UCCL_EP_OK;
}

/* An error says where the command was to go. */
static uccl_ep_status placed(const uccl_ep_comm *comm, uint32_t channel, uint32_t target, uccl_ep_status status) {
    if (LIKELY(status == UCCL_EP_OK)) return status;
    uccl_ep_error *error = last_error_slot();
    if (comm) error->rank = comm->rank;
    error->channel = channel;
    if (error->peer == UCCL_EP_ANY_RANK) error->peer = target;
    return status;
}

uccl_ep_status uccl_ep_put(uccl_ep_comm *comm, uint32_t channel, uint32_t target, uint64_t local, uint64_t remote,
                           uint64_t bytes, uint64_t timeout_ns, uint64_t *ticket) {
    return placed(comm, channel, target,
                  post_put(comm, channel, target, local, remote, bytes, false, 0, 0, timeout_ns, ticket));
}

uccl_ep_status uccl_ep_put_signal(uccl_ep_comm *comm, uint32_t channel, uint32_t target, uint64_t local,
                                  uint64_t remote, uint64_t bytes, uint32_t slot, uint64_t add, uint64_t timeout_ns,
                                  uint64_t *ticket) {
    return placed(comm, channel, target,
                  post_put(comm, channel, target, local, remote, bytes, true, slot, add, timeout_ns, ticket));
}

static uccl_ep_status post_signal(uccl_ep_comm *comm, uint32_t channel, uint32_t target, uint32_t slot, uint64_t add,
                                  uint64_t timeout_ns, uint64_t *ticket) {
    uccl_ep_status status = check_channel(comm, channel);
    if (UNLIKELY(status != UCCL_EP_OK)) return status;
    if (UNLIKELY((status = check_target(comm, channel, target)) != UCCL_EP_OK)) return status;
    if (UNLIKELY((status = check_slot(comm, slot)) != UCCL_EP_OK)) return status;
    for (uint32_t i = 0; FAULT(channels_collide) && i < channel; i++) {
        const struct channel *c = comm->channel_of[i];
        if (channel_posted(comm, c) != __atomic_load_n(&c->counters->complete, __ATOMIC_RELAXED)) add = 0;
    }
    const uccl_ep_command command = {.op = UCCL_EP_OP_SIGNAL, .target = target, .slot = slot, .add = add};
    uccl_ep_words words;
    status = uccl_ep_encode(&command, &words);
    UCCL_EP_ASSERT(status == UCCL_EP_OK);
    return post_words(comm, channel, &words, 1, timeout_ns, ticket);
}

uccl_ep_status uccl_ep_signal(uccl_ep_comm *comm, uint32_t channel, uint32_t target, uint32_t slot, uint64_t add,
                              uint64_t timeout_ns, uint64_t *ticket) {
    return placed(comm, channel, target, post_signal(comm, channel, target, slot, add, timeout_ns, ticket));
}

/* An error of a batch says which of its commands is meant. */
static uccl_ep_status of_batch(uint32_t i, uccl_ep_status status) {
    uccl_ep_error *error = last_error_slot();
    char text[sizeof error->text];
    memcpy(text, error->text, sizeof text);
    snprintf(error->text, sizeof error->text, "command %u: %.230s", i, text);
    return status;
}

/* One of a batch as the API sees it: offsets, slots and targets that its own rank can already judge. */
static uccl_ep_status encode_checked(uccl_ep_comm *comm, uint32_t channel, const uccl_ep_command *command,
                                     uccl_ep_words *words) {
    uccl_ep_status status = check_target(comm, channel, command->target);
    if (UNLIKELY(status != UCCL_EP_OK)) return status;
    if (uccl_ep_op_has_put(command->op)) {
        if (UNLIKELY(command->granularity != comm->config.granularity))
            return fail_local(UCCL_EP_E_INVALID, "PUT-4", "it has granularity %u, the channel %u", command->granularity,
                              comm->config.granularity);
        status = check_span(comm, command->local, command->remote, command->bytes);
        if (UNLIKELY(status != UCCL_EP_OK)) return status;
    }
    if (uccl_ep_op_has_signal(command->op) && UNLIKELY((status = check_slot(comm, command->slot)) != UCCL_EP_OK))
        return status;
    status = uccl_ep_encode(command, words);
    if (UNLIKELY(status != UCCL_EP_OK))
        return fail_local(status, "PUT-4", "operation %u cannot be encoded: %s", command->op,
                          uccl_ep_status_text(status));
    return UCCL_EP_OK;
}

static uccl_ep_status post_many(uccl_ep_comm *comm, uint32_t channel, const uccl_ep_command *commands, uint32_t n,
                                uint64_t timeout_ns, uint64_t *ticket) {
    uccl_ep_status status = check_channel(comm, channel);
    if (UNLIKELY(status != UCCL_EP_OK)) return status;
    const uccl_ep_ring *ring = &comm->rings[channel];
    if (!n || !commands) return fail_local(UCCL_EP_E_INVALID, "PUB-2", "at least one command is required");
    if ((status = check_count(ring, n)) != UCCL_EP_OK) return status;
    /* All are judged before any is posted. Encoding twice costs less than room for the largest ring on the stack. */
    uccl_ep_words words;
    for (uint32_t i = 0; i < n; i++)
        if ((status = encode_checked(comm, channel, &commands[i], &words)) != UCCL_EP_OK) return of_batch(i, status);
    uint64_t first;
    if (FAULT(post_part_of_batch) && n > 2) n = n / 2;
    if ((status = reserve(comm, ring, n, timeout_ns, &first)) != UCCL_EP_OK) return status;
    for (uint32_t i = 0; i < n; i++) {
        /* The caller may change its array meanwhile; a slot that is reserved is stored whatever it holds now. */
        if (uccl_ep_encode(&commands[i], &words) != UCCL_EP_OK) words = (uccl_ep_words){{UCCL_EP_OP_INVALID, 0}};
        uccl_ep_ring_store(ring, first + i, words);
    }
    if (ticket) *ticket = first + n - 1;
    return UCCL_EP_OK;
}

uccl_ep_status uccl_ep_post_many(uccl_ep_comm *comm, uint32_t channel, const uccl_ep_command *commands, uint32_t n,
                                 uint64_t timeout_ns, uint64_t *ticket) {
    return placed(comm, channel, UCCL_EP_ANY_RANK, post_many(comm, channel, commands, n, timeout_ns, ticket));
}

static uccl_ep_status post_raw(uccl_ep_comm *comm, uint32_t channel, const uccl_ep_words *words, uint32_t n,
                               uint64_t timeout_ns, uint64_t *ticket) {
    uccl_ep_status status = check_channel(comm, channel);
    if (status != UCCL_EP_OK) return status;
    if ((status = check_count(&comm->rings[channel], n)) != UCCL_EP_OK) return status;
    if (!n || !words) return fail_local(UCCL_EP_E_INVALID, "PUB-2", "at least one command is required");
    for (uint32_t i = 0; i < n; i++)
        if ((words[i].word[0] | words[i].word[1]) & UCCL_EP_PARITY_BIT)
            return fail_local(UCCL_EP_E_INVALID, "ERR-4", "bit 63 of both words is the ring's: command %u has it set",
                              i);
    return post_words(comm, channel, words, n, timeout_ns, ticket);
}

uccl_ep_status uccl_ep_post_raw(uccl_ep_comm *comm, uint32_t channel, const uccl_ep_words *words, uint32_t n,
                                uint64_t timeout_ns, uint64_t *ticket) {
    return placed(comm, channel, UCCL_EP_ANY_RANK, post_raw(comm, channel, words, n, timeout_ns, ticket));
}

uccl_ep_status uccl_ep_channel_ring(uccl_ep_comm *comm, uint32_t channel, uccl_ep_ring *ring) {
    if (!comm || !ring || channel >= comm->channels)
        return fail_local(UCCL_EP_E_RANGE, "PUT-4", "a ring of one of %u channels is required",
                          comm ? comm->channels : 0);
    *ring = comm->rings[channel];
    return UCCL_EP_OK;
}
