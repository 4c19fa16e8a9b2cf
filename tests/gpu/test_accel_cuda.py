# SPDX-License-Identifier: Apache-2.0
"""uccl_ep.accel on a GPU of NVIDIA. Needs the installed wheel, cuda-bindings, NVRTC and pytest: `pytest tests/gpu`.

Every kernel that waits has a limit of its own, so that a test that fails leaves nothing running.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import uccl_ep.accel
from uccl_ep import errors
from uccl_ep.accel import Accelerator, Module

SOURCE = r"""
#include <uccl_ep/device_comm.h>
typedef unsigned long long u64;
struct pair { double scale; unsigned char shift; };

__device__ u64 now() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }

extern "C" __global__ void fill(unsigned *to, unsigned value) {
    to[blockIdx.x * blockDim.x + threadIdx.x] = value + threadIdx.x;
}
extern "C" __global__ void twice(unsigned *to) { to[threadIdx.x] *= 2; }
extern "C" __global__ void arguments(double *to, unsigned char a, short b, float c, pair d, uccl_ep_device_comm comm,
                                     const double *e) {
    *to = a + b + c + d.scale * (1 << d.shift) + comm.rank + comm.timeout_ticks + (e ? *e : 0);
}
extern "C" __global__ void hold(const volatile u64 *go, u64 limit_ns) {
    const u64 begin = now();
    while (!*go && now() - begin < limit_ns) __nanosleep(100);
}
extern "C" __global__ void ticks(u64 *to, u64 duration_ns) {
    const u64 begin = now();
    while (now() - begin < duration_ns) {}
    to[0] = begin; to[1] = now();
}
extern "C" __global__ void answer(volatile u64 *box, u64 limit_ns) {
    const u64 begin = now();
    while (box[0] == 0 && now() - begin < limit_ns) {}
    box[1] = box[0] + 1;
    __threadfence_system();
}
extern "C" __global__ void shared_sum(u64 *to) {
    extern __shared__ u64 words[];
    for (unsigned i = threadIdx.x; i < 12 * 1024; i += blockDim.x) words[i] = i;
    __syncthreads();
    if (threadIdx.x == 0) { u64 sum = 0; for (unsigned i = 0; i < 12 * 1024; i++) sum += words[i]; *to = sum; }
}
extern "C" __global__ void meet(unsigned *count, unsigned blocks, u64 limit_ns) {
    if (threadIdx.x) return;
    const u64 begin = now();
    atomicAdd(count, 1u);
    while (*(volatile unsigned *)count < blocks && now() - begin < limit_ns) {}
    if (*(volatile unsigned *)count < blocks) atomicAdd(count + 1, 1u);
}
extern "C" __global__ void nothing() {}
"""
LIMIT = np.uint64(5 * 10**9)
ABSENT = (errors.MissingPackage, errors.NoDriver, errors.NoDevice)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> uccl_ep.accel.Cache:
    return uccl_ep.accel.Cache(tmp_path_factory.mktemp("cache") / "kernels")


@pytest.fixture(scope="module")
def gpu(cache: uccl_ep.accel.Cache) -> Iterator[Accelerator]:
    try:
        opened = uccl_ep.accel.open("cuda", cache=cache)
    except errors.DriverTooOld:
        raise
    except ABSENT as error:
        pytest.skip(f"no GPU of NVIDIA to be had: {error}")
    with opened:
        yield opened


@pytest.fixture(scope="module")
def module(gpu: Accelerator) -> Module:
    return gpu.compile(SOURCE, "test.cu")


class Pair(ctypes.Structure):
    _fields_ = (("scale", ctypes.c_double), ("shift", ctypes.c_ubyte))


def test_it_describes_itself(gpu: Accelerator) -> None:
    info = gpu.info
    print(info)
    assert info.architecture.startswith("sm_")
    assert info.warp_size == 32
    assert info.multiprocessors > 0
    assert info.memory_bytes > 1 << 30
    assert info.driver.startswith("CUDA ")
    assert len(info.address.split(":")) == 3
    assert info.shared_bytes >= 48 << 10
    with pytest.raises(errors.NoDevice, match="this process sees"):
        uccl_ep.accel.open("cuda", 1000)


@pytest.mark.parametrize("nbytes", [1, 512, 4096, 5000, (1 << 20) + 3, 64 << 20])
def test_memory(gpu: Accelerator, nbytes: int) -> None:
    random = np.random.default_rng(nbytes)
    with gpu.alloc(nbytes) as memory, gpu.alloc(nbytes) as other:
        assert memory.address % 4096 == 0
        assert not memory.numpy().any()
        data = random.integers(0, 256, nbytes, np.uint8)
        memory.copy_from(data)
        other.copy_from(memory)
        assert np.array_equal(other.numpy(), data)
        half = nbytes // 2
        memory.slice(half).zero()
        assert np.array_equal(memory.numpy()[:half], data[:half])
        assert not memory.numpy()[half:].any()


def test_more_memory_than_there_is(gpu: Accelerator) -> None:
    with pytest.raises(errors.OutOfMemory, match="cuMemAlloc"):
        gpu.alloc(1 << 44)
    gpu.alloc(4096).close()


def test_pinned_memory_goes_both_ways_while_a_kernel_runs(gpu: Accelerator, module: Module) -> None:
    with gpu.pinned(16) as box, gpu.stream() as stream:
        words = box.array.view(np.uint64)
        module.kernel("answer").launch(stream, 1, 1, [box, LIMIT])
        assert not stream.done()
        words[0] = 41
        end = time.monotonic() + 5
        while words[1] != 42 and time.monotonic() < end:
            pass
        assert words.tolist() == [41, 42]
        stream.synchronize()


def test_memory_of_the_caller_is_registered_as_often_as_wanted(gpu: Accelerator, module: Module) -> None:
    import mmap

    array = np.frombuffer(mmap.mmap(-1, 8192), np.uint8)
    first = gpu.register(array)
    second = gpu.register(array)
    assert first.address == second.address
    second.close()
    with gpu.stream() as stream:
        module.kernel("fill").launch(stream, 1, 32, [first, np.uint32(7)])
        stream.synchronize()
    assert array.view(np.uint32)[:32].tolist() == list(range(7, 39))
    first.close()


def test_memory_that_cannot_be_registered(gpu: Accelerator) -> None:
    nowhere = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (0,))
    with pytest.raises(errors.CommandError):
        gpu.register(nowhere)
    # Pages that may not be touched.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    address = libc.mmap(None, 4096, 0, 0x22, -1, 0)
    forbidden = np.ctypeslib.as_array((ctypes.c_uint8 * 4096).from_address(address))
    with pytest.raises(errors.RegistrationError, match="CUDA_ERROR"):
        gpu.register(forbidden)


def test_launch(gpu: Accelerator, module: Module) -> None:
    assert module.kernels is not None
    assert {"fill", "hold", "nothing"} <= set(module.kernels)
    with gpu.alloc(4 * 256) as memory, gpu.stream() as stream:
        module.kernel("fill").launch(stream, 4, 64, [memory, np.uint32(100)])
        stream.synchronize()
        assert np.array_equal(memory.numpy(np.uint32), np.tile(np.arange(100, 164, dtype=np.uint32), 4))


def test_arguments_of_every_kind(gpu: Accelerator, module: Module) -> None:
    kernel = module.kernel("arguments")
    assert kernel._sizes is not None
    assert list(kernel._sizes[:5]) == [8, 1, 2, 4, 16]
    comm = bytearray(kernel._sizes[5])
    comm[4:8] = (3).to_bytes(4, "little")
    comm[-8:] = (1000).to_bytes(8, "little")
    with gpu.alloc(8) as result, gpu.pinned(8) as half, gpu.stream() as stream:
        half.array.view(np.float64)[:] = 0.5
        args = [result, np.uint8(200), ctypes.c_short(-7), np.float32(0.25), Pair(1.5, 2), bytes(comm), half]
        kernel.launch(stream, 1, 1, args)
        stream.synchronize()
        assert result.numpy(np.float64)[0] == 200 - 7 + 0.25 + 6 + 3 + 1000 + 0.5
        kernel.launch(stream, 1, 1, [*args[:-1], None])
        stream.synchronize()
        assert result.numpy(np.float64)[0] == 200 - 7 + 0.25 + 6 + 3 + 1000
        with pytest.raises(errors.CommandError, match="argument 1: 1 bytes are wanted"):
            kernel.launch(stream, 1, 1, [result, np.uint32(200), *args[2:]])
        with pytest.raises(errors.CommandError, match="takes 7 arguments, not 1"):
            kernel.launch(stream, 1, 1, [result])


def test_shapes_and_attributes(gpu: Accelerator, module: Module) -> None:
    kernel = module.kernel("shared_sum")
    assert 0 < kernel.attributes.registers <= 255
    assert kernel.attributes.max_threads == 1024
    nbytes = 12 * 1024 * 8  # above the 48 KiB that a kernel gets unasked
    with gpu.alloc(8) as result, gpu.stream() as stream:
        kernel.launch(stream, 1, 256, [result], shared=nbytes)
        stream.synchronize()
        assert result.numpy(np.uint64)[0] == sum(range(12 * 1024))
        assert 1 <= kernel.blocks_per_multiprocessor(256, nbytes) < kernel.blocks_per_multiprocessor(256, 0)
        with pytest.raises(errors.CommandError, match="shared memory"):
            kernel.launch(stream, 1, 1, [result], shared=gpu.info.shared_bytes + 1)
        with pytest.raises(errors.CommandError, match="up to 1024 threads"):
            kernel.launch(stream, 1, 1025, [result])


def test_a_cooperative_launch(gpu: Accelerator, module: Module) -> None:
    kernel = module.kernel("meet")
    blocks = kernel.blocks_per_multiprocessor(128) * gpu.info.multiprocessors
    with gpu.alloc(8) as count, gpu.stream() as stream:
        kernel.launch(stream, blocks, 128, [count, np.uint32(blocks), LIMIT], cooperative=True)
        stream.synchronize()
        assert count.numpy(np.uint32).tolist() == [blocks, 0]
        with pytest.raises(errors.CommandError, match="cannot all run at once"):
            kernel.launch(stream, blocks + 1, 128, [count, np.uint32(blocks), LIMIT], cooperative=True)


def test_a_stream_keeps_order_and_copies_pass_it(gpu: Accelerator, module: Module) -> None:
    with gpu.pinned(8) as go, gpu.alloc(128) as memory, gpu.alloc(64) as elsewhere:
        first, second, third = gpu.stream(), gpu.stream(), gpu.stream()
        module.kernel("hold").launch(first, 1, 1, [go, LIMIT])
        module.kernel("fill").launch(first, 1, 32, [memory, np.uint32(1)])
        for _ in range(3):
            module.kernel("twice").launch(first, 1, 32, [memory])
        point = first.record()
        second.wait(point)
        module.kernel("twice").launch(second, 1, 32, [memory])
        elsewhere.copy_from(np.arange(64, dtype=np.uint8))
        assert elsewhere.numpy().tolist() == list(range(64))
        module.kernel("nothing").launch(third, 1, 1)
        third.synchronize()
        with pytest.raises(errors.DeadlineExceeded, match="not finished after"):
            second.synchronize(timeout=0.05)
        assert not first.done()
        assert not point.done()
        go.array[0] = 1
        second.synchronize()
        assert first.done()
        assert memory.numpy(np.uint32).tolist() == [(1 + i) * 16 for i in range(32)]


def test_time(gpu: Accelerator, module: Module) -> None:
    """Events, the clock that device.h reads, and this machine's clock agree."""
    with gpu.alloc(16) as words, gpu.stream() as stream:
        module.kernel("nothing").launch(stream, 1, 1)
        stream.synchronize()
        before = time.monotonic()
        begin = stream.record()
        module.kernel("ticks").launch(stream, 1, 1, [words, np.uint64(50 * 10**6)])
        end = stream.record()
        end.synchronize()
        elapsed = time.monotonic() - before
        first, last = words.numpy(np.uint64).tolist()
        ticked = (last - first) / gpu.info.clock_hz
        assert 0.05 <= ticked <= end.seconds_since(begin) * 1.05
        assert end.seconds_since(begin) <= elapsed * 1.05


