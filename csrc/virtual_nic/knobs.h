/* SPDX-License-Identifier: Apache-2.0
 *
 * knobs.h: what a virtual NIC may do, one knob each, and the NICs that we know as settings of them.
 *
 * Zero is the weakest of every knob that names a freedom, and "none" or "no limit" of the others. A knob appears in one
 * row of VNIC_KNOBS; parsing, listing and the check of docs/simulator.md come from there.
 */
#ifndef UCCL_EP_KNOBS_H
#define UCCL_EP_KNOBS_H

#include <stdbool.h>
#include <stdint.h>

typedef enum vnic_place { VNIC_PLACE_NONE, VNIC_PLACE_BLOCKS, VNIC_PLACE_MESSAGE, VNIC_PLACE_STRICT } vnic_place;
typedef enum vnic_completion_order { VNIC_COMPLETES_ANY, VNIC_COMPLETES_IN_ORDER } vnic_completion_order;
typedef enum vnic_level { VNIC_LEVEL_TX, VNIC_LEVEL_ACK, VNIC_LEVEL_DELIVERY } vnic_level;
typedef enum vnic_fence { VNIC_FENCE_NONE, VNIC_FENCE_ATOMICS, VNIC_FENCE_DELIVERED } vnic_fence;
typedef enum vnic_atomics { VNIC_ATOMICS_NONE, VNIC_ATOMICS_NIC, VNIC_ATOMICS_COHERENT } vnic_atomics;
typedef enum vnic_scope { VNIC_SCOPE_QUEUE, VNIC_SCOPE_DEVICE } vnic_scope;
typedef enum vnic_over { VNIC_OVER_WAIT, VNIC_OVER_FAIL } vnic_over;
typedef enum vnic_rnr { VNIC_RNR_NONE, VNIC_RNR_RETRY, VNIC_RNR_FAIL } vnic_rnr;
typedef enum vnic_address { VNIC_ADDRESS_OFFSET, VNIC_ADDRESS_VIRTUAL } vnic_address;
typedef enum vnic_error_scope { VNIC_ERROR_WR, VNIC_ERROR_QP } vnic_error_scope;
typedef enum vnic_flush_by { VNIC_FLUSH_NIC, VNIC_FLUSH_PROVIDER } vnic_flush_by;
typedef enum vnic_full { VNIC_FULL_PARTIAL, VNIC_FULL_AGAIN } vnic_full;
typedef enum vnic_overrun { VNIC_OVERRUN_FATAL, VNIC_OVERRUN_DROP } vnic_overrun;
typedef enum vnic_silence { VNIC_SILENCE_FOREVER, VNIC_SILENCE_TIMEOUT } vnic_silence;
typedef enum vnic_schedule { VNIC_SCHEDULE_RANDOM, VNIC_SCHEDULE_CHOICE } vnic_schedule;
typedef enum vnic_broken { VNIC_BROKEN_NONE, VNIC_BROKEN_KEY32, VNIC_BROKEN_QUEUES } vnic_broken;
typedef enum vnic_vendor { VNIC_NVIDIA, VNIC_AMAZON, VNIC_BROADCOM, VNIC_PENSANDO, VNIC_HPE, VNIC_NOBODY } vnic_vendor;

