/* SPDX-License-Identifier: Apache-2.0
 *
 * describe.c: which NICs there are, as text, for who lays out the machine that shows them (uccl_ep/lab).
 *
 * Each function writes lines and returns the bytes that they need with their end; what does not fit is left out.
 */
#include <arpa/inet.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "lab.h"

#pragma weak lab_mlx5
#pragma weak lab_efa
#pragma weak lab_bnxt
#pragma weak lab_ionic

struct text {
    char *at;
    size_t bytes, used;
};

__attribute__((format(printf, 2, 3))) static void add(struct text *t, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const size_t room = t->used < t->bytes ? t->bytes - t->used : 0;
    const int n = vsnprintf(room ? t->at + t->used : NULL, room, format, arguments);
    va_end(arguments);
    if (n > 0) t->used += (size_t)n;
}

/* Of a specification as in UCCL_EP_LAB: "device key=value ..." for each NIC, or "error ..." */
__attribute__((visibility("default"))) uint32_t uccl_ep_lab_describe(const char *spec, char *text, uint32_t bytes);
uint32_t uccl_ep_lab_describe(const char *spec, char *text, uint32_t bytes) {
    struct text t = {text, bytes, 0};
    char error[256];
    uint32_t n;
    lab_device *devices = lab_devices_parse(spec, &n, error);
    if (!devices) {
        add(&t, "error %s\n", error);
        return (uint32_t)t.used + 1;
    }
    for (uint32_t i = 0; i < n; i++) {
        const lab_device *d = &devices[i];
        add(&t,
            "device name=%s nic=%s variant=%s vendor=%" PRIu32 " part=%" PRIu32 " firmware=%s modalias=%s abi=%" PRIu32,
            d->name, d->model->name, d->variant->name, d->variant->vendor_id, d->variant->part_id, d->variant->firmware,
            d->variant->modalias, d->model->uverbs_abi);
        add(&t, " guid=%016" PRIx64 " gids=", d->guid);
        for (uint32_t g = 0; g < d->gids; g++) {
            char address[INET6_ADDRSTRLEN];
            add(&t, "%s%s", g ? "," : "", inet_ntop(AF_INET6, &d->gid[g], address, sizeof address));
        }
        add(&t, "\n");
    }
    free(devices);
    return (uint32_t)t.used + 1;
}

/* "variant NIC NAME PROFILE" and "profile NAME TEXT", each of all that there are. */
__attribute__((visibility("default"))) uint32_t uccl_ep_lab_list(char *text, uint32_t bytes);
uint32_t uccl_ep_lab_list(char *text, uint32_t bytes) {
    struct text t = {text, bytes, 0};
    static const struct lab_model *const models[] = {&lab_mlx5, &lab_efa, &lab_bnxt, &lab_ionic};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        for (const struct lab_variant *v = models[i] ? models[i]->variants : NULL; v && v->name; v++)
            add(&t, "variant %s %s %s\n", models[i]->name, v->name, v->profile);
    const vnic_profile *profile;
    for (uint32_t i = 0; (profile = vnic_profile_at(i)); i++) add(&t, "profile %s %s\n", profile->name, profile->text);
    return (uint32_t)t.used + 1;
}
