/* SPDX-License-Identifier: Apache-2.0
 *
 * device.c: the NICs that the environment asks for.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lab.h"
#include "raw.h"

pthread_mutex_t lab_lock = PTHREAD_MUTEX_INITIALIZER;

/* Weak: a build may lack a vendor's model. */
#pragma weak lab_mlx5
#pragma weak lab_efa
#pragma weak lab_bnxt
#pragma weak lab_ionic
static const struct lab_model *const models[] = {&lab_mlx5, &lab_efa, &lab_bnxt, &lab_ionic};
#define MODELS (sizeof models / sizeof *models)

/* One write, so that lines of several threads do not mix, and no stdio, which the program may hold locked. */
static void say(const char *format, va_list arguments) {
    char line[512];
    static const char head[] = "uccl-ep lab: ";
    size_t n = sizeof head - 1;
    memcpy(line, head, n);
    const int written = vsnprintf(line + n, sizeof line - n - 1, format, arguments);
    if (written > 0) n += (size_t)written < sizeof line - n - 1 ? (size_t)written : sizeof line - n - 2;
    line[n++] = '\n';
    if (raw_write(STDERR_FILENO, line, n) < 0) return;
}

void lab_say(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(format, arguments);
    va_end(arguments);
}

int lab_unsupported(const char *format, ...) {
    char what[400];
    va_list arguments;
    va_start(arguments, format);
    snprintf(what, sizeof what, "not implemented: %s", format);
    say(what, arguments);
    va_end(arguments);
    return EOPNOTSUPP;
}

void lab_die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(format, arguments);
    va_end(arguments);
    abort();
}

uint32_t lab_qp_bits(const lab_device *device) {
    return device->model->qpn_bits - 6;
}

/* ------------------------------------------------------------------------------------------------- what is asked for
 */

struct parse {
    const struct lab_model *model;
    const char *variant;
    vnic_knobs *knobs;
    uint64_t count, seed;
    char fabric[48], name[24];
};

static bool number(const char *text, uint64_t *value) {
    if (*text < '0' || *text > '9') return false;
    char *end;
    errno = 0;
    *value = strtoull(text, &end, 0);
    return !errno && !*end;
}

static void join(char *text, size_t bytes, const char *word) {
    const size_t n = strlen(text);
    snprintf(text + n, bytes - n, "%s%s", n ? ", " : "", word);
}

/* The value of `key` in "key=value,..."; false: it is not there. */
static bool value_of(const char *group, const char *key, char *value, size_t bytes) {
    const size_t length = strlen(key);
    for (const char *at = group; *at;) {
        const size_t n = strcspn(at, ",");
        if (n > length && at[length] == '=' && !memcmp(at, key, length)) {
            snprintf(value, bytes, "%.*s", (int)(n - length - 1), at + length + 1);
            return true;
        }
        at += n + (at[n] == ',');
    }
    return false;
}

