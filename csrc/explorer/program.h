/* SPDX-License-Identifier: Apache-2.0
 *
 * program.h: litmus programs as data: what each rank does, one operation after the other.
 *
 * Text. Statements end with ';' or a line; '#' begins a comment. docs/model.md has the grammar with examples.
 *
 *   ranks 2; channels 1
 *   r0: store a 64; put 0 ->1 a 64; signal 0 ->1 s0
 *   r1: wait s0 1; read a 64
 *
 * A buffer is a name: the same offset in the heap of every rank, as large as its largest use. `put 0 ->1 a 64 from b`
 * takes its source from another buffer of the own rank. A signal without "+N" adds one in a field of its word that
 * belongs to its (rank, channel) alone, so that the word's value tells who signalled how often; `wait s0 3` counts them
 * all, `wait s0 3 from 1` or `from 1.0` those of rank 1, or of its channel 0.
 */
#ifndef UCCL_EP_EXPLORER_PROGRAM_H
#define UCCL_EP_EXPLORER_PROGRAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_RANKS 4u
#define MAX_CHANNELS 4u
#define MAX_OPS 96u /* a rank */
#define MAX_BUFFERS 48u
#define MAX_LABELS 128u
#define MAX_SLOTS 16u
#define MAX_BYTES (64u << 10) /* of a heap */
#define PROGRAM_TEXT 16384u
#define NO_LABEL UINT16_MAX
#define ANY UINT32_MAX

typedef enum op_kind {
    OP_PUT = 1, /* as uccl_ep_op */
    OP_SIGNAL = 2,
    OP_PUT_SIGNAL = 3,
    OP_FLUSH = 4,
    OP_STORE, /* new stamps into an own buffer */
    OP_READ,
    OP_SEE,      /* a signal word, once */
    OP_WAIT,     /* until so many signals, or until the word is at or past a value */
    OP_QUIET,    /* a channel, or all */
    OP_SOURCE,   /* the same for sources */
    OP_COMPLETE, /* a label's ticket */
    OP_FREE,     /* the same for its source */
    OP_BARRIER,  /* all ranks, out of band */
    OP_UNTIL, /* the last word of a buffer holds what the label's put carries: polling memory, as wrong programs do */
    OP_CLAIM  /* all of a buffer holds what the label's put carries, or the program is wrong */
} op_kind;

typedef struct litmus_op {
    uint8_t kind, channel, target, slot;
    uint8_t to, from;             /* buffers */
    bool explicit_add;            /* SIGNAL, PUT_SIGNAL; WAIT: `value` is the word's */
    uint16_t label;               /* given here, or referred to */
    uint32_t bytes;               /* of PUT, STORE, READ, CLAIM */
    uint32_t at, from_at;         /* offsets into the buffers */
    uint32_t of_rank, of_channel; /* WAIT: of whom; ANY */
    uint64_t value;
} litmus_op;

typedef struct buffer {
    char name[12];
    uint32_t bytes, offset;
} buffer;

typedef struct program {
    char name[32];
    char wrong[8];   /* the duty that it breaks: its claims may fail */
    char breaks[64]; /* profiles on which one must fail, ' ' between */
    uint32_t ranks, channels, proxies, ring_log2, granularity;
    uint32_t message;                                 /* longest operation of the NIC; 0: its own limit */
    uint32_t inflight, inflight_peer, inflight_bytes; /* of a proxy, as uccl_ep_config; 0: the NIC's limits */
    bool single_writer;                               /* says that each signal word has one rank that adds to it */
    uint64_t first_ticket, first_sequence;            /* 0: as the library does */
    litmus_op ops[MAX_RANKS][MAX_OPS];
    uint32_t n[MAX_RANKS];
    buffer buffers[MAX_BUFFERS];
    uint32_t n_buffers;
    char labels[MAX_LABELS][12];
    uint32_t n_labels;
    bool laid_out;
    /* Of auto adds: the field of (target, slot, rank, channel). */
    uint8_t shift[MAX_RANKS][MAX_SLOTS][MAX_RANKS][MAX_CHANNELS];
    uint8_t width[MAX_RANKS][MAX_SLOTS]; /* 64: one field; 0: explicit adds */
} program;

/* Not 0: error (256 bytes) says where and what is valid. */
int program_parse(program *p, const char *text, char *error);
/* Offsets of buffers and fields of signals, once all operations are there. Not 0: error says what does not fit. */
int program_lay_out(program *p, char *error);
/* As program_parse reads it; returns the bytes needed. */
uint32_t program_print(const program *p, char *text, uint32_t bytes);
/* The buffer of that name, made if it is new; UINT8_MAX: too many. */
uint8_t program_buffer(program *p, const char *name, uint32_t bytes);
uint16_t program_label(program *p, const char *name);
/* Does one rank alone add to each signal word? */
bool program_has_single_writers(const program *p);
/* Is the profile one of those on which a wrong program must be caught? */
bool program_breaks_on(const program *p, const char *profile);
uint32_t program_operations(const program *p); /* puts and signals of all ranks */
uint32_t program_heap(const program *p);       /* bytes that its buffers take */

/* builtin.c: the litmus programs by name; NULL past the last. */
const char *builtin_text(uint32_t index, const char **name, const char **about);
/* generate.c: a random program that keeps its duties. */
void program_generate(program *p, uint64_t seed);

/* SplitMix64, for everything here that is drawn from a seed. */
typedef struct litmus_rng {
    uint64_t state;
} litmus_rng;
static inline uint64_t rng_next(litmus_rng *r) {
    uint64_t z = (r->state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
static inline uint32_t rng_below(litmus_rng *r, uint32_t limit) {
    return (uint32_t)((rng_next(r) >> 32) * limit >> 32);
}
static inline bool rng_chance(litmus_rng *r, uint32_t percent) {
    return rng_below(r, 100) < percent;
}

#endif
