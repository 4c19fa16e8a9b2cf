# SPDX-License-Identifier: Apache-2.0
"""A kernel puts 4 KiB and signals; another one waits for the signal and reads them.

python kernel_put.py [cpu|cuda|hip]
"""

from __future__ import annotations

import sys

import numpy as np

import uccl_ep.accel
from uccl_ep import Communicator, SingleProcess

BYTES, SLOT = 4096, 0
SOURCE = """
#include <uccl_ep/device.h>
using namespace uccl_ep;

UCCL_EP_KERNEL void send(uccl_ep_device_comm comm, uccl_ep_u32 target, uccl_ep_u32 slot, uccl_ep_u32 bytes) {
    uccl_ep_u32 *const words = static_cast<uccl_ep_u32 *>(comm.heap);
    for (uccl_ep_u32 i = platform::thread(); i < bytes / 4; i += platform::threads()) words[i] = i;
    const ticket sent = put_signal_block(comm, 0, target, 0, bytes, bytes, slot, 1);
    quiet_block(comm, 0, sent); // the bytes are there, and the source may be changed (QUI-1)
}

UCCL_EP_KERNEL void receive(uccl_ep_device_comm comm, uccl_ep_u32 slot, uccl_ep_u32 bytes, uccl_ep_u32 *out) {
    if (wait_signal_block(comm, slot, 1) != UCCL_EP_OK) return; // comm.check_device() says why
    const uccl_ep_u32 *const words = static_cast<const uccl_ep_u32 *>(comm.heap) + bytes / 4;
    for (uccl_ep_u32 i = platform::thread(); i < bytes / 4; i += platform::threads()) out[i] = words[i];
}
"""


def main(kind: str) -> None:
    with (
        uccl_ep.accel.open(kind) as gpu,
        Communicator(SingleProcess(), heap_bytes=1 << 20, accelerator=gpu, device_channels=1) as comm,
    ):
        module = gpu.compile(SOURCE, "kernel_put.cu")
        send, receive = module.kernel("send"), module.kernel("receive")
        out, here, there = gpu.alloc(BYTES), gpu.stream(), gpu.stream()
        slot, size = np.uint32(SLOT), np.uint32(BYTES)
        receive.launch(there, 1, 256, [comm.device(), slot, size, out])
        send.launch(here, 1, 256, [comm.device(), np.uint32(comm.rank), slot, size])
        for stream in (here, there):
            stream.synchronize(timeout=30)
        comm.check_device()  # raises what a kernel met
        assert np.array_equal(out.numpy(np.uint32), np.arange(BYTES // 4, dtype=np.uint32))
        print(f"{gpu.info.name}: {BYTES} bytes, put and signalled by a kernel, strategy {comm.info.strategy}")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["cpu"])
