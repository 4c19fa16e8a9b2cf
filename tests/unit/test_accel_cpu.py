# SPDX-License-Identifier: Apache-2.0
"""uccl_ep.accel on the CPU, from source to result."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import uccl_ep.accel
from uccl_ep import errors
from uccl_ep.accel import Accelerator

SOURCE = """
#include <uccl_ep/device_platform.h>
using namespace uccl_ep::platform;

struct pair {
    double scale;
    unsigned char shift;
};

UCCL_EP_KERNEL void fill(unsigned *to, unsigned value) {
    to[block() * threads() + thread()] = value + thread();
}
UCCL_EP_KERNEL void arguments(double *to, unsigned char a, short b, float c, const pair d, uccl_ep_device_comm comm,
                              const double *e) {
    to[block()] = a + b + c + d.scale * (1 << d.shift) + comm.rank + comm.timeout_ticks + (e ? *e : 0);
}
UCCL_EP_KERNEL void twice(unsigned *to) {
    to[thread()] *= 2;
}
UCCL_EP_KERNEL void hold(const uccl_ep_u64 *go) {
    while (!load_acquire_system(go)) relax();
}
UCCL_EP_KERNEL void widths(unsigned *to) {
    to[thread()] = (unsigned)width() * 1000 + (unsigned)lane();
}
UCCL_EP_KERNEL void never_meet() {
    if (lane() == 0) sync_warp(3);
    if (lane() == 1) sync_block();
}
UCCL_EP_KERNEL void shared_sum(uccl_ep_u64 *to) {
    uccl_ep_u64 *words = static_cast<uccl_ep_u64 *>(dynamic_shared());
    words[thread()] = thread();
    sync_block();
    if (thread() == 0)
        for (unsigned i = 0; i < threads(); i++) to[block()] += words[i];
}
UCCL_EP_KERNEL void linger(const uccl_ep_u64 *host, const uccl_ep_u64 *device, uccl_ep_u64 ns, uccl_ep_u64 *sum) {
    uccl_ep_u64 seen = 0;
    for (const uccl_ep_u64 begin = clock(); clock() - begin < ns; relax())
        for (unsigned i = 0; i < 1 << 17; i += 512) seen += host[i] + device[i];
    store_release_system(sum, seen + 1);
}
UCCL_EP_KERNEL void nothing() {}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cache(folder: Path) -> uccl_ep.accel.Cache:
    """One for all tests: the source is compiled once."""
    return uccl_ep.accel.Cache(folder / "kernels")


@pytest.fixture
def cpu(cache: uccl_ep.accel.Cache) -> Iterator[Accelerator]:
    with uccl_ep.accel.open("cpu", cache=cache) as accelerator:
        yield accelerator


class Pair(ctypes.Structure):
    _fields_ = (("scale", ctypes.c_double), ("shift", ctypes.c_ubyte))


def test_it_describes_itself(cpu: Accelerator) -> None:
    assert (cpu.kind, cpu.info.kind, cpu.device, cpu.info.warp_size) == ("cpu", "cpu", 0, 32)
    assert cpu.info.clock_hz == 10**9
    assert cpu.library.is_file()


def test_a_kernel_fills_memory(cpu: Accelerator) -> None:
    module = cpu.compile(SOURCE, "test.cu")
    assert module.kernels is not None
    assert {"fill", "nothing", "never_meet"} <= set(module.kernels)
    with cpu.alloc(4 * 256) as memory:
        stream = cpu.stream()
        module.kernel("fill").launch(stream, 4, (16, 2, 2), [memory, np.uint32(100)])
        stream.synchronize()
        expected = np.tile(np.arange(100, 164, dtype=np.uint32), 4)
        assert np.array_equal(memory.numpy(np.uint32), expected)


