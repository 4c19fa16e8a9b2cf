/* SPDX-License-Identifier: Apache-2.0
 *
 * config.c: the devices, from FAKE_IBVERBS. Without it there are none, as on a machine without RDMA.
 *
 * KEYS (numbers in any base; sizes in bytes):
 *   vendor, part, hw, guid, fw         identity
 *   ports, state (one digit a port, enum ibv_port_state), layer (eth|ib), mtu (256..4096), max_msg, lid
 *   gids   TYPE/ADDRESS[/IFINDEX] separated by |, TYPE v1, v2 or ib; "-" is an empty place
 *   pkeys  separated by |
 *   max_qp, max_qp_wr, max_sge, max_cq, max_cqe, max_mr, max_mr_size, rd_atom, init_rd_atom, res_rd_atom (0: no limit),
 *   max_srq, max_srq_wr, atomic (0 none, 1 hca, 2 global)
 *   inline, grant (inline bytes granted whatever is asked), max_post, inflight, memlock
 *   open_errno, reg_errno, dmabuf_errno       calls that fail always
 *   srq, wr, cq_ex, relaxed, clean (completions of a dead queue pair vanish), routed (a hop limit of 1 loses packets),
 *   lazy, adds (0: a fetch-and-add adds 0 and says that all is well), mixes (of requests posted by calls together the
 * first alone is sound), srq_sge (a shared queue refuses a receive without an element),
 *   inline_errno (of a queue with more inline bytes than there are), post_limit (requests that a queue takes after
 * all), keeps_bad (a refused list does not say where), srq_flush (a queue pair that breaks flushes a receive of the
 * shared queue, later), last_wqe (it has that event), reuse (numbers of queue pairs), peermem, atomic_flag (0: a right
 * to atomics that there are not is ignored)
 *   of EFA: gen (1..4), caps (efadv), max_rdma, max_rq_wr, min_sq_wr, inline, inline_write, twice (percent of writes
 * that are placed twice), own_numbers (of queue pairs: they begin at 16 on each device)
 */
#include "internal.h"

#include <arpa/inet.h>

#define MIB (1ull << 20)

/* What each generation of EFA is known to have. */
static void generation(fake_device *d, unsigned n) {
    d->attr.vendor_part_id = 0xefa0 + n;
    snprintf(d->firmware, sizeof(d->firmware), "0.0.0.%u", n);
    d->caps = (n >= 1 ? EFADV_READ : 0) | (n >= 2 ? EFADV_WRITE | EFADV_RNR : 0) | (n >= 3 ? EFADV_UNSOLICITED : 0);
    d->max_inline = n >= 4 ? 80 : 32;
    d->inline_write = n >= 3;
    d->twice = n == 3 ? 25 : 0;
}

