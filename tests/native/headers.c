/* SPDX-License-Identifier: Apache-2.0
 *
 * headers.c: the public headers compile together, in any order and twice, as C11. Compiled, never run.
 */
#include <uccl_ep/uccl_ep.h>

#include <uccl_ep/accelerator.h>
#include <uccl_ep/backend.h>
#include <uccl_ep/device_comm.h>
#include <uccl_ep/ring.h>

#include <uccl_ep/command.h>
#include <uccl_ep/status.h>
#include <uccl_ep/uccl_ep.h>

typedef int headers_are_seen[UCCL_EP_OK == 0 && sizeof(uccl_ep_words) == 16 ? 1 : -1];