def test_arguments_of_every_kind(cpu: Accelerator) -> None:
    kernel = cpu.compile(SOURCE, "test.cu").kernel("arguments")
    result, one = cpu.alloc(64), cpu.pinned(8)
    one.array.view(np.float64)[:] = 0.5
    comm = bytearray(kernel._sizes[5] if kernel._sizes else 0)
    comm[4:8] = (3).to_bytes(4, "little")  # rank
    comm[-8:] = (1000).to_bytes(8, "little")  # timeout_ticks
    pair = np.zeros(1, np.dtype([("scale", "f8"), ("shift", "u1")], align=True))[0]
    pair["scale"], pair["shift"] = 1.5, 2

    class Tensor:  # as torch's
        def data_ptr(self) -> int:
            return one.address

    stream = cpu.stream()
    for block, (given, last) in enumerate(((Pair(1.5, 2), one), (bytes(Pair(1.5, 2)), None), (pair, Tensor()))):
        part = result.slice(8 * block)
        args = [part, np.uint8(200), ctypes.c_short(-7), np.float32(0.25), given, bytes(comm), last]
        kernel.launch(stream, 1, 1, args)
    stream.synchronize()
    without = 200 - 7 + 0.25 + 6 + 3 + 1000
    assert result.numpy(np.float64)[:3].tolist() == [without + 0.5, without, without + 0.5]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "takes 2 arguments, not 0"),
        ([None, np.uint32(1), None], "takes 2 arguments, not 3"),
        ([None, np.uint64(1)], "argument 1: 4 bytes are wanted, and uint64 has 8"),
        ([None, 1], r"argument 1: 1 has no size: say which, as numpy\.uint32\(1\)"),
        ([None, 1.0], "no size"),
        ([None, "text"], "a str is no kernel argument"),
        ([np.uint32(1), None], "argument 0: 8 bytes are wanted"),
    ],
)
def test_arguments_that_do_not_fit(cpu: Accelerator, args: list[object], text: str) -> None:
    kernel = cpu.compile(SOURCE, "test.cu").kernel("fill")
    with pytest.raises(errors.CommandError, match=f"kernel fill.*{text}"):
        kernel.launch(cpu.stream(), 1, 1, args)


@pytest.mark.parametrize(
    ("grid", "block"), [(0, 1), (1, 0), (1, 1025), (1, (32, 33)), ((1, 1, 1, 1), 1), (1.0, 1), ((), 1), (-1, 1)]
)
def test_shapes_that_do_not_fit(cpu: Accelerator, grid: object, block: object) -> None:
    kernel = cpu.compile(SOURCE, "test.cu").kernel("nothing")
    with pytest.raises(errors.CommandError, match="kernel nothing"):
        kernel.launch(cpu.stream(), grid, block)  # type: ignore[arg-type]


@pytest.mark.parametrize("warp_size", [1, 32, 64])
def test_warps(warp_size: int, cache: uccl_ep.accel.Cache) -> None:
    with uccl_ep.accel.open("cpu", warp_size=warp_size, cache=cache) as cpu:
        memory, stream = cpu.alloc(4 * 100), cpu.stream()
        cpu.compile(SOURCE, "test.cu").kernel("widths").launch(stream, 1, 100, [memory])
        stream.synchronize()
        expected = [warp_size * 1000 + thread % warp_size for thread in range(100)]
        assert memory.numpy(np.uint32).tolist() == expected


def test_a_seed_draws_the_order_of_lanes(cache: uccl_ep.accel.Cache) -> None:
    """The same seed is the same order; zero is theirs."""
    source = """
    #include <uccl_ep/device_platform.h>
    using namespace uccl_ep::platform;
    UCCL_EP_KERNEL void order(unsigned *count, unsigned *place) { relax(); place[thread()] = (*count)++; }
    """

    def order(seed: int) -> list[int]:
        with uccl_ep.accel.open("cpu", seed=seed, cache=cache) as cpu:
            memory, stream = cpu.alloc(4 * 33), cpu.stream()
            cpu.compile(source, "order.cu").kernel("order").launch(stream, 1, 32, [memory, memory.slice(4)])
            stream.synchronize()
            found: list[int] = memory.numpy(np.uint32)[1:].tolist()
            return found

    assert order(0) == list(range(32))
    assert order(5) == order(5)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1
    assert sorted(order(5)) == list(range(32))