static void kind_of(fake_device *d, const char *name) {
    struct ibv_device_attr *a = &d->attr;
    *a = (struct ibv_device_attr){.max_mr_size = UINT64_MAX,
                                  .page_size_cap = 0xfffff000,
                                  .max_qp = 131072,
                                  .max_qp_wr = 32768,
                                  .max_sge = 30,
                                  .max_sge_rd = 30,
                                  .max_cq = 1 << 24,
                                  .max_cqe = 4194303,
                                  .max_mr = 1 << 24,
                                  .max_pd = 1 << 23,
                                  .max_qp_rd_atom = 16,
                                  .max_qp_init_rd_atom = 16,
                                  .max_res_rd_atom = 2097152,
                                  .atomic_cap = IBV_ATOMIC_HCA,
                                  .max_srq = 1 << 23,
                                  .max_srq_wr = 32767,
                                  .max_srq_sge = 31,
                                  .max_pkeys = 128,
                                  .local_ca_ack_delay = 16,
                                  .phys_port_cnt = 1,
                                  .vendor_id = 0xffffff};
    d->max_inline = 220;
    d->inline_errno = EINVAL;
    d->page = 4096;
    d->inline_grant = UINT32_MAX;
    d->srq = d->wr_api = d->cq_ex = d->relaxed = d->cq_clean = d->lazy = d->adds = d->strict_atomic_flag = d->last_wqe =
        true;
    d->vendor = (fake_vendor_errors){0};
    snprintf(d->firmware, sizeof(d->firmware), "1.0.0");
    if (strncmp(name, "mlx5", 4) == 0) {
        a->vendor_id = 0x02c9;
        a->vendor_part_id = 4129;
        snprintf(d->firmware, sizeof(d->firmware), "28.43.1014");
        d->vendor = (fake_vendor_errors){0x88, 0x81, 0x82, 0xf5, 0x89, 0x33, 0x68, 0x51, 0x01};
    } else if (strncmp(name, "bnxt_re", 7) == 0) {
        a->vendor_id = 0x14e4;
        a->vendor_part_id = 0x1760;
        snprintf(d->firmware, sizeof(d->firmware), "237.1.137.0");
        a->max_qp = 131073;
        a->max_qp_wr = 4351;
        a->max_sge = a->max_sge_rd = 6;
        a->max_cq = 65536;
        a->max_cqe = 8388607;
        a->max_qp_rd_atom = a->max_qp_init_rd_atom = 126;
        a->max_res_rd_atom = 0;
        a->atomic_cap = IBV_ATOMIC_GLOB;
        d->max_inline = 96;
        d->wr_api = d->cq_ex = false; /* until rdma-core 56 */
        d->srq_needs_sge = true;
        d->vendor = (fake_vendor_errors){7, 10, 9, 11, 6, 4, 3, 2, 8};
    } else if (strncmp(name, "ionic", 5) == 0) {
        a->vendor_id = 0x1dd8;
        a->vendor_part_id = 0x1002;
        snprintf(d->firmware, sizeof(d->firmware), "1.117.5-a-45");
        a->max_qp_wr = 65535;
        a->max_cqe = 65435;
        a->max_sge = a->max_sge_rd = 8;
        a->max_qp_rd_atom = a->max_qp_init_rd_atom = a->max_res_rd_atom = 16;
        a->max_pd = 1024;
        a->atomic_cap = IBV_ATOMIC_NONE;
        d->srq = false;
        a->max_srq = a->max_srq_wr = a->max_srq_sge = 0;
        d->max_inline = 480;
        d->inline_grant = 32;
        d->vendor = (fake_vendor_errors){9, 11, 12, 5, 8, 4, 2, 1, 10};
    } else if (strncmp(name, "efa", 3) == 0) {
        d->efa = true;
        a->vendor_id = 0x1d0f;
        a->max_qp = 256;
        a->max_qp_wr = 4096;
        d->max_rq_wr = 4096;
        a->max_cqe = 32768;
        a->max_sge = a->max_sge_rd = 2;
        a->max_mr_size = 1ull << 42;
        a->max_qp_rd_atom = a->max_qp_init_rd_atom = a->max_res_rd_atom = 0;
        a->atomic_cap = IBV_ATOMIC_NONE;
        d->srq = d->cq_clean = false;
        a->max_srq = a->max_srq_wr = a->max_srq_sge = 0;
        d->max_rdma = 1u << 30;
        d->min_sq_wr = 32;
        d->base.node_type = IBV_NODE_UNSPECIFIED;
        d->base.transport_type = IBV_TRANSPORT_UNSPECIFIED;
        generation(d, 3);
    } else if (strncmp(name, "rxe", 3) == 0) {
        a->max_qp = 1048560;
        a->max_qp_wr = 1048576;
        a->max_cqe = 32767;
        a->max_qp_rd_atom = a->max_qp_init_rd_atom = 128;
        a->max_mr_size = UINT64_MAX;
        d->max_inline = 512;
        d->cq_clean = false;
        d->dmabuf_errno = EOPNOTSUPP;
    }
}

static bool parse_gid(char *text, fake_gid *gid) {
    char *state = NULL;
    const char *type = strtok_r(text, "/", &state), *address = strtok_r(NULL, "/", &state),
               *ifindex = strtok_r(NULL, "/", &state);
    *gid = (fake_gid){0};
    if (type && strcmp(type, "-") == 0) return true;
    if (!type || !address || inet_pton(AF_INET6, address, gid->gid.raw) != 1) return false;
    gid->type = strcmp(type, "v2") == 0   ? IBV_GID_TYPE_ROCE_V2
                : strcmp(type, "v1") == 0 ? IBV_GID_TYPE_ROCE_V1
                                          : IBV_GID_TYPE_IB;
    gid->ifindex = ifindex ? (uint32_t)strtoul(ifindex, NULL, 0) : 0;
    return true;
}