def test_streams_from_outside(gpu: Accelerator, module: Module) -> None:
    with gpu.alloc(128) as memory, gpu.stream() as own:
        for external in (own, own.__cuda_stream__()[1], 0):
            module.kernel("fill").launch(gpu.stream(external), 1, 32, [memory, np.uint32(5)])
            gpu.stream(external).synchronize()
            assert memory.numpy(np.uint32).tolist() == list(range(5, 37))
            memory.zero()


@pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
def test_torch(gpu: Accelerator, module: Module) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("this torch sees no GPU")
    tensor = torch.zeros(32, dtype=torch.int32, device=f"cuda:{gpu.device}")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        stream = gpu.stream(torch.cuda.current_stream())
        assert stream.handle == side.cuda_stream
        module.kernel("fill").launch(stream, 1, 32, [tensor, np.uint32(5)])
        tensor += 1
    stream.synchronize()
    assert tensor.tolist() == list(range(6, 38))
    with gpu.alloc(128) as memory:
        seen = torch.as_tensor(memory, device=f"cuda:{gpu.device}")
        assert seen.data_ptr() == memory.address
        seen.fill_(3)
        torch.cuda.synchronize()
        assert memory.numpy().tolist() == [3] * 128


def test_the_context_of_the_thread_stays(gpu: Accelerator, module: Module) -> None:
    from cuda.bindings import driver

    def current() -> int:
        _, context = driver.cuCtxGetCurrent()
        return int(context)

    seen: list[int] = []

    def work() -> None:
        seen.append(current())
        with gpu.alloc(128) as memory, gpu.stream() as stream:
            module.kernel("fill").launch(stream, 1, 32, [memory, np.uint32(5)])
            stream.synchronize()
        seen.append(current())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0, 0]


