# SPDX-License-Identifier: Apache-2.0
"""The calls of CUDA's driver, without one: a driver of paper, whose memory is the host's.

It takes only what the real bindings take: each call is made on them too, with the same arguments. They convert them
first, and then find that there is no libcuda here, which is the answer wanted.
"""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import uccl_ep.accel
from uccl_ep import errors

pytestmark = [
    pytest.mark.required_in_ci,
    pytest.mark.skipif(not find_spec("cuda"), reason="pip install 'uccl_ep[cuda]'"),
    # With a driver the calls that are made on the bindings would be real.
    pytest.mark.skipif(any(os.path.exists(f"/dev/nvidia{end}") for end in ("0", "ctl")), reason="there is a real one"),
]

KERNEL = 'extern "C" __global__ void fill(unsigned *p, unsigned value) { p[threadIdx.x] = value; }\n'
PARAMETERS = (8, 4)
ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0, "WARP_SIZE": 32, "MULTIPROCESSOR_COUNT": 132,
    "MAX_THREADS_PER_BLOCK": 1024, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448, "GPU_DIRECT_RDMA_WRITES_ORDERING": 100,
    "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS": 1, "DMA_BUF_SUPPORTED": 1, "HOST_NATIVE_ATOMIC_SUPPORTED": 0,
    "COOPERATIVE_LAUNCH": 1, "HOST_NUMA_ID": 0,
}  # fmt: skip


