# SPDX-License-Identifier: Apache-2.0
"""Channels that kernels post to, and heaps of the caller's, from Python. The native tests have the rest.

The accelerator is the emulation's, whose addresses are this process's: here Python stands in for a kernel.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from uccl_ep import Communicator, Op, SingleProcess, accel, errors, paths
from uccl_ep._native import ffi, lib

NOOP = paths.library_dir() / "libuccl_ep_backend_noop.so"


@dataclass(frozen=True)
class Emulation:
    kind: str = "cpu"
    device: int = 0
    library: Path = paths.library_dir() / "libuccl_ep_emulation.so"


def make(**options: Any) -> Communicator:
    return Communicator(
        SingleProcess(), **{"heap_bytes": 1 << 16, "accelerator": Emulation(), "device_channels": 1, **options}
    )


class Kernel:
    """What device.h does, by the ring's own functions."""

    def __init__(self, comm: Communicator) -> None:
        self.bytes = comm.device()
        assert len(self.bytes) == ffi.sizeof("uccl_ep_device_comm")
        self.comm = ffi.from_buffer("uccl_ep_device_comm *", self.bytes)

    def post(self, channel: int, op: Op, **fields: int) -> int:
        command = ffi.new("uccl_ep_command *", {"op": int(op), **fields})
        words = ffi.new("uccl_ep_words *")
        assert lib.uccl_ep_encode(command, words) == lib.UCCL_EP_OK
        ring = ffi.addressof(self.comm.rings[channel])
        ticket: int = lib.uccl_ep_ring_reserve(ring, 1)
        assert lib.uccl_ep_ring_has_space(ring, ticket, 1)
        lib.uccl_ep_ring_store(ring, ticket, words[0])
        return ticket

    def fail(self, **record: int) -> None:
        self.comm.error_claim[0] = 1
        for name, value in record.items():
            setattr(self.comm.error, name, value & (2**64 - 1))


@pytest.fixture
def device_memory() -> Iterator[tuple[int, int]]:
    entry = ctypes.CDLL(str(Emulation().library)).uccl_ep_accelerator_entry
    entry.restype = ctypes.c_void_p
    table = ffi.cast("const uccl_ep_accelerator *", entry())
    gpu, memory = ffi.new("uccl_ep_gpu **"), ffi.new("void **")
    assert table.open(0, gpu) == lib.UCCL_EP_OK
    assert table.device_alloc(gpu[0], 1 << 16, memory) == lib.UCCL_EP_OK
    yield int(ffi.cast("uintptr_t", memory[0])), 1 << 16
    table.device_free(gpu[0], memory[0])
    table.close(gpu[0])


def test_kernels_post_and_the_host_waits() -> None:
    with make(channels=2) as comm:
        assert (comm.info.accelerator, comm.info.device_channels, comm.info.heap_kind) == ("emulation", 1, "host")
        kernel = Kernel(comm)
        comm.heap[:64] = 9
        kernel.post(0, Op.PUT, local=0, remote=4096, bytes=64, granularity=16)
        ticket = kernel.post(0, Op.SIGNAL, slot=3, add=5)
        comm.channel(0).quiet()
        assert comm.channel(0).stats()["posted"] == ticket + 1 == 2
        assert comm.read_signal(3) == 5
        assert (comm.heap[4096 : 4096 + 64] == 9).all()
        comm.channel(1).signal(0, 3, 1).wait()
        comm.quiet()
        assert comm.read_signal(3) == 6
        comm.check_device()


def test_the_host_does_not_post_where_kernels_do() -> None:
    with make(channels=2) as comm:
        for post in (
            lambda channel: channel.put(0, 0, 0, 16),
            lambda channel: channel.signal(0, 0),
            lambda channel: channel.put_signal(0, 0, 0, 16, 0),
        ):
            with pytest.raises(errors.CommandError, match=r"channel 0 is posted to by kernels .* host posts on 1 to 1"):
                post(comm.channel(0))


def test_what_a_kernel_met_is_raised_once() -> None:
    with make() as comm:
        kernel = Kernel(comm)
        late = lib.UCCL_EP_E_DEADLINE
        kernel.fail(what=lib.UCCL_EP_DEVICE_QUIET, channel=0, ticket=17, seen=12, thread=3 << 32 | 4, status=late)
        with pytest.raises(errors.DeadlineExceeded, match=r"kernel \(3:4\): ticket 17 of channel 0") as raised:
            comm.check_device()
        assert (raised.value.record.channel, raised.value.record.ticket) == (0, 17)
        assert kernel.comm.error_claim[0] == 0
        comm.check_device()


