/* SPDX-License-Identifier: Apache-2.0
 *
 * options.c: what a user may say about a NIC, each with its range. docs/verbs.md is the list for people.
 *
 * No setting makes a retry infinite (ERR-1): timeout 0, retry 7 and rnr_retry 7 mean that, and are refused.
 */
#include "verbs.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct row {
    const char *key;
    size_t offset;
    int32_t least, most, otherwise;
    uint32_t transports;
} rows[] = {
#define ROW(key, member, least, most, otherwise, transports)                                                           \
    { key, offsetof(verbs_options, member), least, most, otherwise, transports }
    ROW("port", port, 1, 255, VERBS_UNSET, VERBS_RC),
    ROW("gid", gid, 0, 255, VERBS_UNSET, VERBS_RC),
    ROW("pkey", pkey, 1, 0xffff, VERBS_UNSET, VERBS_RC),
    ROW("mtu", mtu, 256, 4096, VERBS_UNSET, VERBS_RC),
    ROW("hop_limit", hop_limit, 1, 255, 64, VERBS_RC), /* 1 would end at the first router */
    ROW("traffic_class", traffic_class, 0, 255, 0, VERBS_RC),
    ROW("service_level", service_level, 0, 15, 0, VERBS_RC | VERBS_SRD),
    ROW("flow_label", flow_label, 0, 0xfffff, 0, VERBS_RC),
    ROW("udp_sport", udp_sport, 0xc000, 0xffff, VERBS_UNSET, VERBS_RC),
    ROW("timeout", timeout, 1, 31, 14, VERBS_RC), /* 4.096 us * 2^n: 67 ms */
    ROW("retry", retry, 0, 6, 6, VERBS_RC),
    ROW("rnr_retry", rnr_retry, 0, 6, 6, VERBS_RC | VERBS_SRD),
    ROW("rnr_timer", rnr_timer, 0, 31, 12, VERBS_RC), /* 0.64 ms */
    ROW("rd_atomic", rd_atomic, 1, 255, VERBS_UNSET, VERBS_RC),
    ROW("inline", inline_bytes, 0, 1024, VERBS_UNSET, VERBS_RC | VERBS_SRD),
    ROW("relaxed", relaxed, 0, 1, 0, VERBS_RC),
    ROW("limits_only", limits_only, 0, 1, 0, VERBS_RC),
    ROW("srq", srq, 0, 1, VERBS_UNSET, VERBS_RC),
    ROW("atomics", atomics, 0, 1, VERBS_UNSET, VERBS_RC),
    ROW("dmabuf", dmabuf, 0, 1, 1, VERBS_RC | VERBS_SRD),
    ROW("calls", calls, 0, 1, VERBS_UNSET, VERBS_RC),
    ROW("unsolicited", unsolicited, 0, 1, VERBS_UNSET, VERBS_SRD),
#undef ROW
};
#define ROWS (sizeof rows / sizeof *rows)

static int32_t *member(verbs_options *options, const struct row *row) {
    return (int32_t *)(void *)((char *)options + row->offset);
}

static uccl_ep_status unknown(const uccl_ep_host *host, const char *key) {
    char text[VERBS_TEXT];
    size_t used = (size_t)snprintf(text, sizeof text, "no option '%.32s'; there are library ack%s", key,
                                   verbs_this_transport.library ? " own_library" : "");
    for (size_t i = 0; i < ROWS && used < sizeof text; i++)
        if (rows[i].transports & verbs_this_transport.options)
            used += (size_t)snprintf(text + used, sizeof text - used, " %s", rows[i].key);
    return verbs_fail(host, UCCL_EP_E_INVALID, 0, "%s", text);
}

static uccl_ep_status take_number(const uccl_ep_host *host, const struct row *row, const char *value,
                                  verbs_options *options) {
    char *end;
    errno = 0;
    const long long n = strtoll(value, &end, 0);
    if (errno || end == value || *end || n < row->least || n > row->most)
        return verbs_fail(
            host, UCCL_EP_E_INVALID, 0, "%s=%.32s: a number from %d to %d%s", row->key, value, row->least, row->most,
            row->offset == offsetof(verbs_options, timeout) || row->offset == offsetof(verbs_options, retry) ||
                    row->offset == offsetof(verbs_options, rnr_retry)
                ? " (what is outside is for ever, and nothing may hang)"
                : "");
    *member(options, row) = (int32_t)n;
    return UCCL_EP_OK;
}

static uccl_ep_status take(const uccl_ep_host *host, const char *key, const char *value, verbs_options *options) {
    if (!strcmp(key, "library")) {
        if (strlen(value) >= sizeof options->library)
            return verbs_fail(host, UCCL_EP_E_INVALID, 0, "library=: the path is too long");
        strcpy(options->library, value);
        return UCCL_EP_OK;
    }
    if (!strcmp(key, "own_library") && verbs_this_transport.library) {
        if (strlen(value) >= sizeof options->own_library)
            return verbs_fail(host, UCCL_EP_E_INVALID, 0, "own_library=: the path is too long");
        strcpy(options->own_library, value);
        return UCCL_EP_OK;
    }
    if (!strcmp(key, "ack")) {
        options->visible = !strcmp(value, "visible");
        if (options->visible || !strcmp(value, "delivered")) return UCCL_EP_OK;
        return verbs_fail(host, UCCL_EP_E_INVALID, 0, "ack=%.32s: delivered, or visible where the platform grants that",
                          value);
    }
    for (size_t i = 0; i < ROWS; i++)
        if (rows[i].transports & verbs_this_transport.options && !strcmp(key, rows[i].key))
            return take_number(host, &rows[i], value, options);
    return unknown(host, key);
}

uccl_ep_status verbs_options_parse(const uccl_ep_host *host, const char *text, verbs_options *options) {
    memset(options, 0, sizeof *options);
    for (size_t i = 0; i < ROWS; i++) *member(options, &rows[i]) = rows[i].otherwise;
    while (text && *text) {
        char word[300];
        const size_t length = strcspn(text, ",");
        if (length >= sizeof word) return verbs_fail(host, UCCL_EP_E_INVALID, 0, "an option of %zu bytes", length);
        memcpy(word, text, length);
        word[length] = 0;
        char *value = strchr(word, '=');
        if (!value) return verbs_fail(host, UCCL_EP_E_INVALID, 0, "option '%.40s': key=value is wanted", word);
        *value++ = 0;
        const uccl_ep_status status = take(host, word, value, options);
        if (status != UCCL_EP_OK) return status;
        text += length + (text[length] == ',');
    }
    /* Linux makes the port of the label: its low 14 bits, folded with the other six (ibv_flow_label_to_udp_sport).
     * Label 0 leaves the choice to the NIC, so for the port of that one another is taken. */
    if (options->udp_sport != VERBS_UNSET)
        options->flow_label = options->udp_sport & 0x3fff ? options->udp_sport & 0x3fff : 1 << 14 | 1;
    if (options->visible && options->relaxed)
        return verbs_fail(
            host, UCCL_EP_E_INVALID, 0,
            "ack=visible and relaxed=1: with relaxed ordering an acknowledgement says less than ever; take "
            "one of them");
    if (options->mtu != VERBS_UNSET && options->mtu & (options->mtu - 1))
        return verbs_fail(host, UCCL_EP_E_INVALID, 0, "mtu=%d: 256, 512, 1024, 2048 or 4096", options->mtu);
    return UCCL_EP_OK;
}