class PaperDriver:
    """cuda.bindings.driver in its place. `fail`: by a call's name, how it ends; `pending`: looks at a stream that say
    that it is not ready."""

    def __init__(self) -> None:
        import cuda.bindings.driver as real

        self.real: Any = real
        self.version = 13000
        self.devices = 1
        self.fail: dict[str, str] = {}
        self.pending = 0
        self.contexts: list[Any] = []
        self.memory: dict[int, Any] = {}
        self.registered: set[int] = set()
        self.calls: list[str] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.real, name)
        if not name.startswith("cu") or isinstance(found, type):
            return found
        answer = getattr(self, f"_{name}", None)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            with pytest.raises(RuntimeError, match=r"libcuda|NVIDIA driver"):
                found(*arguments)
            if name in self.fail:
                nothing = 0 if name in ("cuInit", "cuStreamQuery", "cuMemHostRegister", "cuMemFree") else 1
                return (getattr(real_results, f"CUDA_ERROR_{self.fail[name]}"), *[None] * nothing)
            given = () if answer is None else answer(*arguments)
            if given and isinstance(given[0], real_results):
                return tuple(given)
            return (real_results.CUDA_SUCCESS, *given)

        real_results = self.real.CUresult
        return call

    # What is not here succeeds and gives nothing.
    def _cuDriverGetVersion(self) -> Any:
        return (self.version,)

    def _cuDeviceGetCount(self) -> Any:
        return (self.devices,)

    def _cuDeviceGet(self, index: int) -> Any:
        return (self.real.CUdevice(index),)

    def _cuDeviceGetName(self, length: int, device: Any) -> Any:
        return (b"Paper" + bytes(length - 5),)

    def _cuDeviceGetPCIBusId(self, length: int, device: Any) -> Any:
        return (b"0000:1B:00.0" + bytes(length - 12),)

    def _cuDeviceTotalMem(self, device: Any) -> Any:
        return (1 << 37,)

    def _cuDeviceGetAttribute(self, which: Any, device: Any) -> Any:
        return (ATTRIBUTES[which.name.removeprefix("CU_DEVICE_ATTRIBUTE_")],)

    def _cuGetErrorString(self, code: Any) -> Any:
        return (f"text of {int(code)}".encode(),)

    def _cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        return (self.real.CUcontext(7),)

    def _cuCtxPushCurrent(self, context: Any) -> Any:
        self.contexts.append(context)
        return ()

    def _cuCtxPopCurrent(self) -> Any:
        return (self.contexts.pop(),)

    def _inside(self) -> None:
        assert self.contexts, "called outside the context"

    def _cuMemAlloc(self, nbytes: int) -> Any:
        self._inside()
        # As the driver: aligned to 512, not to pages.
        block = ctypes.create_string_buffer(nbytes + 8192)
        address = (ctypes.addressof(block) + 4095) // 4096 * 4096 + 512
        self.memory[address] = block
        return (self.real.CUdeviceptr(address),)

    def _cuMemFree(self, address: Any) -> Any:
        self._inside()
        del self.memory[int(address)]
        return ()

    def _cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> Any:
        self._inside()
        assert flags == 3
        if address in self.registered:
            return (self.real.CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,)
        self.registered.add(address)
        return ()

    def _cuMemHostUnregister(self, address: int) -> Any:
        self._inside()
        self.registered.remove(address)
        return ()

    def _cuMemHostGetDevicePointer(self, address: int, flags: int) -> Any:
        self._inside()
        return (self.real.CUdeviceptr(address),)

    def _cuMemcpyAsync(self, to: int, source: int, nbytes: int, stream: int) -> Any:
        self._inside()
        assert stream == 100
        ctypes.memmove(to, source, nbytes)
        return ()

    def _cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: int) -> Any:
        self._inside()
        ctypes.memset(address, value, nbytes)
        return ()

    def _cuMemGetHandleForAddressRange(self, address: int, nbytes: int, kind: Any, flags: int) -> Any:
        assert address % 4096 == nbytes % 4096 == 0
        return (33,)

    def _cuStreamCreate(self, flags: Any) -> Any:
        assert flags == self.real.CUstream_flags.CU_STREAM_NON_BLOCKING
        return (self.real.CUstream(100),)

    def _cuStreamQuery(self, stream: int) -> Any:
        self._inside()
        if self.pending > 0:
            self.pending -= 1
            return (self.real.CUresult.CUDA_ERROR_NOT_READY,)
        return ()

    def _cuEventCreate(self, flags: Any) -> Any:
        return (self.real.CUevent(len(self.calls)),)

    def _cuEventElapsedTime(self, begin: int, end: int) -> Any:
        return (1500.0,)

    def _cuModuleLoadData(self, image: int) -> Any:
        assert ctypes.string_at(image, 4) == b"\x7fELF"
        return (self.real.CUmodule(9),)

    def _cuModuleGetFunctionCount(self, module: Any) -> Any:
        return (1,)

    def _cuModuleEnumerateFunctions(self, count: int, module: Any) -> Any:
        return ([self.real.CUfunction(11)],)

    def _cuModuleGetFunction(self, module: Any, name: bytes) -> Any:
        if name != b"fill":
            return (self.real.CUresult.CUDA_ERROR_NOT_FOUND, None)
        return (self.real.CUfunction(11),)

    def _cuFuncGetName(self, function: Any) -> Any:
        return (b"fill",)

    def _cuFuncGetParamInfo(self, function: Any, index: int) -> Any:
        if index >= len(PARAMETERS):
            return (self.real.CUresult.CUDA_ERROR_INVALID_VALUE, None, None)
        return (0, PARAMETERS[index])

    def _cuFuncGetAttribute(self, which: Any, function: Any) -> Any:
        return ({"NUM_REGS": 16, "MAX_THREADS_PER_BLOCK": 512}.get(which.name.removeprefix("CU_FUNC_ATTRIBUTE_"), 0),)

    def _cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function: Any, threads: int, shared: int) -> Any:
        return (2048 // threads,)

    def _cuLaunchKernel(self, function: Any, *rest: Any) -> Any:
        self._inside()
        *shape, shared, stream, arguments, extra = rest
        assert extra == 0
        pointers = (ctypes.c_void_p * len(PARAMETERS)).from_address(arguments)
        values = [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, PARAMETERS, strict=True)]
        self.launched.append((int(function), shape, shared, stream, values))
        return ()

    def _cuLaunchCooperativeKernel(self, *rest: Any) -> Any:
        return self._cuLaunchKernel(*rest, 0)


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> PaperDriver:
    driver = PaperDriver()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)  # type: ignore[arg-type]
    return driver


def test_it_describes_the_device(paper: PaperDriver) -> None:
    with uccl_ep.accel.open("cuda", cache=False) as gpu:
        info = gpu.info
    assert (info.name, info.architecture, info.warp_size, info.multiprocessors) == ("Paper", "sm_90", 32, 132)
    assert (info.writes_ordering, info.can_flush, info.dmabuf, info.host_atomics) == ("ordered", True, True, False)
    assert (info.address, info.driver, info.memory_bytes) == ("0000:1B:00.0", "CUDA 13.0", 1 << 37)
    assert paper.calls[-1] == "cuDevicePrimaryCtxRelease"
    assert not paper.contexts