def test_the_record_of_the_failed_command_is_what_is_raised() -> None:
    with make() as comm:
        kernel = Kernel(comm)
        bad = kernel.post(0, Op.SIGNAL, target=7, slot=0, add=1)  # no such rank
        with pytest.raises(errors.CommandError, match="there is no such rank"):
            comm.channel(0).quiet()
        kernel.fail(what=lib.UCCL_EP_DEVICE_QUIET, channel=0, ticket=bad, status=lib.UCCL_EP_E_CLOSED)
        with pytest.raises(errors.CommandError, match="there is no such rank") as raised:
            comm.check_device()
        assert raised.value.name == "E_MALFORMED"
        comm.reset()
        assert kernel.post(0, Op.SIGNAL, slot=0, add=1) == bad + 1
        comm.quiet()
        assert comm.read_signal(0) == 1


def test_without_an_accelerator() -> None:
    with Communicator(SingleProcess(), heap_bytes=1 << 16) as comm:
        assert (comm.info.accelerator, comm.info.device_channels) == ("", 0)
        with pytest.raises(errors.CommandError, match="has no accelerator"):
            comm.device()
        with pytest.raises(errors.CommandError, match="has no accelerator"):
            comm.check_device()
    with pytest.raises(errors.CommandError, match="a device channel needs an accelerator"):
        make(accelerator=None)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        (
            {"accelerator": SimpleNamespace(kind="cpu", device=9, library=Emulation.library)},
            errors.NoDevice,
            "device 9",
        ),
        ({"accelerator": SimpleNamespace(kind="cpu", device=0, library=NOOP)}, errors.NotABackend, "accelerator"),
        ({"accelerator": SimpleNamespace(kind="cpu", device=-1, library=NOOP)}, errors.CommandError, "device"),
        ({"device_channels": 2}, errors.CommandError, "2 device channels of 1"),
        ({"device_channels": -1}, errors.CommandError, "device_channels"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], kind: type[errors.UcclEpError], said: str) -> None:
    with pytest.raises(kind, match=said):
        make(**options)


# ---------------------------------------------------------------------------------------------- heaps of the caller's


class Tensor:
    """As torch's, by the four things that are asked of one."""

    def __init__(self, memory: Any, where: str = "cpu", contiguous: bool = True) -> None:
        self._memory, self._contiguous = np.frombuffer(memory, np.uint8), contiguous
        self.device = SimpleNamespace(type=where)

    def data_ptr(self) -> int:
        return int(self._memory.ctypes.data)

    def numel(self) -> int:
        return self._memory.size // 2

    def element_size(self) -> int:
        return 2

    def is_contiguous(self) -> bool:
        return self._contiguous


def given(heap: Any, **options: Any) -> Communicator:
    return Communicator(SingleProcess(), **{"heap": heap, "backend": NOOP, **options})


@pytest.mark.parametrize("accelerator", [None, Emulation()])
@pytest.mark.parametrize("make_heap", [np.zeros, bytearray, lambda n: mmap.mmap(-1, n), lambda n: Tensor(bytearray(n))])
def test_a_heap_of_the_caller(make_heap: Any, accelerator: Any) -> None:
    heap = make_heap(4080)
    options = {} if accelerator is None else {"accelerator": accelerator, "device_channels": 1}
    with given(heap, **options) as comm:
        view = comm.heap
        assert view.nbytes == comm.info.heap_bytes == (4080 * 8 if isinstance(heap, np.ndarray) else 4080)
        view[5] = 77
        if accelerator:
            assert int(ffi.cast("uintptr_t", Kernel(comm).comm.heap)) == view.ctypes.data
    assert view[5] == 77  # it is the caller's, and stays
    del comm
    if isinstance(heap, np.ndarray):
        assert heap.view(np.uint8)[5] == 77


def test_it_stays_alive_as_long_as_somebody_uses_it() -> None:
    array = np.zeros(4096, np.uint8)
    alive = weakref.ref(array)
    comm = given(array)
    view = comm.heap
    del array
    gc.collect()
    assert alive() is not None
    comm.close()
    del comm
    gc.collect()
    assert alive() is not None
    del view
    gc.collect()
    assert alive() is None


def test_a_part_of_it() -> None:
    array = np.zeros(8192, np.uint8)
    with given(array, heap_bytes=4096) as comm:
        assert comm.heap.nbytes == 4096
    with pytest.raises(errors.CommandError, match="heap_bytes=8193, and the heap that is given has 8192"):
        given(array, heap_bytes=8193)
    with given((array.ctypes.data, 4096)) as comm:
        comm.heap[:] = 3
    assert array.sum() == 3 * 4096