static bool list_of_gids(fake_device *d, const char *value) {
    char copy[1024], *state = NULL;
    snprintf(copy, sizeof(copy), "%s", value);
    d->gids = 0;
    for (char *one = strtok_r(copy, "|", &state); one; one = strtok_r(NULL, "|", &state))
        if (d->gids == FAKE_MAX_GIDS || !parse_gid(one, &d->gid[d->gids++])) return false;
    return true;
}

/* As a RoCE port of one IPv4 address has them: the link-local and the mapped one, each in both versions. */
static void default_gids(fake_device *d, bool ethernet) {
    char text[256];
    if (ethernet)
        snprintf(text, sizeof(text), "v1/fe80::%x/2|v2/fe80::%x/2|v1/::ffff:10.0.0.%u/2|v2/::ffff:10.0.0.%u/2",
                 d->index + 1, d->index + 1, d->index + 1, d->index + 1);
    else
        snprintf(text, sizeof(text), "ib/fe80::%x", d->index + 1);
    if (!list_of_gids(d, text)) FAKE_DIE("default gids");
}

static bool number(const char *text, uint64_t *value) {
    char *end = NULL;
    errno = 0;
    *value = strtoull(text, &end, 0);
    return *text && !*end && !errno;
}

static bool set_key(fake_device *d, const char *key, const char *value) {
    struct ibv_device_attr *a = &d->attr;
    if (strcmp(key, "gids") == 0) return list_of_gids(d, value);
    if (strcmp(key, "fw") == 0) return snprintf(d->firmware, sizeof(d->firmware), "%s", value) > 0;
    if (strcmp(key, "layer") == 0) {
        const bool ethernet = strcmp(value, "eth") == 0;
        for (unsigned p = 0; p < FAKE_MAX_PORTS; p++) {
            d->port[p].link_layer = ethernet ? IBV_LINK_LAYER_ETHERNET : IBV_LINK_LAYER_INFINIBAND;
            d->port[p].lid = ethernet ? 0 : (uint16_t)(d->index + 1);
        }
        default_gids(d, ethernet);
        return true;
    }
    if (strcmp(key, "pkeys") == 0) {
        char copy[256], *state = NULL;
        uint64_t v;
        snprintf(copy, sizeof(copy), "%s", value);
        d->pkeys = 0;
        for (char *one = strtok_r(copy, "|", &state); one; one = strtok_r(NULL, "|", &state)) {
            if (d->pkeys == FAKE_MAX_PKEYS || !number(one, &v)) return false;
            d->pkey[d->pkeys++] = (uint16_t)v;
        }
        return true;
    }
    if (strcmp(key, "state") == 0) {
        for (unsigned p = 0; value[p]; p++) {
            if (p == FAKE_MAX_PORTS || value[p] < '0' || value[p] > '5') return false;
            d->port[p].state = (enum ibv_port_state)(value[p] - '0');
            d->port[p].phys_state = value[p] == '4' ? 5 : 3;
        }
        return true;
    }
    uint64_t v;
    if (!number(value, &v)) return false;
    if (strcmp(key, "gen") == 0) {
        generation(d, (unsigned)v);
        return d->efa && v <= 4;
    }
    if (strcmp(key, "mtu") == 0) {
        enum ibv_mtu mtu = IBV_MTU_256;
        while (mtu < IBV_MTU_4096 && 128ull << mtu < v) mtu++;
        for (unsigned p = 0; p < FAKE_MAX_PORTS; p++) d->port[p].active_mtu = mtu;
        return 128ull << mtu == v;
    }
    if (strcmp(key, "max_msg") == 0 || strcmp(key, "lid") == 0) {
        for (unsigned p = 0; p < FAKE_MAX_PORTS; p++)
            if (key[0] == 'm')
                d->port[p].max_msg_sz = (uint32_t)v;
            else
                d->port[p].lid = (uint16_t)v;
        return true;
    }
    const struct {
        const char *key;
        void *field;
        size_t size;
    } fields[] = {{"vendor", &a->vendor_id, 4},
                  {"part", &a->vendor_part_id, 4},
                  {"hw", &a->hw_ver, 4},
                  {"guid", &d->guid, 8},
                  {"ports", &a->phys_port_cnt, 1},
                  {"max_qp", &a->max_qp, 4},
                  {"max_qp_wr", &a->max_qp_wr, 4},
                  {"max_sge", &a->max_sge, 4},
                  {"max_cq", &a->max_cq, 4},
                  {"max_cqe", &a->max_cqe, 4},
                  {"max_mr", &a->max_mr, 4},
                  {"max_mr_size", &a->max_mr_size, 8},
                  {"rd_atom", &a->max_qp_rd_atom, 4},
                  {"init_rd_atom", &a->max_qp_init_rd_atom, 4},
                  {"res_rd_atom", &a->max_res_rd_atom, 4},
                  {"max_srq", &a->max_srq, 4},
                  {"max_srq_wr", &a->max_srq_wr, 4},
                  {"atomic", &a->atomic_cap, 4},
                  {"inline", &d->max_inline, 4},
                  {"grant", &d->inline_grant, 4},
                  {"max_post", &d->max_post, 4},
                  {"inflight", &d->inflight_limit, 8},
                  {"memlock", &d->memlock, 8},
                  {"open_errno", &d->open_errno, 4},
                  {"reg_errno", &d->reg_errno, 4},
                  {"dmabuf_errno", &d->dmabuf_errno, 4},
                  {"pad", &d->max_send_wr_pad, 4},
                  {"inline_errno", &d->inline_errno, 4},
                  {"post_limit", &d->post_limit, 4},
                  {"page", &d->page, 4},
                  {"gid_port", &d->gid_port, 4},
                  {"caps", &d->caps, 4},
                  {"max_rdma", &d->max_rdma, 4},
                  {"max_rq_wr", &d->max_rq_wr, 4},
                  {"min_sq_wr", &d->min_sq_wr, 4},
                  {"twice", &d->twice, 4}};
    for (unsigned i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
        if (strcmp(key, fields[i].key) == 0) {
            memcpy(fields[i].field, &v, fields[i].size); /* little endian */
            return true;
        }
    const struct {
        const char *key;
        bool *field;
    } bools[] = {{"srq", &d->srq},
                 {"wr", &d->wr_api},
                 {"cq_ex", &d->cq_ex},
                 {"relaxed", &d->relaxed},
                 {"clean", &d->cq_clean},
                 {"routed", &d->routed},
                 {"lazy", &d->lazy},
                 {"adds", &d->adds},
                 {"mixes", &d->mixes},
                 {"reuse", &d->reuse_qpn},
                 {"peermem", &d->peermem},
                 {"atomic_flag", &d->strict_atomic_flag},
                 {"srq_sge", &d->srq_needs_sge},
                 {"srq_flush", &d->srq_flush},
                 {"last_wqe", &d->last_wqe},
                 {"keeps_bad", &d->keeps_bad},
                 {"inline_write", &d->inline_write},
                 {"own_numbers", &d->own_numbers}};
    for (unsigned i = 0; i < sizeof(bools) / sizeof(bools[0]); i++)
        if (strcmp(key, bools[i].key) == 0) {
            *bools[i].field = v != 0;
            return v <= 1;
        }
    return false;
}

static bool describe(fake_device *d, char *text, uint32_t index) {
    char *state = NULL;
    const char *name = strtok_r(text, ",", &state);
    if (!name || strlen(name) >= sizeof(d->base.name)) return false;
    d->index = index;
    d->guid = 0x0200000000000001ull + index;
    d->listed = true;
    d->base.node_type = IBV_NODE_CA;
    d->base.transport_type = IBV_TRANSPORT_IB;
    snprintf(d->base.name, sizeof(d->base.name), "%s", name);
    snprintf(d->base.dev_name, sizeof(d->base.dev_name), "uverbs%u", index);
    const char *root = getenv("SYSFS_PATH");
    if (!root || strlen(root) > 128) root = "/sys";
    snprintf(d->base.dev_path, sizeof(d->base.dev_path), "%s/class/infiniband_verbs/uverbs%u", root, index);
    snprintf(d->base.ibdev_path, sizeof(d->base.ibdev_path), "%s/class/infiniband/%s", root, name);
    kind_of(d, name);
    d->pkeys = 1;
    d->pkey[0] = 0xffff;
    for (unsigned p = 0; p < FAKE_MAX_PORTS; p++)
        d->port[p] = (struct ibv_port_attr){.state = IBV_PORT_ACTIVE,
                                            .phys_state = 5,
                                            .max_mtu = IBV_MTU_4096,
                                            .active_mtu = IBV_MTU_4096,
                                            .max_msg_sz = 1u << 30,
                                            .active_width = 2,
                                            .active_speed = 128,
                                            .link_layer = IBV_LINK_LAYER_ETHERNET};
    default_gids(d, !d->efa);
    for (unsigned p = 0; p < FAKE_MAX_PORTS && d->efa; p++) d->port[p].link_layer = IBV_LINK_LAYER_UNSPECIFIED;
    for (char *one = strtok_r(NULL, ",", &state); one; one = strtok_r(NULL, ",", &state)) {
        char *value = strchr(one, '=');
        if (!value) return false;
        *value++ = 0;
        if (!set_key(d, one, value)) {
            fprintf(stderr, "fake libibverbs: FAKE_IBVERBS: %s: no such key, or no value of it: %s\n", one, value);
            return false;
        }
    }
    for (unsigned p = 0; p < FAKE_MAX_PORTS; p++) {
        d->port[p].gid_tbl_len = (int)d->gids;
        d->port[p].pkey_tbl_len = (uint16_t)d->pkeys;
    }
    snprintf(d->attr.fw_ver, sizeof(d->attr.fw_ver), "%s", d->firmware);
    d->attr.node_guid = d->attr.sys_image_guid = htobe64(d->guid);
    return d->attr.phys_port_cnt >= 1 && d->attr.phys_port_cnt <= FAKE_MAX_PORTS;
}

/* A device that is named again with the same text is the same device, with all that lives in it. */
static char *named[FAKE_MAX_DEVICES];

int fake_configure(void) {
    const char *spec = getenv("FAKE_IBVERBS");
    char copy[4096], *state = NULL;
    if (strlen(spec ? spec : "") >= sizeof(copy)) return -EINVAL;
    snprintf(copy, sizeof(copy), "%s", spec ? spec : "");
    for (unsigned i = 0; i < FAKE_MAX_DEVICES; i++)
        if (fake_devices[i]) fake_devices[i]->listed = false;
    uint32_t index = 0;
    for (char *one = strtok_r(copy, ";", &state); one; one = strtok_r(NULL, ";", &state), index++) {
        unsigned at = 0;
        while (at < FAKE_MAX_DEVICES && !(named[at] && strcmp(named[at], one) == 0)) at++;
        if (at < FAKE_MAX_DEVICES) {
            fake_devices[at]->listed = true;
            continue;
        }
        for (at = 0; at < FAKE_MAX_DEVICES && named[at]; at++)
            if (!fake_devices[at]->listed && !fake_devices[at]->live_qps) { /* its place is free: nobody holds it */
                bool held = false;
                for (const fake_context *c = fake_contexts; c; c = c->next)
                    held = held || c->device == fake_devices[at];
                if (held) continue;
                free(named[at]);
                free(fake_devices[at]);
                named[at] = NULL;
                fake_devices[at] = NULL;
                break;
            }
        if (at == FAKE_MAX_DEVICES) return -ENOMEM;
        named[at] = strdup(one);
        fake_devices[at] = calloc(1, sizeof(fake_device));
        if (!named[at] || !fake_devices[at]) FAKE_DIE("no memory");
        if (!describe(fake_devices[at], one, index)) {
            fprintf(stderr, "fake libibverbs: FAKE_IBVERBS: not a device: %s\n", named[at]);
            fake_devices[at]->listed = false;
            return -EINVAL;
        }
    }
    return 0;
}