/* Keys that are no knobs. nic, variant and profile have been looked at before. */
static int other_key(void *context, const char *key, const char *value, char *text) {
    struct parse *p = context;
    if (!strcmp(key, "nic") || !strcmp(key, "variant") || !strcmp(key, "profile")) return 1;
    if (!strcmp(key, "count")) {
        if (number(value, &p->count) && p->count && p->count <= LAB_MAX_DEVICES) return 1;
        snprintf(text, 256, "count=%.40s: 1 to %u are possible", value, LAB_MAX_DEVICES);
        return -1;
    }
    if (!strcmp(key, "seed")) {
        if (number(value, &p->seed)) return 1;
        snprintf(text, 256, "seed=%.40s: a number is wanted", value);
        return -1;
    }
    if (!strcmp(key, "fabric")) {
        const size_t n = strlen(value);
        if (n && n < sizeof p->fabric &&
            strspn(value, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == n) {
            memcpy(p->fabric, value, n + 1);
            return 1;
        }
        snprintf(text, 256, "fabric=%.40s: 1 to %zu letters, digits, '.', '_' and '-' are possible", value,
                 sizeof p->fabric - 1);
        return -1;
    }
    return 0;
}

static int parse_model(struct parse *p, const char *group, char *text) {
    if (!value_of(group, "nic", p->name, sizeof p->name)) strcpy(p->name, "connectx");
    char valid[128] = "";
    for (size_t i = 0; i < MODELS; i++) {
        if (!models[i]) continue;
        if (!strcmp(models[i]->name, p->name)) p->model = models[i];
        join(valid, sizeof valid, models[i]->name);
    }
    if (p->model) return 0;
    snprintf(text, 256, "nic=%s: %s are possible", p->name, valid);
    return -1;
}

static const struct lab_variant *parse_variant(struct parse *p, const char *group, char *text) {
    char wanted[24], valid[128] = "";
    const struct lab_variant *variants = p->model->variants;
    if (!value_of(group, "variant", wanted, sizeof wanted)) return variants;
    for (; variants->name; variants++) {
        if (!strcmp(variants->name, wanted)) return variants;
        join(valid, sizeof valid, variants->name);
    }
    snprintf(text, 256, "variant=%s: %s are possible for nic=%s", wanted, valid, p->name);
    return NULL;
}

static int parse_profile(const char *group, const struct lab_variant *variant, vnic_knobs *knobs, char *text) {
    char wanted[40], valid[160] = "";
    if (!value_of(group, "profile", wanted, sizeof wanted)) snprintf(wanted, sizeof wanted, "%s", variant->profile);
    const vnic_profile *profile = vnic_profile_named(wanted);
    if (profile) {
        *knobs = profile->knobs;
        return 0;
    }
    for (uint32_t i = 0; (profile = vnic_profile_at(i)); i++) join(valid, sizeof valid, profile->name);
    snprintf(text, 256, "profile=%s: %s are possible", wanted, valid);
    return -1;
}

/* Locally administered EUI-64; the link-local address is its modified form (RFC 4291, appendix A), the IPv4 address is
 * of 192.0.2.0/24, which is nobody's (RFC 5737). */
static void name_device(lab_device *d) {
    snprintf(d->name, sizeof d->name, "%s%u", d->model->device_name, d->index);
    d->guid = 0x020000fffe000001ull + d->index;
    static const uint8_t prefix[8] = {0xfe, 0x80};
    memcpy(d->gid[0].s6_addr, prefix, 8);
    const uint64_t interface = d->guid ^ 0x0200000000000000ull;
    for (uint32_t i = 0; i < 8; i++) d->gid[0].s6_addr[8 + i] = (uint8_t)(interface >> (56 - 8 * i));
    d->gids = 1;
    if (!strcmp(d->model->name, "efa")) return;
    d->gid[1].s6_addr[10] = d->gid[1].s6_addr[11] = 0xff;
    const uint8_t address[4] = {192, 0, 2, (uint8_t)(1 + d->index)};
    memcpy(d->gid[1].s6_addr + 12, address, 4);
    d->gids = 2;
}

static int parse_group(const char *group, lab_device *devices, uint32_t *n, char *text) {
    struct parse p = {.count = 1, .seed = 1, .fabric = "default"};
    vnic_knobs knobs;
    if (parse_model(&p, group, text)) return -1;
    const struct lab_variant *variant = parse_variant(&p, group, text);
    if (!variant || parse_profile(group, variant, &knobs, text) || vnic_knobs_parse(&knobs, group, other_key, &p, text))
        return -1;
    if (knobs.max_batch && !p.model->store) {
        snprintf(text, 256,
                 "max_batch=%llu: doorbells of nic=%s are memory, and how much one of them covers cannot be told: "
                 "max_batch=0 is possible",
                 (unsigned long long)knobs.max_batch, p.name);
        return -1;
    }
    if (*n + p.count > LAB_MAX_DEVICES) {
        snprintf(text, 256, "%llu NICs: a lab has at most %u", (unsigned long long)(*n + p.count), LAB_MAX_DEVICES);
        return -1;
    }
    while (p.count--) {
        lab_device *d = &devices[*n];
        *d = (lab_device){.model = p.model, .variant = variant, .knobs = knobs, .index = (*n)++, .active_mtu = 5};
        d->seed = d->index ? devices[0].seed : p.seed;
        memcpy(d->fabric, d->index ? devices[0].fabric : p.fabric, sizeof d->fabric);
        name_device(d);
    }
    return 0;
}

lab_device *lab_devices_parse(const char *spec, uint32_t *n, char *text) {
    *n = 0;
    lab_device *devices = calloc(LAB_MAX_DEVICES, sizeof *devices);
    char *copy = strdup(spec);
    if (!devices || !copy) {
        snprintf(text, 256, "no memory");
        goto fail;
    }
    for (char *at = copy, *end; at; at = end) {
        end = strchr(at, ';');
        if (end) *end++ = 0;
        if (*at && parse_group(at, devices, n, text)) goto fail;
    }
    if (!*n) {
        snprintf(text, 256, "no NIC is named: nic=NAME,... is wanted");
        goto fail;
    }
    free(copy);
    return devices;
fail:
    free(copy);
    free(devices);
    *n = 0;
    return NULL;
}

static lab_device *asked;
static uint32_t n_asked;

static void read_environment(void) {
    const char *spec = getenv("UCCL_EP_LAB");
    char text[256];
    if (!spec || !*spec) return;
    asked = lab_devices_parse(spec, &n_asked, text);
    if (!asked) lab_die("UCCL_EP_LAB: %s", text);
}

lab_device *lab_devices(uint32_t *n) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_environment);
    *n = n_asked;
    return asked;
}