def test_memory(paper: PaperDriver) -> None:
    with uccl_ep.accel.open("cuda", cache=False) as gpu:
        buffer = gpu.alloc(5000)
        assert buffer.address % 4096 == 0  # a NIC registers pages
        assert not buffer.numpy().any()
        buffer.copy_from(np.arange(10, dtype=np.uint32), offset=16)
        assert buffer.slice(16, 40).numpy(np.uint32).tolist() == list(range(10))
        assert gpu.alloc(8192).dmabuf() == 33
        with pytest.raises(errors.CommandError, match="pages"):
            buffer.dmabuf()
        assert buffer.__cuda_array_interface__["data"] == (buffer.address, False)
        pinned = gpu.pinned(100)
        pinned.array[:] = 7
        buffer.copy_from(pinned)
        assert buffer.numpy()[:101].tolist() == [7] * 100 + [0]
        # Registered again, it is given back as often.
        pages = np.ctypeslib.as_array((ctypes.c_uint8 * 4096).from_address(pinned.address))
        gpu.register(pages).close()
        assert paper.registered == {pinned.address}
    assert not paper.memory
    assert not paper.registered
    assert pinned.closed


def test_launch(paper: PaperDriver) -> None:
    with uccl_ep.accel.open("cuda", cache=False) as gpu:
        module = gpu.compile(KERNEL, "k.cu")
        assert "cuFuncLoad" in paper.calls  # nothing is left to be loaded at the first launch
        assert module.kernels == ["fill"]
        kernel = module.kernel("fill")
        assert (kernel.attributes.registers, kernel.attributes.max_threads) == (16, 512)
        stream, buffer = gpu.stream(), gpu.alloc(4096)
        kernel.launch(stream, (3, 2), 64, [buffer, np.uint32(5)], shared=100)
        address = buffer.address.to_bytes(8, "little")
        assert paper.launched == [(11, [3, 2, 1, 64, 1, 1], 100, 100, [address, b"\5\0\0\0"])]
        kernel.launch(gpu.stream(77), 1, 1, [buffer, np.uint32(5)], cooperative=True)
        assert paper.launched[1][3] == 77
        assert "cuLaunchCooperativeKernel" in paper.calls
        assert kernel.blocks_per_multiprocessor(256) == 8
        with pytest.raises(errors.CommandError, match="cannot all run at once, 1056 can"):
            kernel.launch(stream, 1057, 256, [buffer, np.uint32(5)], cooperative=True)
        with pytest.raises(errors.CommandError, match="up to 512 threads"):
            kernel.launch(stream, 1, 513, [buffer, np.uint32(5)])
        kernel.launch(stream, 1, 1, [buffer, np.uint32(5)], shared=200_000)
        assert paper.calls.count("cuFuncSetAttribute") == 1
        with pytest.raises(errors.CommandError, match="at most 232448"):
            kernel.launch(stream, 1, 1, [buffer, np.uint32(5)], shared=300_000)
        with pytest.raises(errors.CommandError, match="no kernel 'full'; known: fill"):
            module.kernel("full")
        begin, end = stream.record(), stream.record()
        stream.wait(end)
        assert end.seconds_since(begin) == 1.5
    assert not paper.contexts


def test_a_wait_has_a_deadline(paper: PaperDriver) -> None:
    with uccl_ep.accel.open("cuda", cache=False) as gpu:
        stream = gpu.stream()
        paper.pending = 5
        stream.synchronize()
        assert paper.pending == 0
        paper.pending = 1 << 60
        with pytest.raises(errors.DeadlineExceeded, match=r"a stream is not finished after 0\.01 s"):
            stream.synchronize(timeout=0.01)
        with pytest.raises(errors.DeadlineExceeded):
            stream.synchronize(timeout=0)
        paper.pending = 0


def test_streams_from_outside(paper: PaperDriver) -> None:
    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 55

    class Torch:
        cuda_stream = 66

    with uccl_ep.accel.open("cuda", cache=False) as gpu:
        for external, handle in ((Protocol(), 55), (Torch(), 66), (0, 0), (np.uint64(3), 3)):
            stream = gpu.stream(external)
            assert stream.handle == handle
            stream.synchronize()
            stream.close()
        assert "cuStreamDestroy" not in paper.calls  # it is not ours
        assert gpu.stream().__cuda_stream__() == (0, 100)
        for wrong in ("stream", -1, True, 1.5, object()):
            with pytest.raises(errors.CommandError, match="no stream"):
                gpu.stream(wrong)