def test_shared_memory(cpu: Accelerator) -> None:
    memory, stream = cpu.alloc(16), cpu.stream()
    kernel = cpu.compile(SOURCE, "test.cu").kernel("shared_sum")
    kernel.launch(stream, 2, 64, [memory], shared=64 * 8)
    stream.synchronize()
    assert memory.numpy(np.uint64).tolist() == [2016, 2016]
    with pytest.raises(errors.CommandError, match="shared memory"):
        kernel.launch(stream, 1, 1, [memory], shared=(1 << 20) + 1)


def test_a_launch_does_not_wait_and_a_stream_keeps_order(cpu: Accelerator) -> None:
    module = cpu.compile(SOURCE, "test.cu")
    go, memory, first, second = cpu.pinned(8), cpu.alloc(4 * 32), cpu.stream(), cpu.stream()
    module.kernel("hold").launch(first, 1, 1, [go])
    module.kernel("fill").launch(first, 1, 32, [memory, np.uint32(1)])
    for _ in range(3):
        module.kernel("twice").launch(first, 1, 32, [memory])
    point = first.record()
    second.wait(point)
    module.kernel("twice").launch(second, 1, 32, [memory])
    # The first kernel spins: copies pass it, another stream does, and a wait for it ends.
    memory.zero()
    third = cpu.stream()
    module.kernel("nothing").launch(third, 1, 1)
    third.synchronize()
    assert not first.done()
    assert not point.done()
    with pytest.raises(errors.DeadlineExceeded):
        second.synchronize(timeout=0.02)
    assert not memory.numpy().any()
    go.array[0] = 1
    second.synchronize()
    assert first.done()
    assert memory.numpy(np.uint32).tolist() == [(1 + i) * 16 for i in range(32)]


def test_time_between_events(cpu: Accelerator) -> None:
    module, stream, go = cpu.compile(SOURCE, "test.cu"), cpu.stream(), cpu.pinned(8)
    begin = stream.record()
    begin.synchronize()
    module.kernel("hold").launch(stream, 1, 1, [go])
    end = stream.record()
    with pytest.raises(errors.CommandError, match="not done"):
        end.seconds_since(begin)
    before = time.monotonic()
    while time.monotonic() - before < 0.02:
        assert not end.done()
    go.array[0] = 1
    end.synchronize()
    assert end.seconds_since(begin) >= 0.02


def test_lanes_that_never_meet_come_out_of_synchronize(cpu: Accelerator) -> None:
    module, stream = cpu.compile(SOURCE, "test.cu"), cpu.stream()
    module.kernel("never_meet").launch(stream, 1, 32)
    for _ in range(2):  # it stays so
        with pytest.raises(errors.UcclEpError, match=r"kernel never_meet: .*lane") as caught:
            stream.synchronize()
    print(caught.value)
    memory = cpu.alloc(4)
    module.kernel("fill").launch(stream, 1, 1, [memory, np.uint32(1)])
    point = stream.record()
    point.synchronize()  # the stream ends what it was given, and does none of it
    assert memory.numpy(np.uint32).tolist() == [0]
    other = cpu.stream()
    module.kernel("fill").launch(other, 1, 1, [memory, np.uint32(1)])
    other.synchronize()
    assert memory.numpy(np.uint32).tolist() == [1]


def test_memory_stays_while_a_kernel_uses_it(cache: uccl_ep.accel.Cache) -> None:
    """Whoever closes it, and in whatever order: a GPU's driver would wait."""
    with uccl_ep.accel.open("cpu", cache=cache) as cpu:
        host, device, stream = cpu.pinned(1 << 20), cpu.alloc(1 << 20), cpu.stream()
        result = np.zeros(1, np.uint64)
        kernel = cpu.compile(SOURCE, "test.cu").kernel("linger")
        kernel.launch(stream, 1, 1, [host, device, np.uint64(50 * 10**6), np.uint64(result.ctypes.data)])
        stream.close()
        device.close()
        host.close()
    del host, device, stream, kernel, cpu
    gc.collect()
    end = time.monotonic() + 30
    while not result[0] and time.monotonic() < end:
        time.sleep(0.001)
    assert result[0] == 1