def test_threads(gpu: Accelerator, module: Module) -> None:
    kernel = module.kernel("fill")
    memories = [gpu.alloc(256) for _ in range(8)]

    def work(number: int) -> None:
        with gpu.stream() as stream:
            for _ in range(50):
                kernel.launch(stream, 2, 32, [memories[number], np.uint32(number)])
            stream.synchronize()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, memory in enumerate(memories):
        assert memory.numpy(np.uint32)[:32].tolist() == list(range(number, number + 32))


def test_a_dmabuf(gpu: Accelerator) -> None:
    for nbytes in (4096, 12288, 4 << 20):
        with gpu.alloc(nbytes) as memory:
            if not gpu.info.dmabuf:
                with pytest.raises(errors.Unsupported):
                    memory.dmabuf()
                continue
            descriptor = memory.dmabuf()
            assert "dmabuf" in os.readlink(f"/proc/self/fd/{descriptor}")
            os.close(descriptor)


def test_a_compile_error(gpu: Accelerator) -> None:
    with pytest.raises(errors.CompileError, match=r"bad\.cu\(1\)"):
        gpu.compile("int a = undeclared_thing;", "bad.cu")
    with pytest.raises(errors.CommandError, match=r"no kernel 'full'; known: .*did you mean 'fill'"):
        gpu.compile(SOURCE, "test.cu").kernel("full")