/* X(name, values of an enumeration separated by '|', or a number's unit, text) */
#define VNIC_KNOBS(X)                                                                                                  \
    X(place_order, "none|blocks|per_msg|strict",                                                                       \
      "bytes of a message land: 8-byte units in any order; 128-byte blocks in any order; in order; in order, and "     \
      "messages too")                                                                                                  \
    X(order_write_write, "bool", "a write lands behind the earlier writes to the same peer")                           \
    X(order_write_atomic, "bool", "an atomic is applied once the earlier writes to the peer are visible")              \
    X(order_write_imm, "bool", "an immediate is received once the earlier writes to the peer are visible")             \
    X(relaxed, "bool", "relaxed PCIe ordering or adaptive routing: takes write-write and write-imm order away")        \
    X(ro_atomic_ordered, "bool", "with relaxed=1: atomics still come behind earlier writes")                           \
    X(signals_strict, "bool", "signal words and payload lie in one memory, reached strictly in order")                 \
    X(completion_order, "any|in_order", "completions of one peer come in any order or in posting order")               \
    X(completion_level, "tx|ack|delivery",                                                                             \
      "a completion means: the source was read; the target's NIC has the bytes; readers see them")                     \
    X(cqe_cumulative, "bool", "one entry of the completion queue may stand for several requests")                      \
    X(unsignalled_ok, "bool", "requests without a completion of their own are taken")                                  \
    X(visible_on_request, "bool", "a request may ask that its completion means visible")                               \
    X(visible_delay, "ns", "bytes may wait so long in the target's NIC before readers see them; 0: never")             \
    X(late_overwrite, "bool",                                                                                          \
      "a completed write may become visible after one to the same bytes that was posted later (not in strict "         \
      "regions)")                                                                                                      \
    X(has_read, "bool", "reads exist")                                                                                 \
    X(read_flushes, "bool", "a read makes visible what the endpoint wrote to the peer before it")                      \
    X(flush_local, "bool", "the target can flush its own NIC")                                                         \
    X(imm_visible, "bool", "an immediate is received once the bytes of its own write are visible")                     \
    X(dup_write, "percent", "writes that land twice, the payload read again, until their completion is given")         \
    X(fence_kind, "none|atomics|delivered",                                                                            \
      "what a fenced request waits for: nothing, reads and atomics, earlier writes visible (and cancels behind a "     \
      "failed one)")                                                                                                   \
    X(max_inline, "bytes", "payload that travels in the request itself")                                               \
    X(max_sge, "count", "pieces of local memory that a request gathers")                                               \
    X(max_msg, "bytes", "longest message")                                                                             \
    X(max_wr, "count", "requests outstanding on a queue")                                                              \
    X(max_cqe, "count", "entries of a completion queue")                                                               \
    X(max_qp, "count", "queue pairs of a NIC; 0: no limit known")                                                      \
    X(max_pages, "count", "pages of 4 KiB that a rank's registrations take of a NIC's table; 0: no limit known")       \
    X(max_batch, "count", "requests that one call takes; 0: no limit")                                                 \
    X(per_peer_qp, "bool", "a queue pair for each peer; otherwise one for all")                                        \
    X(srq, "bool", "receives are shared by all peers of an endpoint")                                                  \
    X(ranks_per_nic, "count", "ranks that share one NIC; 0 and 1: none")                                               \
    X(nics, "count", "NICs behind a device: endpoint i uses the i-th, modulo this")                                    \
    X(imm_bits, "bits", "width of an immediate; 0: there are none")                                                    \
    X(imm_consumes_rq, "bool", "an immediate takes a receive")                                                         \
    X(unsolicited, "bool", "immediates that need no receive are switched on")                                          \
    X(rnr, "none|retry|fail",                                                                                          \
      "an immediate that finds no receive comes again a few times, or fails at once (none: the same)")                 \
    X(rnr_retries, "count", "so many times")                                                                           \
    X(atomics, "none|nic|coherent", "64-bit adds: none; atomic within one NIC; against CPUs and other NICs too")       \
    X(responder_atomics, "count", "adds that a target takes at a time; 0: no limit known")                             \
    X(responder_scope, "queue|device", "of one queue, or of the whole NIC")                                            \
    X(responder_over, "wait|fail", "an add beyond that waits or fails")                                                \
    X(needs_target_ah, "bool", "a target must know the initiator's address before it is written to")                   \
    X(addr_mode, "offset|virtual", "a remote address is an offset into the region, or the target's virtual address")   \
    X(key_bits, "bits", "width of a remote key")                                                                       \
    X(error_scope, "wr|qp", "an error concerns its request, or stops the queue")                                       \
    X(flush_by, "nic|provider", "who completes what is behind an error: the NIC in time, or the library at once")      \
    X(retry_exc_inflight_bytes, "bytes", "in flight on an endpoint, beyond which retries run out; 0: no limit known")  \
    X(backpressure, "partial|again", "a full queue takes fewer, or says again")                                        \
    X(cq_overrun, "fatal|drop", "a full completion queue breaks the endpoint, or loses entries")                       \
    X(drop_rate, "percent", "doorbells that are lost until the next one (shared doorbell registers)")                  \
    X(dead_peer, "silent|timeout", "requests to a peer that is gone: nothing ever, or an error")                       \
    X(retry_ns, "ns", "after which they give up")                                                                      \
    X(own_memory, "bool", "the device has memory of its own to give")                                                  \
    X(broken, "none|key32|queues", "NOT a NIC's freedom, for mutants: keys are cut to 32 bits; max_qp is not minded")  \
    X(vendor, "nvidia|amazon|broadcom|pensando|hpe|nobody", "whose status codes")                                      \
    X(delay, "ns", "a message, a completion and an immediate take up to four times this")                              \
    X(pieces, "count", "a payload is placed in so many pieces at most (1 to 4)")                                       \
    X(inline_percent, "percent", "requests that fit go inline")                                                        \
    X(schedule, "random|choice", "WORLD: events come by times drawn from the seed, or one by one by choice")           \
    X(choose_run, "bool", "WORLD, schedule=choice: who runs next is a choice, too; otherwise it is round robin")       \
    X(step_ns, "ns", "WORLD: virtual time that one turn of a rank or proxy takes (schedule=random)")                   \
    X(fibers, "count", "WORLD: ranks that must have entered before the first fiber runs; 0: all")