def test_a_buffer_of_host_memory() -> None:
    array = np.zeros(4096, np.uint8)
    buffer = SimpleNamespace(memory="host", array=array, address=1, nbytes=4096)
    with given(buffer, accelerator=Emulation()) as comm:
        assert comm.heap.ctypes.data == array.ctypes.data


@pytest.mark.parametrize(
    ("heap", "said"),
    [
        (b"read only", "writable"),
        (np.zeros((8, 8))[:, :4], "C order"),
        (17, "heap=int: a Buffer of uccl_ep.accel, an array or tensor"),
        ((1, 2, 3, 4), "address, nbytes"),
        (("a", 2), "address, nbytes"),
        ((4096, 4096, "moon"), '"host" or "device"'),
        (Tensor(bytearray(64), contiguous=False), "contiguous"),
        (Tensor(bytearray(64), where="meta"), "neither host memory nor a GPU's"),
        (Tensor(bytearray(64), where="cuda"), "needs accelerator="),
        ((4096, 4096, "device"), "needs accelerator="),
        (
            SimpleNamespace(__cuda_array_interface__={"data": (4096, True), "shape": (4,), "typestr": "|u1"}),
            "must be writable",
        ),
        (np.zeros(0, np.uint8), "a heap of 0 bytes"),
        (None, "heap_bytes, or a heap, is required"),
    ],
)
def test_what_is_no_heap(heap: Any, said: str) -> None:
    with pytest.raises(errors.CommandError, match=said):
        given(heap)


def test_a_pair_with_an_accelerator_says_where_it_is() -> None:
    with pytest.raises(errors.CommandError, match="with an accelerator, say"):
        given((4096, 4096), accelerator=Emulation())


def test_device_memory_that_is_staged(device_memory: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    address, nbytes = device_memory
    memory = (ctypes.c_uint8 * nbytes).from_address(address)  # the emulation's can be looked at
    heap = (address, nbytes, "device")
    with caplog.at_level("INFO", logger="uccl_ep"):
        comm = given(heap, accelerator=Emulation(), backend="shm", staging="on", signals=8)
    with comm:
        assert (comm.info.staged, comm.info.staged_reason, comm.info.heap_kind) == (True, "asked for", "emulated")
        assert comm.info.strategy == "sender_hold_mailbox"
        assert "staged through host memory: asked for" in caplog.text
        assert "heap staged through host memory" in comm.report()
        memory[:64] = [7] * 64
        comm.channel(0).put_signal(0, 0, 4096, 64, 3).wait()
        assert list(memory[4096 : 4096 + 64]) == [7] * 64
        assert comm.read_signal(3) == 1
        (proxy,) = comm.stats()["proxies"]
        assert proxy["staged_out"] == proxy["staged_in"] == 64
    with given(heap, accelerator=Emulation(), backend="shm") as comm:
        assert (comm.info.staged, comm.info.staged_reason) == (False, "")
    with pytest.raises(errors.CommandError, match="no staging named 'maybe'"):
        given(heap, accelerator=Emulation(), staging="maybe")


def test_device_memory_that_the_nic_cannot_have(device_memory: tuple[int, int]) -> None:
    address, nbytes = device_memory
    array = SimpleNamespace(
        __cuda_array_interface__={
            "data": (address, False),
            "shape": (nbytes // 8, 2),
            "typestr": "<u4",
            "strides": None,
        }
    )
    for heap in ((address, nbytes, "device"), SimpleNamespace(memory="device", address=address, nbytes=nbytes), array):
        with pytest.raises(errors.CapabilityError, match="registers no emulated memory, nor dmabuf"):
            given(heap, accelerator=Emulation(), staging="off")
    with pytest.raises(errors.CommandError, match="has emulated memory"):
        given(
            (address, nbytes, "device"), accelerator=SimpleNamespace(kind="cuda", device=0, library=Emulation.library)
        )


def test_signals_in_device_memory_are_for_nics_that_add_there() -> None:
    """The shm backend's adds are the CPU's; what else cannot be is said before a NIC is opened."""
    with accel.open("cpu") as gpu, gpu.alloc(4096) as heap:
        with pytest.raises(errors.CapabilityError, match="take signals in host memory"):
            Communicator(SingleProcess(), heap=heap, accelerator=gpu, signals_memory="device")
        with pytest.raises(errors.CommandError, match="lie beside a heap there"):
            Communicator(SingleProcess(), heap_bytes=4096, accelerator=gpu, signals_memory="device")
        with pytest.raises(errors.CommandError, match="host or device"):
            Communicator(SingleProcess(), heap=heap, accelerator=gpu, signals_memory="gpu")
    with pytest.raises(errors.CommandError, match="need accelerator="):
        Communicator(SingleProcess(), heap_bytes=4096, signals_memory="device")
