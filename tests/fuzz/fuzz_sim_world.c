/* SPDX-License-Identifier: Apache-2.0
 *
 * The strings of a world of virtual NICs: profile, knobs, faults, also those injected later. Any of them makes a world,
 * or is refused with a text that ends.
 */
#include "backends/sim/sim.h"
#include "fuzz.h"

/* Words of the language, so that an input need not guess them letter by letter. */
static const char *word(fuzz_input *in, char *out, size_t room) {
    static const char *const separators[] = {",", "=", " ", ";", ""};
    const uccl_ep_sim *sim = uccl_ep_sim_entry();
    static char lines[8192];
    if (!lines[0]) sim->knobs("efa", lines, sizeof lines);
    size_t used = 0;
    out[0] = 0;
    for (uint32_t n = fuzz_below(in, 12); n && used + 64 < room; n--) {
        char part[48] = "";
        const uint8_t how = fuzz_u8(in);
        if (how < 96) {
            const char *at = lines + fuzz_u32(in) % (strlen(lines) + 1);
            while (at != lines && at[-1] != '\n') at--;
            snprintf(part, sizeof part, "%.*s", (int)strcspn(at, " ="), at);
        } else if (how < 160) {
            snprintf(part, sizeof part, "%" PRIu64, fuzz_number(in));
        } else {
            fuzz_string(in, part, sizeof part);
        }
        used += (size_t)snprintf(out + used, room - used, "%s%s", part, separators[fuzz_below(in, 5)]);
    }
    return out;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = fuzz_begin(data, size);
    const uccl_ep_sim *sim = uccl_ep_sim_entry();
    char profile[300], knobs[700], faults[700], text[256], *copy = malloc(512);
    const char *line;
    FUZZ_CHECK(copy, "no memory");
    uccl_ep_sim_config config = {.size = sizeof config, .ranks = 1 + fuzz_below(&in, 4), .seed = fuzz_u8(&in)};
    config.profile = fuzz_u8(&in) % 8 ? sim->profile(fuzz_below(&in, 9), &line) : word(&in, profile, sizeof profile);
    if (fuzz_u8(&in) % 4) config.knobs = word(&in, knobs, sizeof knobs);
    if (fuzz_u8(&in) % 4 == 0) config.faults = word(&in, faults, sizeof faults);
    if (fuzz_u8(&in) % 8 == 0) config.ranks = (uint32_t)fuzz_number(&in);
    if (config.ranks > 64 && config.ranks <= UCCL_EP_SIM_MAX_RANKS) config.ranks = 64;
    config.trace_lines = fuzz_below(&in, 64);
    memset(text, 0x7f, sizeof text);
    uccl_ep_sim_world *world = sim->world_open(&config, text);
    if (!world) {
        FUZZ_CHECK(memchr(text, 0, sizeof text) && text[0], "refused without words");
    } else {
        while (fuzz_left(&in)) {
            memset(text, 0x7f, sizeof text);
            if (sim->inject(world, word(&in, faults, sizeof faults), text))
                FUZZ_CHECK(memchr(text, 0, sizeof text) && text[0], "refused without words");
            for (uint32_t n = fuzz_below(&in, 16); n; n--) sim->step(world);
        }
        const uint32_t room = fuzz_below(&in, 512);
        sim->trace(world, copy, room); /* no byte beyond its room */
        sim->world_close(world);
    }
    free(copy);
    return 0;
}