@pytest.mark.parametrize(
    ("fail", "kind", "text"),
    [
        ({"cuInit": "NO_DEVICE"}, errors.NoDevice, "no GPU.*CUDA_VISIBLE_DEVICES"),
        ({"cuInit": "SYSTEM_DRIVER_MISMATCH"}, errors.NoDriver, "text of 803"),
        ({"cuInit": "UNKNOWN"}, errors.NoDriver, "CUDA_ERROR_UNKNOWN"),
        ({"cuDevicePrimaryCtxRetain": "OUT_OF_MEMORY"}, errors.OutOfMemory, "cuDevicePrimaryCtxRetain"),
    ],
)
def test_what_keeps_it_from_opening(paper: PaperDriver, fail: dict[str, str], kind: Any, text: str) -> None:
    paper.fail = fail
    with pytest.raises(kind, match=text):
        uccl_ep.accel.open("cuda", cache=False)


def test_a_driver_that_is_too_old_names_the_one_needed(paper: PaperDriver) -> None:
    paper.version = 12080
    with pytest.raises(errors.DriverTooOld, match=r"made for CUDA 12\.8\. CUDA 13\.0 is needed \(driver 580"):
        uccl_ep.accel.open("cuda", cache=False)


def test_a_device_that_is_not_there(paper: PaperDriver) -> None:
    for index in (1, -1):
        with pytest.raises(errors.NoDevice, match=f"no CUDA device {index}: this process sees 1"):
            uccl_ep.accel.open("cuda", index, cache=False)


@pytest.mark.parametrize(
    ("call", "code", "kind"),
    [
        ("cuMemAlloc", "OUT_OF_MEMORY", errors.OutOfMemory),
        ("cuMemHostRegister", "INVALID_VALUE", errors.RegistrationError),
        ("cuMemHostRegister", "OUT_OF_MEMORY", errors.RegistrationError),
        ("cuModuleLoadData", "NO_BINARY_FOR_GPU", errors.UnsupportedArchitecture),
        ("cuLaunchKernel", "LAUNCH_OUT_OF_RESOURCES", errors.CommandError),
        ("cuStreamQuery", "ILLEGAL_ADDRESS", errors.AcceleratorError),
    ],
)
def test_a_call_that_fails(paper: PaperDriver, call: str, code: str, kind: Any) -> None:
    with uccl_ep.accel.open("cuda", cache=False) as gpu:
        stream, buffer = gpu.stream(), gpu.alloc(8)
        kernel = gpu.compile(KERNEL, "k.cu").kernel("fill")
        paper.fail = {call: code}
        uses = {
            "cuMemAlloc": lambda: gpu.alloc(1),
            "cuMemHostRegister": lambda: gpu.pinned(1),
            "cuModuleLoadData": lambda: gpu.compile(KERNEL, "k.cu"),
            "cuLaunchKernel": lambda: kernel.launch(stream, 1, 1, [buffer, np.uint32(0)]),
            "cuStreamQuery": stream.synchronize,
        }
        with pytest.raises(kind, match=code) as caught:
            uses[call]()
        assert caught.value.record.vendor_code == int(getattr(paper.real.CUresult, f"CUDA_ERROR_{code}"))
        paper.fail = {}
    assert not paper.contexts


def test_what_is_closed_says_so(paper: PaperDriver) -> None:
    gpu = uccl_ep.accel.open("cuda", cache=False)
    module = gpu.compile(KERNEL, "k.cu")
    kernel, stream, buffer = module.kernel("fill"), gpu.stream(), gpu.alloc(8)
    part = buffer.slice(4)
    buffer.close()
    with pytest.raises(errors.ChannelClosed, match="memory is closed"):
        part.numpy()
    module.close()
    with pytest.raises(errors.ChannelClosed, match="module is closed"):
        kernel.launch(stream, 1, 1, [np.uint64(0), np.uint32(0)])
    gpu.close()
    gpu.close()
    for use in (stream.synchronize, lambda: gpu.alloc(1), gpu.stream, lambda: gpu.compile(KERNEL, "k.cu")):
        with pytest.raises(errors.ChannelClosed, match="closed"):
            use()
