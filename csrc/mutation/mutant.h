/* SPDX-License-Identifier: Apache-2.0
 *
 * The mutant backend: a real backend behind a queue, with the manners of slow NICs and, if asked for, one fault.
 *
 *   table.c    options, the real library, everything but operations
 *   queue.c    submit and poll: operations wait for their turn, completions for theirs
 *   fault.c    what each fault does to them
 *
 * Without a fault it is a correct backend, and `uccl-ep mutants` shows that first: the suite must be clean on it. With
 * one it breaks one clause, and the suite must say so. It serves that purpose alone and is listed nowhere.
 *
 * Options (all others go to the real backend):
 *   real=NAME      of an installed backend, or the path of a library [shm]
 *   lazy=USEC      pauses of up to so long between operations of a peer, and between completions [0]
 *   partial=P      percent of submits that take a part of what they are given [0]
 *   again=P        percent of submits that take nothing [0]
 *   step=1         one operation of a peer at most is executed at a poll, so what is between two can be seen [0]
 *   room=N         operations that the queue of a peer holds [256]
 *   disorder=1     operations of a peer are executed and completed in any order, and no order is promised [0]
 *   fail=P         puts of a thousand that fail; they may have taken effect or not [0]
 *   seed=N         of all random choices [1]
 *   fault=NAME     one of UCCL_EP_MUTANT_FAULT_TABLE [none]
 *
 * Time comes from the host, so pauses are the simulator's where one runs.
 */
#ifndef UCCL_EP_MUTATION_MUTANT_H
#define UCCL_EP_MUTATION_MUTANT_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "uccl_ep/backend.h"

/* X(name, clause that it breaks, what it does) */
#define UCCL_EP_MUTANT_FAULT_TABLE(X)                                                                                  \
    X(stale_source, "PUB-1", "a source that was read before is not read again, though it was stored to since")         \
    X(put_short, "PUT-1", "every 7th put leaves out its last granule")                                                 \
    X(put_stray, "PUT-1", "every 7th put writes one byte too many")                                                    \
    X(put_torn, "PUT-1", "of every 3rd put the second half is placed later than what follows it")                      \
    X(target_must_run, "PUT-2", "puts to a process that is stopped wait until it goes on")                             \
    X(source_read_again, "PUT-3", "of every 3rd put the source is read and placed once more after the next one")       \
    X(offset_32_bits, "PUT-4", "target offsets are cut to 32 bits")                                                    \
    X(length_16_bits, "PUT-4", "lengths are cut to 16 bits")                                                           \
    X(older_put_wins, "PUT-5", "every 2nd put, complete at once, is placed after the next one to the same bytes")      \
    X(self_unordered, "PUT-6", "signals to the own rank do not wait for earlier puts")                                 \
    X(late_duplicate, "PUT-7", "of every 5th put the bytes arrive again after later ones to the same place")           \
    X(signal_lost, "SIG-1", "every 31st signal is not applied")                                                        \
    X(signal_doubled, "SIG-1", "every 31st signal is applied twice")                                                   \
    X(signal_32_bits, "SIG-1", "only the low 32 bits of a signal are added")                                           \
    X(signal_beside, "SIG-1", "every 31st signal is added to the next word")                                           \
    X(signal_overtakes, "SIG-2", "signals do not wait for earlier puts")                                               \
    X(signal_between, "SIG-3", "a put is placed after the signal right behind it")                                     \
    X(signals_swapped, "SIG-5", "two signals in a row are applied in the other order")                                 \
    X(source_read_late, "QUI-0", "sources are read after the completion was given")                                    \
    X(complete_at_submit, "QUI-1", "completions are given when operations are taken")                                  \
    X(acknowledged_not_visible, "QUI-5", "puts are complete before they are visible, unless a signal follows")         \
    X(other_memory, "MEM-2", "every 9th put goes to the memory of another communicator of the process")                \
    X(word_before_bytes, "MEM-3", "signals are applied while the bytes of puts are still on their way")                \
    X(doorbell_forgotten, "PRG-1", "the last operation waits until the next one is submitted")                         \
    X(completions_stop, "PRG-1", "after 20 completions of a peer no more are given")                                   \
    X(completion_lost, "PRG-1", "every 61st completion is not given")                                                  \
    X(sequence_16_bits, "LIM-1", "the operation on which a sequence of 16 bits wraps is taken for a duplicate")        \
    X(failure_hidden, "ERR-2", "failed operations are completed as if they had succeeded")                             \
    X(failure_passed, "ERR-3", "operations behind a failed one are executed although an error stops the queue")        \
    X(loss_hidden, "ERR-5", "a dead peer is not reported, and operations to it complete")                              \
    X(loss_spreads, "ERR-5", "the loss of one peer is reported as the loss of all")                                    \
    X(old_operations, "ERR-6", "operations that were outstanding at disconnect are executed on the next connection")

enum fault {
    FAULT_NONE = 0,
#define UCCL_EP_MUTANT_ENUM_(name, clause, text) FAULT_##name,
    UCCL_EP_MUTANT_FAULT_TABLE(UCCL_EP_MUTANT_ENUM_)
#undef UCCL_EP_MUTANT_ENUM_
        FAULT_COUNT
};

struct knobs {
    uint64_t lazy_ns;
    uint32_t partial, again, room, fail;
    bool disorder, step;
    uint64_t seed;
    enum fault fault;
};

