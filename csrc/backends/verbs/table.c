/* SPDX-License-Identifier: Apache-2.0
 *
 * table.c: the table of functions of a backend over libibverbs.
 */
#include "verbs.h"

__attribute__((visibility("default"))) const uccl_ep_backend *uccl_ep_backend_entry(void) {
    static const uccl_ep_backend table = {
        .size = sizeof table,
        .abi_major = UCCL_EP_BACKEND_ABI_MAJOR,
        .abi_minor = 3, /* peer_address */
        .name = verbs_backend_name,
        .version = VERBS_VERSION,
        .query = verbs_query,
        .device_open = verbs_device_open,
        .device_close = verbs_device_close,
        .region_register = verbs_region_register,
        .region_deregister = verbs_region_deregister,
        .region_export = verbs_region_export,
        .region_import = verbs_region_import,
        .endpoint_open = verbs_endpoint_open,
        .endpoint_close = verbs_endpoint_close,
        .endpoint_address = verbs_endpoint_address,
        .connect = verbs_connect,
        .connect_poll = verbs_connect_poll,
        .disconnect = verbs_disconnect,
        .submit = verbs_submit,
        .poll = verbs_poll,
        .describe = verbs_describe,
        .replenish = verbs_replenish,
        .events = verbs_events,
        .flush_local = verbs_flush_local,
        .peer_address = verbs_peer_address,
        .opened = verbs_opened,
    };
    return &table;
}