def test_a_cached_kernel_is_the_same(
    gpu: Accelerator, cache: uccl_ep.accel.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    from uccl_ep.accel import cuda

    gpu.compile(SOURCE, "test.cu")

    def refuse(*arguments: Any) -> bytes:
        raise AssertionError("it is compiled again")

    monkeypatch.setattr(cuda.Nvrtc, "compile", refuse)
    with uccl_ep.accel.open("cuda", cache=cache) as again, again.alloc(128) as memory, again.stream() as stream:
        again.compile(SOURCE, "test.cu").kernel("fill").launch(stream, 1, 32, [memory, np.uint32(0)])
        stream.synchronize()
        assert memory.numpy(np.uint32).tolist() == list(range(32))


PROGRAM = """
import sys
import numpy as np
import uccl_ep.accel
from uccl_ep import errors
gpu = uccl_ep.accel.open("cuda", cache=False)
module = gpu.compile(open(sys.argv[1]).read(), "test.cu")
stream, memory = gpu.stream(), gpu.alloc(128)
"""


def program(tmp_path: Path, text: str, **environment: str) -> str:
    (tmp_path / "test.cu").write_text(SOURCE)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + text, str(tmp_path / "test.cu")], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, **environment}, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_kernel_that_fails(gpu: Accelerator, tmp_path: Path) -> None:
    """It costs the process its context: in one of its own."""
    text = """
module.kernel("fill").launch(stream, 1, 32, [None, np.uint32(5)])
try:
    stream.synchronize()
except errors.AcceleratorError as error:
    print(error.record.vendor_code, "CUDA_ERROR_ILLEGAL_ADDRESS" in str(error))
try:
    gpu.close()
except errors.UcclEpError:
    pass
"""
    assert program(tmp_path, text) == "700 True\n"


@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_the_first_launch_does_not_wait_for_a_kernel_that_spins(gpu: Accelerator, tmp_path: Path, loading: str) -> None:
    text = """
go, other = gpu.pinned(8), gpu.stream()
fill = module.kernel("fill")
module.kernel("hold").launch(stream, 1, 1, [go, np.uint64(5 * 10**9)])
fill.launch(other, 1, 32, [memory, np.uint32(5)])
other.synchronize(timeout=2)
print(stream.done())
go.array[0] = 1
stream.synchronize()
print(memory.numpy(np.uint32)[0])
"""
    assert program(tmp_path, text, CUDA_MODULE_LOADING=loading) == "False\n5\n"


def test_the_example(gpu: Accelerator, tmp_path: Path) -> None:
    """A kernel puts, another one waits: examples/kernel_put.py."""
    done = subprocess.run(
        [sys.executable, Path(__file__).parents[2] / "examples/kernel_put.py", "cuda"], cwd=tmp_path,
        env={**os.environ, "UCCL_EP_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{gpu.info.name}: 4096 bytes, put and signalled by a kernel" in done.stdout


def test_our_own_kernels(gpu: Accelerator) -> None:
    from uccl_ep import paths

    for path in paths.kernels_dir().glob("*.cu"):
        kernels = gpu.own(path.stem).kernels
        assert kernels
        for name in kernels:
            assert gpu.own(path.stem).kernel(name).attributes.max_threads >= 32
