/* SPDX-License-Identifier: Apache-2.0
 *
 * fault_point.h: named places where the core can be broken on purpose.
 *
 * The product is compiled without UCCL_EP_FAULT_POINTS: each point is then the constant 0 and leaves no code behind. A
 * second build of the same sources, used by `uccl-ep mutants` alone, turns on the points named in the environment
 * variable UCCL_EP_FAULT_POINTS (comma separated) and lets the conformance suite prove that it notices.
 */
#ifndef UCCL_EP_CORE_FAULT_POINT_H
#define UCCL_EP_CORE_FAULT_POINT_H

#include <stdbool.h>
#include <stdint.h>

/* X(name, clause that it breaks, what it does) */
#define UCCL_EP_FAULT_POINT_TABLE(X)                                                                                   \
    X(post_part_of_batch, "PUB-2", "a batch that has no room is posted up to where it fits")                           \
    X(truncate_length, "PUT-4", "bits of a length above 16 are dropped where a put is posted")                         \
    X(wrap_offset_4g, "PUT-4", "offsets are cut to 32 bits")                                                           \
    X(drop_split_tail, "PUT-1", "the last piece of a put that was split is not sent")                                  \
    X(merge_across_gap, "PUT-1", "puts whose targets are not adjacent are merged")                                     \
    X(signal_before_put, "SIG-2", "the signal of a put_signal is submitted before its put")                            \
    X(signal_not_held, "SIG-2", "sender hold does not wait for earlier puts")                                          \
    X(signal_lost_in_batch, "SIG-1", "of two signals to one word in a batch the second is dropped")                    \
    X(signals_reordered, "SIG-5", "two signals of a batch to one target are swapped")                                  \
    X(channels_collide, "SIG-4", "a signal adds nothing while a lower channel has commands under way")                 \
    X(wait_consumes, "SIG-6", "a wait takes what it waited for out of the word")                                       \
    X(transmit_is_visible, "MEM-3", "what is complete is taken for visible, whatever the NIC says")                    \
    X(flush_skipped, "MEM-3", "signals are added without the flush that makes their payload visible")                  \
    X(mailbox_unsequenced, "SIG-2", "a record is added when it comes, whatever is missing before it")                  \
    X(return_word_ignored, "SIG-1", "what was sent to a mailbox is taken for applied")                                 \
    X(two_sums_in_flight, "SIG-1", "the next sum of a word is stored while the last one is under way")                 \
    X(applied_before_copied, "SIG-2", "a signal is added before the copies of a staged heap that it orders are done")  \
    X(sent_before_copied, "PUT-1", "a put of a staged heap is sent before its source is in host memory")               \
    X(one_bank, "SIG-6", "NICs that are not atomic against each other add to one word")                                \
    X(inflight_unlimited, "PRG-1", "the NIC's limit of bytes in flight is not kept")                                   \
    X(strategy_unchecked, "SIG-7", "a strategy is taken without looking at what the NIC promises")                     \
    X(source_at_take, "QUI-0", "sources are reported free when commands are taken")                                    \
    X(complete_at_submit, "QUI-1", "commands are reported complete when they are submitted")                           \
    X(poll_never_done, "QUI-3", "a ticket that is polled never becomes done")                                          \
    X(wait_holds_ring, "QUI-3", "while a ticket is waited for, what is posted behind it is not taken")                 \
    X(quiet_one_channel, "QUI-2", "quiet over all channels waits for channel 0")                                       \
    X(idle_quiet_waits, "QUI-4", "a poll of quiet with nothing outstanding says that it has to wait")                  \
    X(heap_limit_unchecked, "MEM-1", "a heap larger than commands can address is not refused")                         \
    X(overwrite_full_ring, "PRG-3", "a producer does not wait for space")                                              \
    X(give_up_unnoticed, "PRG-3", "a producer that gives up leaves its channel open")                                  \
    X(starve_last_channel, "PRG-2", "the last channel is drained only when the others are empty")                      \
    X(ticket_of_32_bits, "LIM-1", "waits compare the low 32 bits of tickets")                                          \
    X(window_of_16_bits, "LIM-1", "in-order retirement counts in 16 bits")                                             \
    X(value_not_distance, "LIM-1", "waits compare a word with a value as plain numbers")                               \
    X(reserve_race, "THR-1", "a ticket is reserved in two steps")                                                      \
    X(deadline_ignored, "ERR-1", "waits do not look at their deadline")                                                \
    X(error_swallowed, "ERR-2", "a failed command is retired as if it had succeeded")                                  \
    X(record_missing, "ERR-2", "failures leave no record")                                                             \
    X(signal_after_failure, "ERR-3", "later signals to a target go out after a failed put")                            \
    X(no_range_check, "ERR-4", "offsets of a command are not compared with the heap")                                  \
    X(malformed_kills_all, "ERR-4", "a malformed command closes the whole channel although its target can be read")    \
    X(loss_closes_all, "ERR-5", "the loss of one peer closes the commands to all")                                     \
    X(no_incarnation, "ERR-6", "commands to a closed target are executed")                                             \
    X(words_kept, "ERR-6", "signal words keep their sums over a reset")                                                \
    X(abort_ignored, "ABT-1", "waits do not look at the abort")                                                        \
    X(abi_not_checked, "ABI-1", "a backend of any ABI is taken")

#ifdef UCCL_EP_FAULT_POINTS
enum uccl_ep_fault_point {
#define UCCL_EP_FAULT_ENUM_(name, clause, text) UCCL_EP_FAULT_##name,
    UCCL_EP_FAULT_POINT_TABLE(UCCL_EP_FAULT_ENUM_)
#undef UCCL_EP_FAULT_ENUM_
        UCCL_EP_FAULT_COUNT
};
extern unsigned char uccl_ep_fault_on[UCCL_EP_FAULT_COUNT];
#define FAULT(name) (uccl_ep_fault_on[UCCL_EP_FAULT_##name] != 0)
/* wait_holds_ring: the wait of a channel that began last, and the ticket that it is for. */
void fault_hold(const void *channel, uint64_t ticket);
bool fault_holds(const void *channel, uint64_t ticket);
#else
#define FAULT(name) 0
static inline void fault_hold(const void *channel, uint64_t ticket) {
    (void)channel, (void)ticket;
}
static inline bool fault_holds(const void *channel, uint64_t ticket) {
    (void)channel, (void)ticket;
    return false;
}
#endif

#endif