def test_an_accelerator_that_nobody_holds_is_gone(cache: uccl_ep.accel.Cache) -> None:
    before = threading.active_count()
    cpu = uccl_ep.accel.open("cpu", cache=cache)
    memory = cpu.alloc(4096)
    del cpu
    gc.collect()
    assert not memory.numpy().any()  # it holds it
    del memory
    gc.collect()
    end = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.001)
    assert threading.active_count() <= before


def test_threads_launch_at_the_same_time(cpu: Accelerator) -> None:
    kernel = cpu.compile(SOURCE, "test.cu").kernel("fill")
    memories = [cpu.alloc(4 * 64) for _ in range(8)]

    def work(number: int) -> None:
        stream = cpu.stream()
        for _ in range(20):
            kernel.launch(stream, 2, 32, [memories[number], np.uint32(number)])
        stream.synchronize()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, memory in enumerate(memories):
        assert memory.numpy(np.uint32)[:32].tolist() == list(range(number, number + 32))


def test_what_does_not_fit_memory(cpu: Accelerator) -> None:
    memory = cpu.alloc(100)
    assert memory.address % 4096 == 0
    for use in (
        lambda: memory.copy_from(np.zeros(101, np.uint8)),
        lambda: memory.copy_from(np.zeros(1, np.uint8), offset=100),
        lambda: memory.copy_from(np.zeros(1, np.uint8), offset=-1),
        lambda: memory.copy_to(np.zeros(101, np.uint8)),
        lambda: memory.slice(50, 51),
        lambda: memory.slice(101),
        lambda: memory.copy_to(np.zeros((10, 10), np.uint8)[:, ::2]),
        lambda: memory.numpy(np.float64),
        lambda: cpu.alloc(0),
        lambda: cpu.alloc(-5),
        lambda: cpu.register(np.empty(0, np.uint8)),
    ):
        with pytest.raises(errors.CommandError):
            use()
    with pytest.raises(errors.Unsupported, match="copy_to"):
        _ = memory.array
    with pytest.raises(errors.RegistrationError, match="whole pages"):
        cpu.register(np.zeros(100, np.uint8))
    with pytest.raises(AttributeError):
        _ = memory.__cuda_array_interface__


def test_more_memory_than_there_is(cpu: Accelerator) -> None:
    with pytest.raises(errors.OutOfMemory):
        cpu.alloc(1 << 50)


def test_a_part_is_of_the_same_memory(cpu: Accelerator) -> None:
    memory = cpu.alloc(4096)
    part = memory.slice(1024, 1024).slice(512)
    assert (part.address, len(part)) == (memory.address + 1536, 512)
    part.copy_from(np.full(512, 3, np.uint8))
    assert memory.numpy().nonzero()[0].tolist() == list(range(1536, 2048))
    del memory
    gc.collect()
    assert part.numpy().tolist() == [3] * 512  # it keeps the whole
    part.close()
    with pytest.raises(errors.ChannelClosed):
        part.numpy()


def test_a_view_of_pinned_memory_outlives_it(cpu: Accelerator) -> None:
    pinned = cpu.pinned(5000)
    view = pinned.slice(10, 20).array
    pinned.array[:] = 9
    pinned.close()
    assert view.tolist() == [9] * 20
    view[:] = 1
    with pytest.raises(errors.ChannelClosed):
        _ = pinned.array