struct uccl_ep_device {
    const uccl_ep_host *host;
    const uccl_ep_backend *real;
    uccl_ep_device *inner;
    struct knobs knobs;
    const unsigned char *heap; /* own, as registered */
    uint64_t heap_bytes;
    unsigned char *scratch; /* of faults that keep bytes; registered as the mailbox */
    struct uccl_ep_endpoint *endpoints;
    uccl_ep_device *next; /* of all in the process */
};

/* ------------------------------------------------------------------------------------------------------- operations */

enum stage {
    WAITING, /* for its turn */
    HANDED,  /* `parts` operations of the real backend, or a debt, are to end */
    ENDED
};

struct pending {
    uccl_ep_operation operation;
    uint64_t number; /* of the peer's operations: 0, 1, ... */
    uint64_t taken_ns;
    int32_t status, vendor_code;
    uint8_t stage;
    uint8_t parts;
    bool given;  /* the core has its completion, or is to have none */
    bool doomed; /* executed, and failed all the same */
};

/* What a fault places later, or again: at most one operation a peer. */
struct debt {
    uccl_ep_operation operation;
    uint64_t due_ns; /* 0: none */
    uint64_t at;     /* the position that ends with it, or NOBODY */
};
#define NOBODY UINT64_MAX

/* Of one peer. Positions count up; `first` <= `handed`, `give` <= `taken`, and taken - first <= room. */
struct queue {
    struct pending *ring; /* NULL: never connected */
    uint64_t first;       /* below it all is ended and given */
    uint64_t handed;      /* below it nothing waits (without disorder) */
    uint64_t give;        /* below it all is given (without disorder) */
    uint64_t taken;
    uint64_t resume_ns, give_ns;        /* ends of the pauses of operations and of completions */
    uint64_t writes, adds, completions; /* counted for faults */
    bool stopped;                       /* by an error, until it is disconnected */
    int32_t process;                    /* of the peer: target_must_run */
    struct debt debt;
};

/* A source that was read before: its bytes lie in the scratch. */
struct line {
    uint64_t offset;
    uint32_t length; /* 0: none */
};
#define SCRATCH_BYTES 65536u /* of one peer */
#define SCRATCH_PEERS 16u
#define LINE_BYTES 4096u
#define CACHE_LINES (SCRATCH_BYTES * SCRATCH_PEERS / LINE_BYTES)

struct uccl_ep_endpoint {
    uccl_ep_device *device;
    uccl_ep_endpoint *inner;
    uccl_ep_endpoint *next; /* of the device */
    uint32_t rank, peers, index;
    uint64_t random;
    struct line cached[CACHE_LINES]; /* stale_source */
    struct queue queues[];
};

static inline struct pending *pending_at(const uccl_ep_endpoint *e, uint32_t peer, uint64_t at) {
    return &e->queues[peer].ring[at % e->device->knobs.room];
}
static inline uint64_t now_of(const uccl_ep_endpoint *e) {
    return e->device->host->now_ns(e->device->host->context);
}

/* ---------------------------------------------------------------------------------------------------------- queue.c */

uccl_ep_status queue_open(uccl_ep_endpoint *e, uint32_t peer);
void queues_close(uccl_ep_endpoint *e);
uccl_ep_status mutant_submit(uccl_ep_endpoint *e, uint32_t peer, const uccl_ep_operation *operations, uint32_t n,
                             uint32_t flags, uint32_t *accepted);
int32_t mutant_poll(uccl_ep_endpoint *e, uccl_ep_completion *completions, uint32_t max);
uccl_ep_status mutant_disconnect(uccl_ep_endpoint *e, uint32_t peer);
/* Give an operation to the real backend, for position `at` or NOBODY. False: no room there now. */
bool hand(uccl_ep_endpoint *e, uint32_t peer, uint64_t at, const uccl_ep_operation *operation);
/* Position `at` has ended. */
void end(uccl_ep_endpoint *e, uint32_t peer, uint64_t at, int32_t status, int32_t vendor_code);

/* ---------------------------------------------------------------------------------------------------------- fault.c */

#define FAILED_ON_PURPOSE 9001 /* vendor code */

enum fault fault_by_name(const char *name, size_t length);
/* Those that begin as `wrong` does for longest: all would not fit an error's text. */
void fault_names(const char *wrong, char *text, size_t bytes);
bool fault_needs_scratch(enum fault fault);
/* An operation was taken: damage it. */
void fault_taken(uccl_ep_endpoint *e, uint32_t peer, struct pending *p);
/* A submit is over: execute what a fault takes out of turn. */
void fault_submitted(uccl_ep_endpoint *e, uint32_t peer);
enum turn {
    HONEST,  /* execute it as it is */
    DAMAGED, /* it was executed, or what the fault makes of that */
    NOT_YET
};
/* It is the turn of position `at`. */
enum turn fault_turn(uccl_ep_endpoint *e, uint32_t peer, uint64_t at, uint64_t now);
/* Place what is due. */
void fault_debt(uccl_ep_endpoint *e, uint32_t peer, uint64_t now);
/* May the completion of `p` be given before it has ended? */
bool fault_early(const uccl_ep_endpoint *e, const struct pending *p);
/* `p` is complete, and the core is about to know it. */
void fault_ended(uccl_ep_endpoint *e, uint32_t peer, const struct pending *p);
/* A completion is given: false keeps it back for ever. */
bool fault_give(uccl_ep_endpoint *e, uint32_t peer);
/* All devices of the process: other_memory looks for one that is not its own. */
void fault_device_opened(uccl_ep_device *device);
void fault_device_closed(uccl_ep_device *device);
void fault_endpoint_opened(uccl_ep_endpoint *e);
void fault_endpoint_closed(uccl_ep_endpoint *e);

#endif
