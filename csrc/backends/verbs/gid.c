/* SPDX-License-Identifier: Apache-2.0
 *
 * gid.c: by which address a port is reached.
 *
 * InfiniBand: its LID. RoCE: one of its GIDs, and never one of version 1, which no router forwards. Which index is the
 * right one depends on the machine: index 0 is as a rule link-local and of version 1, so it is never chosen, only taken
 * when asked for. An address that is mapped from IPv4 comes first, since that is what fabrics are routed by; then a
 * global IPv6 address, then a link-local one.
 */
#include "verbs.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

static bool is_zero(const union ibv_gid *gid) {
    static const union ibv_gid none;
    return !memcmp(gid, &none, sizeof none);
}

/* Smaller is better. */
enum gid_rank { GID_IPV4, GID_GLOBAL, GID_LINK_LOCAL, GID_NONE };
static const char *const rank_names[] = {"IPv4", "IPv6", "link-local IPv6"};

bool verbs_gid_is_ipv4(const uint8_t raw[16]) {
    static const uint8_t mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    return !memcmp(raw, mapped, sizeof mapped);
}

static enum gid_rank rank_of(const union ibv_gid *gid) {
    if (verbs_gid_is_ipv4(gid->raw)) return GID_IPV4;
    return gid->raw[0] == 0xfe && (gid->raw[1] & 0xc0) == 0x80 ? GID_LINK_LOCAL : GID_GLOBAL;
}

static bool read_gid(const verbs_library *l, struct ibv_context *context, uint8_t port, uint32_t index,
                     struct ibv_gid_entry *entry) {
    memset(entry, 0, sizeof *entry);
    return !l->_ibv_query_gid_ex(context, port, index, entry, 0, sizeof *entry) && !is_zero(&entry->gid);
}

bool verbs_port_refresh(const verbs_library *l, struct ibv_context *context, verbs_port *port) {
    struct ibv_gid_entry entry;
    if (port->link_layer != IBV_LINK_LAYER_ETHERNET) return true;
    if (!read_gid(l, context, port->number, port->gid_index, &entry) || entry.gid_type != IBV_GID_TYPE_ROCE_V2)
        return false;
    port->gid = entry.gid;
    return true;
}

static bool take_gid(verbs_port *port, const struct ibv_gid_entry *entry, uint32_t index, const char *how) {
    char address[INET6_ADDRSTRLEN] = "?";
    inet_ntop(AF_INET6, entry->gid.raw, address, sizeof address);
    port->gid = entry->gid;
    port->gid_index = (uint8_t)index;
    snprintf(port->why, sizeof port->why, "GID %u, RoCE v2, %.45s: %.40s", index, address, how);
    return true;
}

static bool choose_gid(const verbs_library *l, const verbs_options *options, struct ibv_context *context,
                       const struct ibv_port_attr *attributes, verbs_port *port, char *text) {
    struct ibv_gid_entry entry, best_entry = {0};
    const uint32_t entries = attributes->gid_tbl_len > 0 ? (uint32_t)attributes->gid_tbl_len : 0;
    if (!l->_ibv_query_gid_ex) {
        snprintf(text, VERBS_TEXT,
                 "libibverbs does not tell of which RoCE version a GID is: rdma-core 32 or newer does");
        return false;
    }
    if (options->gid != VERBS_UNSET) {
        const uint32_t index = (uint32_t)options->gid;
        if (index >= entries || !read_gid(l, context, port->number, index, &entry)) {
            snprintf(text, VERBS_TEXT, "gid=%u: port %u has no such GID (see `uccl-ep devices`)", index, port->number);
            return false;
        }
        if (entry.gid_type == IBV_GID_TYPE_ROCE_V2) return take_gid(port, &entry, index, "asked for");
        snprintf(text, VERBS_TEXT, "gid=%u is of RoCE version 1, which no router forwards: take one of version 2",
                 index);
        return false;
    }
    enum gid_rank best = GID_NONE;
    uint32_t best_index = 0;
    bool zero_would = false;
    for (uint32_t i = 0; i < entries && i < 256; i++) {
        if (!read_gid(l, context, port->number, i, &entry) || entry.gid_type != IBV_GID_TYPE_ROCE_V2) continue;
        if (!i) {
            zero_would = true;
            continue;
        }
        const enum gid_rank rank = rank_of(&entry.gid);
        if (rank >= best) continue;
        best = rank;
        best_index = i;
        best_entry = entry;
    }
    if (best != GID_NONE) {
        char how[48];
        snprintf(how, sizeof how, "the first one of %s", rank_names[best]);
        return take_gid(port, &best_entry, best_index, how);
    }
    snprintf(text, VERBS_TEXT,
             "port %u has no GID of RoCE version 2%s: give its network interface an IP address (ip addr), or configure "
             "RoCE v2",
             port->number, zero_would ? " besides index 0 (gid=0 takes that)" : "");
    return false;
}