typedef struct vnic_knobs {
#define VNIC_KNOB_FIELD_(name, values, text) uint64_t name;
    VNIC_KNOBS(VNIC_KNOB_FIELD_)
#undef VNIC_KNOB_FIELD_
} vnic_knobs;

typedef struct vnic_profile {
    const char *name, *text;
    const char *vendor, *model, *firmware;
    vnic_knobs knobs;
} vnic_profile;

const vnic_profile *vnic_profile_at(uint32_t i); /* NULL past the last */
const vnic_profile *vnic_profile_named(const char *name);

/* "name=value,name=value" applied to *knobs; `pass` (may be NULL) takes keys that are no knobs: it returns whether it
 * took one, < 0 with text on an error. Not 0: text (256 bytes) says what is wrong and what is valid. */
typedef int (*vnic_other_key)(void *context, const char *key, const char *value, char *text);
int vnic_knobs_parse(vnic_knobs *knobs, const char *options, vnic_other_key pass, void *context, char *text);
/* Combinations that no NIC has, or that cannot be simulated. */
int vnic_knobs_check(const vnic_knobs *knobs, char *text);
/* Lines "name=value  text"; returns the bytes needed. */
uint32_t vnic_knobs_text(const vnic_knobs *knobs, char *text, uint32_t bytes);
const char *vnic_knob_name(uint32_t i); /* NULL past the last */
/* Does the knob belong to the world, not to a NIC? */
bool vnic_knob_of_world(const char *name);

/* What the knobs mean together. */
static inline bool vnic_write_write(const vnic_knobs *k) {
    return k->order_write_write && k->place_order == VNIC_PLACE_STRICT && !k->relaxed;
}
static inline bool vnic_write_imm(const vnic_knobs *k) {
    return k->order_write_imm && !k->relaxed;
}
static inline bool vnic_write_atomic(const vnic_knobs *k) {
    return k->atomics && k->order_write_atomic && (!k->relaxed || k->ro_atomic_ordered);
}
static inline bool vnic_imm_consumes(const vnic_knobs *k) {
    return k->imm_bits && k->imm_consumes_rq && !k->unsolicited;
}

#endif
