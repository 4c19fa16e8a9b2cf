/* SPDX-License-Identifier: Apache-2.0
 *
 * builtin.c: the litmus programs. Those that open with `wrong` break a duty of the contract: some NIC lets them get
 * away with it, and on the named profiles a claim of theirs must be seen to fail.
 */
#include <stddef.h>
#include <string.h>

#include "program.h"

static const struct {
    const char *name, *about, *text;
} programs[] = {
    {"mp", "message passing: a put, a signal, a reader (SIG-2)",
     "ranks 2\n"
     "r0: store a 64; put 0 ->1 a 64; signal 0 ->1 s0\n"
     "r1: wait s0 1; read a 64\n"},
    {"mp-two-channels", "message passing on two channels at once (SIG-2)",
     "ranks 2; channels 2; proxies 2\n"
     "r0: store a 64; store b 64; put 0 ->1 a 64; put 1 ->1 b 64; signal 1 ->1 s1; signal 0 ->1 s0\n"
     "r1: wait s1 1; read b 64; see s0; read a 64; wait s0 1; read a 64\n"},
    {"mp-both-ways", "two ranks that send to each other (SIG-2)",
     "ranks 2\n"
     "r0: store a 32; put_signal 0 ->1 a 32 s0; wait s0 1; read b 32\n"
     "r1: store b 32; put_signal 0 ->0 b 32 s0; wait s0 1; read a 32\n"},
    {"put-signal", "the signal of a put_signal covers its own bytes (SIG-3)",
     "ranks 2\n"
     "r0: store a 128; put_signal 0 ->1 a 128 s0\n"
     "r1: see s0; read a 128; wait s0 1; read a 128\n"},
    {"batch", "many puts and one signal; neighbours may be merged (SIG-2)",
     "ranks 2; ring 3\n"
     "r0: store a 256; put 0 ->1 a 64; put 0 ->1 a+64 64; put 0 ->1 a+192 64; put 0 ->1 a+128 64; signal 0 ->1 s0\n"
     "r1: wait s0 1; read a 256\n"},
    {"neighbours", "puts that are adjacent at the target, at the source, and at both: only the last may be one (PUT-1)",
     "ranks 2; ring 3\n"
     "r0: store x 64; store y 64; store z 128; put 0 ->1 a 64 from x; put 0 ->1 a+64 64 from y; put 0 ->1 b 64 from z; "
     "put 0 ->1 c 64 from z+64; put 0 ->1 d 64 from z; put 0 ->1 d+64 64 from z+64; signal 0 ->1 s0\n"
     "r1: wait s0 1; read a 128; read b 64; read c 64; read d 128\n"},
    {"sizes", "sizes from nothing to 4 KiB, split into messages of 256 (PUT-4)",
     "ranks 2; ring 3; message 256\n"
     "r0: store a 16; store b 4096; store c 272; put 0 ->1 b 4096; put 0 ->1 a 0; put 0 ->1 a 16; put 0 ->1 c 272; "
     "signal 0 ->1 s0\n"
     "r1: wait s0 1; read a 16; read b 4096; read c 272\n"},
    {"zero", "puts of nothing take tickets and order signals (PUT-4)",
     "ranks 2\n"
     "r0: put 0 ->1 a 0; put_signal 0 ->1 a 0 s0; store a 16; put 0 ->1 a 16; put_signal 0 ->1 a 0 s0; quiet\n"
     "r1: wait s0 1; see s0; wait s0 2; read a 16\n"},
    {"fine", "granularity of 4 bytes",
     "ranks 2; granularity 4\n"
     "r0: store a 40; put 0 ->1 a 8; put 0 ->1 a+8 24; signal 0 ->1 s0; put_signal 0 ->1 a+32 8 s0\n"
     "r1: wait s0 1; read a 32; wait s0 2; read a 40\n"},
    {"order", "signals of one channel to one target, in words of their own (SIG-5)",
     "ranks 2\n"
     "r0: signal 0 ->1 s0; signal 0 ->1 s1; signal 0 ->1 s0; signal 0 ->1 s1\n"
     "r1: wait s1 1; see s0; wait s1 2; see s0; see s1\n"},
    {"chain", "three ranks: what arrives is forwarded from where it lies (SIG-2, PUT-3)",
     "ranks 3\n"
     "r0: store a 64; put 0 ->1 a 64; signal 0 ->1 s0\n"
     "r1: wait s0 1; put 0 ->2 a 64; signal 0 ->2 s0\n"
     "r2: wait s0 1; read a 64\n"},
    {"chain-two-nics", "the same, every hop by another proxy and NIC queue",
     "ranks 3; channels 2; proxies 2\n"
     "r0: store a 64; put 0 ->1 a 64; signal 0 ->1 s0\n"
     "r1: wait s0 1; put_signal 1 ->2 a 64 s1; put_signal 0 ->2 b 64 s0 from a\n"
     "r2: wait s1 1; read a 64; wait s0 1; read b 64\n"},
    {"quiet-then-third", "quiet, then a third party tells (QUI-5)",
     "ranks 3; channels 2; proxies 2\n"
     "r0: store a 64; put 0 ->1 a 64; quiet 0; signal 1 ->2 s0\n"
     "r1: wait s0 1 from 2; read a 64\n"
     "r2: wait s0 1; signal 0 ->1 s0\n"},
    {"quiet-all", "quiet over all channels is all of them (QUI-2)",
     "ranks 3; channels 2; proxies 2\n"
     "r0: store a 32; store b 32; put 1 ->1 b 32; put 0 ->2 a 32; signal 1 ->1 s0; quiet; barrier\n"
     "r1: barrier; read b 32; see s0\n"
     "r2: barrier; read a 32\n"},
    {"many-writers", "three ranks and two channels add to one word (SIG-4)",
     "ranks 4; channels 2; proxies 2\n"
     "r0: signal 0 ->3 s0; signal 1 ->3 s0; signal 0 ->3 s0; quiet; barrier\n"
     "r1: signal 0 ->3 s0; signal 1 ->3 s0; signal 0 ->3 s0; quiet; barrier\n"
     "r2: signal 0 ->3 s0; signal 1 ->3 s0; signal 0 ->3 s0; quiet; barrier\n"
     "r3: see s0; wait s0 3; wait s0 6; barrier; see s0\n"},
    {"reuse", "two slots, each reused when the put of two epochs back is complete (PUT-7)",
     "ranks 2\n"
     "r0: store x 64; put_signal 0 ->1 a 64 s0 from x as e0; store y 64; put_signal 0 ->1 b 64 s0 from y as e1; "
     "complete e0; store x 64; put_signal 0 ->1 a 64 s0 from x as e2; complete e1; store y 64; "
     "put_signal 0 ->1 b 64 s0 from y as e3; complete e2; store x 64; put_signal 0 ->1 a 64 s0 from x as e4\n"
     "r1: wait s0 1; read a 64; wait s0 2; read b 64; wait s0 3; read a 64; wait s0 4; read b 64; wait s0 5; read a "
     "64\n"},
    {"source", "a source is changed as soon as it is free (QUI-0)",
     "ranks 2\n"
     "r0: store x 64; put 0 ->1 a 64 from x as d; free d; store x 64; put 0 ->1 b 64 from x; source; store x 64; "
     "put_signal 0 ->1 c 64 s0 from x\n"
     "r1: wait s0 1; read a 64; read b 64; read c 64\n"},
    {"self", "the own rank is a target like any other (PUT-6)",
     "ranks 2\n"
     "r0: store a 64; put 0 ->0 b 64 from a; signal 0 ->0 s0; wait s0 1; read b 64; put_signal 0 ->1 b 64 s0\n"
     "r1: wait s0 1; read b 64\n"},
    {"flush", "a flush takes a ticket and moves nothing",
     "ranks 2\n"
     "r0: store a 32; put 0 ->1 a 32; flush 0 ->1 as f; complete f; barrier; signal 0 ->1 s0\n"
     "r1: barrier; read a 32; wait s0 1\n"},
    {"ring", "more commands than a ring of two slots holds (PRG-3)",
     "ranks 2; ring 1\n"
     "r0: store a 128; put 0 ->1 a 32; put 0 ->1 a+32 32; signal 0 ->1 s0; put 0 ->1 a+64 32; put_signal 0 ->1 a+96 32 "
     "s0; "
     "signal 0 ->1 s1; quiet\n"
     "r1: wait s0 2; read a 128; wait s1 1\n"},
    {"wrap-32", "tickets and sequences pass 2^32 (LIM-1)",
     "ranks 2; first_ticket 4294967293; first_sequence 4294967293\n"
     "r0: store a 64; put 0 ->1 a 64; signal 0 ->1 s0; put 0 ->1 b 64 from a; signal 0 ->1 s0; put_signal 0 ->1 c 64 "
     "s0 "
     "from a; quiet\n"
     "r1: wait s0 1; read a 64; wait s0 2; read b 64; wait s0 3; read c 64; signal 0 ->0 s1\n"},
    {"wrap-24", "sequences pass 2^24, which is what an immediate may hold (LIM-1)",
     "ranks 2; first_ticket 16777213; first_sequence 16777213\n"
     "r0: store a 64; put 0 ->1 a 64; signal 0 ->1 s0; put 0 ->1 b 64 from a; signal 0 ->1 s0; put_signal 0 ->1 c 64 "
     "s0 "
     "from a; quiet\n"
     "r1: wait s0 1; read a 64; wait s0 2; read b 64; wait s0 3; read c 64; signal 0 ->0 s1\n"},
    {"wrap-16", "sequences pass 2^16 (LIM-1)",
     "ranks 2; first_ticket 65533; first_sequence 65533\n"
     "r0: store a 64; put_signal 0 ->1 a 64 s0; put_signal 0 ->1 b 64 s0 from a; put_signal 0 ->1 c 64 s0 from a; "
     "quiet\n"
     "r1: wait s0 1; read a 64; wait s0 3; read b 64; read c 64\n"},
    {"wrap-64", "sequences pass 2^64 (LIM-1)",
     "ranks 2; first_ticket 9223372036854775800; first_sequence 18446744073709551613\n"
     "r0: store a 64; put_signal 0 ->1 a 64 s0; put_signal 0 ->1 b 64 s0 from a; put_signal 0 ->1 c 64 s0 from a; "
     "quiet\n"
     "r1: wait s0 1; read a 64; wait s0 3; read b 64; read c 64\n"},
    {"word-wraps", "the word itself passes 2^64 (SIG-1)",
     "ranks 2\n"
     "r0: signal 0 ->1 s0 +18446744073709551615; store a 32; put 0 ->1 a 32; signal 0 ->1 s0 +6; quiet; barrier\n"
     "r1: see s0; barrier; see s0; read a 32\n"},
    {"all-to-all", "four ranks, every pair, two channels",
     "ranks 4; channels 2; proxies 2\n"
     "r0: store x 32; put_signal 0 ->1 a 32 s0 from x; put_signal 1 ->2 a 32 s0 from x; put_signal 0 ->3 a 32 s0 from "
     "x; "
     "wait s0 3; read a 32; read b 32; read c 32; read d 32\n"
     "r1: store x 32; put_signal 0 ->0 b 32 s0 from x; put_signal 1 ->2 b 32 s0 from x; put_signal 0 ->3 b 32 s0 from "
     "x; "
     "wait s0 3; read a 32; read b 32; read c 32; read d 32\n"
     "r2: store x 32; put_signal 0 ->0 c 32 s0 from x; put_signal 1 ->1 c 32 s0 from x; put_signal 0 ->3 c 32 s0 from "
     "x; "
     "wait s0 3; read a 32; read b 32; read c 32; read d 32\n"
     "r3: store x 32; put_signal 0 ->0 d 32 s0 from x; put_signal 1 ->1 d 32 s0 from x; put_signal 0 ->2 d 32 s0 from "
     "x; "
     "wait s0 3; read a 32; read b 32; read c 32; read d 32\n"},

    /* ------------------------------------------------------------------------------------------------ wrong protocols
     */
    {"wrong-flag", "the flag is a second put behind the data, not a signal: puts are not ordered among themselves",
     "ranks 2\n"
     "wrong PUT-5 on connectx-ro efa efa3 cxi strawman-min\n"
     "r0: store x 64; store y 16; put 0 ->1 a 64 from x as data; put 0 ->1 f 16 from y as flag\n"
     "r1: until f flag; claim a data\n"},
    {"wrong-last-byte", "the reader polls the last bytes of the data: a put's own bytes are not ordered either",
     "ranks 2\n"
     "wrong PUT-5 on efa efa3 strawman-min\n"
     "r0: store x 256; put 0 ->1 a 256 from x as data\n"
     "r1: until a data; claim a data\n"},
    {"wrong-channel", "the signal goes by another channel than the data: it orders nothing there",
     "ranks 2; channels 2; proxies 2\n"
     "wrong SIG-2 on connectx efa cxi\n"
     "r0: store x 64; put 0 ->1 a 64 from x as data; signal 1 ->1 s0\n"
     "r1: wait s0 1; claim a data\n"},
    {"wrong-source", "sources are changed once the target has answered, and not when they are free",
     "ranks 2\n"
     "wrong PUT-3 on efa3\n"
     "r0: store w 64; store x 64; store y 64; store z 64; put 0 ->1 a 64 from w as da; put 0 ->1 b 64 from x as db; "
     "put 0 ->1 c 64 from y as dc; put_signal 0 ->1 d 64 s0 from z as dd; wait s0 1; store w 64; store x 64; store y "
     "64; "
     "store z 64; quiet; barrier\n"
     "r1: wait s0 1; signal 0 ->0 s0; barrier; claim a da; claim b db; claim c dc; claim d dd\n"},
    {"wrong-target", "slots are written again once their reader has answered, and not when the first puts are complete",
     "ranks 2\n"
     "wrong PUT-7 on efa3\n"
     "r0: store v 64; store w 64; store x 64; store y 64; put 0 ->1 a 64 from v; put 0 ->1 b 64 from w; put_signal 0 "
     "->1 c "
     "64 s0 from x; wait s0 1; put 0 ->1 a 64 from y as a2; put 0 ->1 b 64 from y as b2; put_signal 0 ->1 c 64 s0 from "
     "y "
     "as c2; quiet; barrier\n"
     "r1: wait s0 1; signal 0 ->0 s0; wait s0 2; claim a a2; claim b b2; claim c c2; barrier; claim a a2; claim b b2; "
     "claim c c2\n"},
    {"wrong-overwrite", "two puts to one place, and the second is thought to win",
     "ranks 2\n"
     "wrong PUT-7 on connectx-ro efa efa3 strawman-min\n"
     "r0: store x 64; store y 64; put 0 ->1 a 64 from x as one; put 0 ->1 a 64 from y as two; signal 0 ->1 s0\n"
     "r1: wait s0 1; claim a two\n"},

    /* ------------------------------------------------------------------------------------------------- little programs
     * One to three operations, one for each kind of what ranks rely on: small enough for all schedules on most NICs.
     * Behind the wrong ones, so that random exploration, whose seeds are not to change their meaning, does not draw
     * them. */
    {"little-signal", "one signal (SIG-1)", "ranks 2\nr0: signal 0 ->1 s0\nr1: wait s0 1\n"},
    {"little-put", "one put, quiet, a barrier (QUI-1)",
     "ranks 2\nr0: store a 16; put 0 ->1 a 16; quiet; barrier\nr1: barrier; read a 16\n"},
    {"little-source", "one put whose source is changed once it is free (QUI-0)",
     "ranks 2\nr0: store x 16; put 0 ->1 a 16 from x as d; free d; store x 16; quiet; barrier\nr1: barrier; read a "
     "16\n"},
    {"little-mp", "message passing in one command (SIG-3)",
     "ranks 2\nr0: store a 16; put_signal 0 ->1 a 16 s0\nr1: see s0; read a 16; wait s0 1; read a 16\n"},
    {"little-order", "two signals of one channel (SIG-5)",
     "ranks 2\nr0: signal 0 ->1 s0; signal 0 ->1 s1\nr1: wait s1 1; see s0\n"},
    {"little-epochs", "a signal, quiet, and the next one (QUI-1)",
     "ranks 2\nr0: signal 0 ->1 s0; quiet; signal 0 ->1 s0\nr1: wait s0 1; wait s0 2\n"},
    {"little-writers", "two ranks add to one word (SIG-4)",
     "ranks 3\nr0: signal 0 ->2 s0\nr1: signal 0 ->2 s0\nr2: wait s0 1; wait s0 2\n"},
    {"little-reuse", "a slot is reused once its first put is complete (PUT-7)",
     "ranks 2\n"
     "r0: store x 16; put 0 ->1 a 16 from x as e; complete e; store x 16; put 0 ->1 a 16 from x; quiet; barrier\n"
     "r1: barrier; read a 16\n"},
    {"little-relay", "a signal is answered by one to a third rank (SIG-2)",
     "ranks 3\nr0: signal 0 ->1 s0\nr1: wait s0 1; signal 0 ->2 s0\nr2: wait s0 1\n"},
    {"little-chain", "three ranks: what arrives is forwarded, in one command each (SIG-3, PUT-3)",
     "ranks 3\n"
     "r0: store a 16; put_signal 0 ->1 a 16 s0\n"
     "r1: wait s0 1; put_signal 0 ->2 a 16 s0\n"
     "r2: wait s0 1; read a 16\n"},
    {"little-third", "quiet, then a third party tells (QUI-5)",
     "ranks 3\n"
     "r0: store a 16; put 0 ->1 a 16; quiet; signal 0 ->2 s0\n"
     "r1: wait s0 1; read a 16\n"
     "r2: wait s0 1; signal 0 ->1 s0\n"},
    {"little-wrap", "tickets and sequences pass 2^32 between two signals (LIM-1)",
     "ranks 2; first_ticket 4294967295; first_sequence 4294967295\n"
     "r0: signal 0 ->1 s0; quiet; signal 0 ->1 s0\n"
     "r1: wait s0 2\n"},
    {"little-sizes", "a put of nothing, and one in two messages (PUT-4)",
     "ranks 2; message 16\n"
     "r0: store a 32; put 0 ->1 a 0; put 0 ->1 a 32; quiet; barrier\n"
     "r1: barrier; read a 32\n"},
};

const char *builtin_text(uint32_t index, const char **name, const char **about) {
    if (index >= sizeof programs / sizeof *programs) return NULL;
    if (name) *name = programs[index].name;
    if (about) *about = programs[index].about;
    return programs[index].text;
}