/* The one that is asked for, else the default partition, else the first of which the port is a full member. */
static bool choose_pkey(const verbs_library *l, const verbs_options *options, struct ibv_context *context,
                        const struct ibv_port_attr *attributes, verbs_port *port, char *text) {
    int32_t full = -1, whole = -1;
    uint16_t full_key = 0, whole_key = 0;
    for (uint16_t i = 0; i < attributes->pkey_tbl_len; i++) {
        __be16 raw;
        if (l->ibv_query_pkey(context, port->number, i, &raw)) break;
        const uint16_t key = ntohs(raw);
        if (options->pkey != VERBS_UNSET && (key & 0x7fff) == (options->pkey & 0x7fff) && key & 0x7fff) {
            /* Two limited members do not reach each other, so a full entry is preferred where both are there. */
            if (whole < 0 || key & 0x8000) whole = i, whole_key = key;
        }
        if (key == 0xffff && whole < 0 && options->pkey == VERBS_UNSET) whole = i, whole_key = key;
        if (key & 0x8000 && key & 0x7fff && full < 0) full = i, full_key = key;
    }
    const int32_t index = whole >= 0 ? whole : options->pkey == VERBS_UNSET ? full : -1;
    if (index >= 0) {
        port->pkey_index = (uint16_t)index;
        port->pkey = whole >= 0 ? whole_key : full_key;
        return true;
    }
    if (options->pkey != VERBS_UNSET)
        snprintf(text, VERBS_TEXT, "pkey=%#x: port %u is not in this partition", (unsigned)options->pkey, port->number);
    else
        snprintf(
            text, VERBS_TEXT,
            "port %u is a full member of no partition: ask the subnet manager for one, or give pkey=", port->number);
    return false;
}

static const char *state_name(enum ibv_port_state state) {
    static const char *const names[] = {"in no state", "down", "initializing: no subnet manager has configured it",
                                        "armed", "active"};
    return (size_t)state < sizeof names / sizeof *names ? names[state] : "in a deferred state";
}

static uint32_t mtu_bytes(uint32_t mtu) {
    return mtu >= IBV_MTU_256 && mtu <= IBV_MTU_4096 ? 128u << mtu : 0;
}

/* An active port, as it will be used. */
static bool take_port(const verbs_library *l, const verbs_options *options, struct ibv_context *context,
                      uint32_t number, const struct ibv_port_attr *found, verbs_port *port, char *text) {
    memset(port, 0, sizeof *port);
    port->number = (uint8_t)number;
    port->link_layer = found->link_layer;
    port->lid = found->lid;
    port->max_message = found->max_msg_sz;
    port->mtu = found->active_mtu;
    if (options->mtu != VERBS_UNSET)
        while (port->mtu > IBV_MTU_256 && mtu_bytes(port->mtu) > (uint32_t)options->mtu) port->mtu--;
    if (!mtu_bytes(port->mtu)) {
        snprintf(text, VERBS_TEXT, "port %u says that its MTU is number %u, which is none", number, port->mtu);
        return false;
    }
    if (!choose_pkey(l, options, context, found, port, text)) return false;
    if (found->link_layer == IBV_LINK_LAYER_ETHERNET) return choose_gid(l, options, context, found, port, text);
    snprintf(port->why, sizeof port->why, "InfiniBand, LID %u", port->lid);
    return true;
}

/* The first that will do; of the others the first one's reason is told. */
bool verbs_port_choose(const verbs_library *l, const verbs_options *options, struct ibv_context *context,
                       const char *name, uint32_t ports, verbs_port *port, struct ibv_port_attr *attributes,
                       char *text) {
    const uint32_t first = options->port == VERBS_UNSET ? 1 : (uint32_t)options->port;
    const uint32_t last = options->port == VERBS_UNSET ? ports : first;
    memset(port, 0, sizeof *port);
    if (!ports || first > ports) {
        snprintf(text, VERBS_TEXT, "port %u of %.64s: it has %u", first, name, ports);
        return false;
    }
    text[0] = 0;
    for (uint32_t number = first; number <= last; number++) {
        struct ibv_port_attr found = {0};
        const int error = l->ibv_query_port(context, (uint8_t)number, (struct _compat_ibv_port_attr *)&found);
        if (error) {
            if (!text[0]) snprintf(text, VERBS_TEXT, "port %u does not answer: %s", number, strerror(error));
            continue;
        }
        if (found.state != IBV_PORT_ACTIVE) {
            if (!text[0])
                snprintf(text, VERBS_TEXT, "port %u is %s: see to its cable and link (ip link set ... up; rdma link)",
                         number, state_name(found.state));
            continue;
        }
        *attributes = found;
        char why[VERBS_TEXT];
        if (take_port(l, options, context, number, &found, port, why)) return true;
        if (!text[0]) memcpy(text, why, sizeof why);
    }
    return false;
}