def test_a_dmabuf(cpu: Accelerator) -> None:
    memory = cpu.alloc(8192)
    if not cpu.info.dmabuf:
        with pytest.raises(errors.Unsupported):
            memory.dmabuf()
        return
    import mmap
    import os

    memory.copy_from(np.arange(8192, dtype=np.uint16).view(np.uint8)[:8192])
    descriptor = memory.dmabuf()
    with mmap.mmap(descriptor, 8192) as seen:
        assert seen[:8192] == memory.numpy().tobytes()
    os.close(descriptor)
    with pytest.raises(errors.Unsupported, match="host memory"):
        cpu.pinned(4096).dmabuf()


def test_streams_of_others_are_refused(cpu: Accelerator, cache: uccl_ep.accel.Cache) -> None:
    with pytest.raises(errors.Unsupported, match="no streams but its own"):
        cpu.stream(5)
    with uccl_ep.accel.open("cpu", cache=cache) as other:
        with pytest.raises(errors.CommandError, match="another accelerator"):
            cpu.stream(other.stream())
        kernel = cpu.compile(SOURCE, "test.cu").kernel("nothing")
        with pytest.raises(errors.CommandError, match="another accelerator"):
            kernel.launch(other.stream(), 1, 1)
    own = cpu.stream()
    assert cpu.stream(own).handle is own.handle


def test_what_cannot_be_opened() -> None:
    with pytest.raises(errors.CommandError, match="did you mean 'cuda'"):
        uccl_ep.accel.open("cudo")
    with pytest.raises(errors.CommandError, match="warps of 16"):
        uccl_ep.accel.open("cpu", warp_size=16)
    with pytest.raises(errors.NoDevice):
        uccl_ep.accel.open("cpu", 1000)
    with pytest.raises(errors.CommandError, match="emulation's"):
        uccl_ep.accel.open("cuda", warp_size=64)


def test_a_cached_kernel_is_the_same(cpu: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu.compile(SOURCE, "test.cu")
    monkeypatch.setenv("PATH", "")  # no compiler any more
    module = cpu.compile(SOURCE, "test.cu")
    memory, stream = cpu.alloc(4 * 32), cpu.stream()
    module.kernel("fill").launch(stream, 1, 32, [memory, np.uint32(0)])
    stream.synchronize()
    assert memory.numpy(np.uint32).tolist() == list(range(32))


def test_two_modules_do_not_see_each_other(cpu: Accelerator) -> None:
    """The same names in both, also of what is not static, and of what the loader keeps once for a process."""
    source = """
    #include <uccl_ep/device_platform.h>
    unsigned value() { return VALUE; }
    UCCL_EP_DEVICE unsigned count() { static unsigned calls; return ++calls; }
    UCCL_EP_KERNEL void put(unsigned *to) { *to = value() * count(); }
    UCCL_EP_EMULATION_ENTRY(put)
    """
    modules = [cpu.compile(source, "test.cu", [f"-DVALUE={value}"]) for value in (1, 2)]
    memory, stream = cpu.alloc(8), cpu.stream()
    for index, module in enumerate(modules):
        module.kernel("put").launch(stream, 1, 1, [memory.slice(4 * index)])
    stream.synchronize()
    assert memory.numpy(np.uint32).tolist() == [1, 2]


def test_a_kernel_may_have_a_name_of_libc(cpu: Accelerator) -> None:
    source = """
    #include <uccl_ep/device_platform.h>
    UCCL_EP_KERNEL void send(unsigned *to) { *to = 7; }
    """
    memory, stream = cpu.alloc(4), cpu.stream()
    cpu.compile(source, "test.cu").kernel("send").launch(stream, 1, 1, [memory])
    stream.synchronize()
    assert memory.numpy(np.uint32).tolist() == [7]


def test_a_function_that_is_nowhere(cpu: Accelerator) -> None:
    source = """
    #include <uccl_ep/device_platform.h>
    unsigned nowhere();
    UCCL_EP_KERNEL void put(unsigned *to) { *to = nowhere(); }
    """
    with pytest.raises(errors.CompileError, match=r"test\.cu does not link.*nowhere"):
        cpu.compile(source, "test.cu")
