// SPDX-License-Identifier: Apache-2.0
//
// headers.cpp: the public headers compile as C++17, and their inline functions do there what they do in C. A test may
// also run it: it returns 0.
#include <uccl_ep/uccl_ep.h>

#include <uccl_ep/accelerator.h>
#include <uccl_ep/device.h>
#include <uccl_ep/device_comm.h>

#include <uccl_ep/backend.h>
#include <uccl_ep/ring.h>

#include <uccl_ep/command.h>
#include <uccl_ep/status.h>

int main() {
    uccl_ep_slot slots[2] = {};
    uccl_ep_ring_producer producer = {};
    uccl_ep_ring_counters counters = {};
    uccl_ep_ring ring = {};
    ring.log2_slots = 1;
    ring.slots = slots;
    ring.producer = &producer;
    ring.counters = &counters;

    uccl_ep_command command = {}, back = {};
    uccl_ep_words words = {}, taken = {};
    command.op = UCCL_EP_OP_SIGNAL;
    command.add = 5;
    if (uccl_ep_encode(&command, &words) != UCCL_EP_OK) return 1;
    const uccl_ep_u64 ticket = uccl_ep_ring_reserve(&ring, 1);
    if (!uccl_ep_ring_has_space(&ring, ticket, 1)) return 2;
    uccl_ep_ring_store(&ring, ticket, words);
    if (!uccl_ep_ring_take(slots, 1, ticket, &taken)) return 3;
    if (uccl_ep_decode(taken.word[0], taken.word[1], &back) != UCCL_EP_OK || back.add != 5) return 4;
    return 0;
}
