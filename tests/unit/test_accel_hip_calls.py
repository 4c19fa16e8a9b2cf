# SPDX-License-Identifier: Apache-2.0
"""The calls of HIP's runtime, without a GPU: a runtime of paper, whose memory is the host's.

It takes only what the real bindings take: each call is made on them too, with the same arguments. They convert them,
and then say that there is no runtime, no such function in it, or no device.
"""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import uccl_ep.accel
from uccl_ep import errors
from uccl_ep.accel import hip as accel_hip

pytestmark = [
    pytest.mark.required_in_ci,
    pytest.mark.skipif(not find_spec("hip"), reason="pip install 'uccl_ep[hip]'"),
    pytest.mark.skipif(os.path.exists("/dev/kfd"), reason="there is a real one"),
]

ATTRIBUTES = {
    "WallClockRate": 100_000, "DmaBufSupported": 1, "HostNativeAtomicSupported": 0, "CooperativeLaunch": 1,
    "HostNumaId": 1,
}  # fmt: skip
PROPERTIES = SimpleNamespace(
    name="Paper", gcnArchName="gfx90a:sramecc+:xnack-", warpSize=64, multiProcessorCount=104, totalGlobalMem=1 << 36,
    maxThreadsPerBlock=1024, sharedMemPerBlock=65536, pciDomainID=0, pciBusID=0x1B, pciDeviceID=0,
)  # fmt: skip
SIZES = (8, 4)


class PaperRuntime:
    """hip.hip in its place. `fail`: by a call's name, how it ends."""

    def __init__(self) -> None:
        from hip import hip

        self.real: Any = hip
        self.fail: dict[str, str] = {}
        self.missing: set[str] = set()
        self.calls: list[str] = []
        self.current = 3
        self.memory: dict[int, Any] = {}
        self.registered: set[int] = set()
        self.pending = 0
        self.launched: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.real, name)
        if not callable(found) or isinstance(found, type):
            return found
        results, answer = self.real.hipError_t, getattr(self, f"_{name}", None)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if name in self.missing:
                raise RuntimeError(f"failed to dlsym {name}")
            try:
                code = found(*arguments)[0]
            except RuntimeError as error:
                if "failed to dl" not in str(error):
                    raise
                code = None
            assert code != results.hipSuccess or name in ("hipRuntimeGetVersion", "hipGetErrorString")
            if name in self.fail:
                nothing = 1 if name in ("hipGetDeviceCount", "hipExtMallocWithFlags", "hipModuleLoadData") else 0
                return (getattr(results, f"hipError{self.fail[name]}"), *[None] * nothing)
            given = () if answer is None else answer(*arguments)
            if given and isinstance(given[0], results):
                return tuple(given)
            return (results.hipSuccess, *given)

        return call

    def _hipGetDeviceCount(self) -> Any:
        return (4,)

    def _hipGetDevice(self) -> Any:
        return (self.current,)

    def _hipSetDevice(self, index: int) -> Any:
        self.current = index
        return ()

    def _hipRuntimeGetVersion(self) -> Any:
        return (60342134,)

    def _hipGetErrorString(self, code: Any) -> Any:
        return (f"text of {int(code)}",)

    def _hipGetDeviceProperties(self, index: int) -> Any:
        return (PROPERTIES,)

    def _hipDeviceGetAttribute(self, which: Any, index: int) -> Any:
        return (ATTRIBUTES[which.name.removeprefix("hipDeviceAttribute")],)

    def _hipExtMallocWithFlags(self, nbytes: int, flags: int) -> Any:
        assert (self.current, flags) == (1, self.real.hipDeviceMallocFinegrained)
        block = ctypes.create_string_buffer(nbytes + 8192)
        address = (ctypes.addressof(block) + 4095) // 4096 * 4096
        self.memory[address] = block
        return (self.real.ihipModule_t.fromObj(address),)  # something of the bindings that is a number

    def _hipFree(self, address: int) -> Any:
        assert self.current == 1
        del self.memory[address]
        return ()

    def _hipHostRegister(self, address: int, nbytes: int, flags: int) -> Any:
        if address in self.registered:
            return (self.real.hipError_t.hipErrorHostMemoryAlreadyRegistered,)
        self.registered.add(address)
        return ()

    def _hipHostUnregister(self, address: int) -> Any:
        self.registered.remove(address)
        return ()

    def _hipHostGetDevicePointer(self, address: int, flags: int) -> Any:
        return (address,)

    def _hipMemcpyAsync(self, to: int, source: int, nbytes: int, kind: Any, stream: int) -> Any:
        assert (self.current, stream) == (1, 100)
        ctypes.memmove(to, source, nbytes)
        return ()

    def _hipMemsetAsync(self, address: int, value: int, nbytes: int, stream: int) -> Any:
        ctypes.memset(address, value, nbytes)
        return ()

    def _hipMemGetHandleForAddressRange(self, to: int, address: int, nbytes: int, kind: Any, flags: int) -> Any:
        ctypes.c_int.from_address(to).value = 33
        return ()

    def _hipStreamCreateWithFlags(self, flags: int) -> Any:
        assert flags == self.real.hipStreamNonBlocking
        return (self.real.ihipStream_t.fromObj(100),)

    def _hipStreamQuery(self, stream: int) -> Any:
        if self.pending > 0:
            self.pending -= 1
            return (self.real.hipError_t.hipErrorNotReady,)
        return ()

    def _hipEventCreateWithFlags(self, flags: int) -> Any:
        return (self.real.ihipEvent_t.fromObj(len(self.calls)),)

    def _hipEventElapsedTime(self, begin: int, end: int) -> Any:
        return (1500.0,)

    def _hipModuleLoadData(self, image: int) -> Any:
        assert ctypes.string_at(image, 4) == b"\x7fELF"
        return (self.real.ihipModule_t.fromObj(9),)

    def _hipModuleGetFunction(self, module: int, name: bytes) -> Any:
        if name != b"fill":
            return (self.real.hipError_t.hipErrorNotFound, None)
        return (self.real.ihipModuleSymbol_t.fromObj(11),)

    def _hipFuncGetAttribute(self, which: Any, function: int) -> Any:
        return ({"NUM_REGS": 16, "MAX_THREADS_PER_BLOCK": 512}.get(which.name.removeprefix("HIP_FUNC_ATTRIBUTE_"), 0),)

    def _hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(self, function: int, threads: int, shared: int) -> Any:
        return (2048 // threads,)

    def _hipModuleLaunchKernel(self, function: int, *rest: Any) -> Any:
        *shape, shared, stream, arguments, extra = rest
        assert (self.current, extra) == (1, 0)
        pointers = (ctypes.c_void_p * len(SIZES)).from_address(arguments)
        values = [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, SIZES, strict=True)]
        self.launched.append((function, shape, shared, stream, values))
        return ()

    def _hipModuleLaunchCooperativeKernel(self, *rest: Any) -> Any:
        return self._hipModuleLaunchKernel(*rest, 0)


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> PaperRuntime:
    runtime = PaperRuntime()
    monkeypatch.setitem(sys.modules, "hip", SimpleNamespace(hip=runtime, hiprtc=None))  # type: ignore[arg-type]
    # What hiprtc makes is seen in test_accel_compile.py.
    monkeypatch.setattr(accel_hip.Hiprtc, "compile", lambda *given: b"\x7fELF of paper")
    return runtime


def test_it_describes_the_device(paper: PaperRuntime) -> None:
    with uccl_ep.accel.open("hip", 1, cache=False) as gpu:
        info = gpu.info
    assert (info.name, info.architecture, info.warp_size, info.multiprocessors) == ("Paper", "gfx90a", 64, 104)
    assert (info.clock_hz, info.dmabuf, info.cooperative, info.numa_node) == (10**8, True, True, 1)
    assert (info.address, info.driver) == ("0000:1b:00.0", "HIP 6.3")
    assert paper.current == 3  # the caller's


def test_memory(paper: PaperRuntime) -> None:
    with uccl_ep.accel.open("hip", 1, cache=False) as gpu:
        buffer = gpu.alloc(5000)
        buffer.copy_from(np.arange(10, dtype=np.uint32), offset=16)
        assert buffer.slice(16, 40).numpy(np.uint32).tolist() == list(range(10))
        assert gpu.alloc(8192).dmabuf() == 33
        pinned = gpu.pinned(4096)
        gpu.register(np.ctypeslib.as_array((ctypes.c_uint8 * 4096).from_address(pinned.address))).close()
        assert paper.registered == {pinned.address}
        with pytest.raises(AttributeError):
            _ = buffer.__cuda_array_interface__
    assert not paper.memory
    assert not paper.registered
    assert paper.current == 3


def test_launch(paper: PaperRuntime) -> None:
    with uccl_ep.accel.open("hip", 1, cache=False) as gpu:
        module = gpu.compile("", "k.cu")
        assert module.kernels is None
        kernel = module.kernel("fill")
        assert (kernel.attributes.registers, kernel.attributes.max_threads) == (16, 512)
        stream, buffer = gpu.stream(), gpu.alloc(4096)
        kernel.launch(stream, (3, 2), 64, [buffer, np.uint32(5)], shared=50_000)
        address = buffer.address.to_bytes(8, "little")
        assert paper.launched == [(11, [3, 2, 1, 64, 1, 1], 50_000, 100, [address, b"\5\0\0\0"])]
        kernel.launch(stream, 1, 1, [buffer, np.uint32(5)], cooperative=True)
        assert "hipModuleLaunchCooperativeKernel" in paper.calls
        with pytest.raises(errors.CommandError, match="832 can"):
            kernel.launch(stream, 833, 256, [buffer, np.uint32(5)], cooperative=True)
        with pytest.raises(errors.CommandError, match="no kernel 'full'"):
            module.kernel("full")
        begin, end = stream.record(), stream.record()
        stream.wait(end)
        assert end.seconds_since(begin) == 1.5
        paper.pending = 3
        stream.synchronize()
        paper.pending = 1 << 60
        with pytest.raises(errors.DeadlineExceeded):
            stream.synchronize(timeout=0.01)


@pytest.mark.parametrize(
    ("call", "code", "kind"),
    [
        ("hipGetDeviceCount", "NoDevice", errors.NoDevice),
        ("hipGetDeviceCount", "NotInitialized", errors.NoDriver),
        ("hipExtMallocWithFlags", "OutOfMemory", errors.OutOfMemory),
        ("hipHostRegister", "InvalidValue", errors.RegistrationError),
        ("hipModuleLoadData", "NoBinaryForGpu", errors.UnsupportedArchitecture),
        ("hipStreamQuery", "IllegalAddress", errors.AcceleratorError),
    ],
)
def test_a_call_that_fails(paper: PaperRuntime, call: str, code: str, kind: Any) -> None:
    if call == "hipGetDeviceCount":
        paper.fail = {call: code}
        with pytest.raises(kind):
            uccl_ep.accel.open("hip", cache=False)
        return
    with uccl_ep.accel.open("hip", 1, cache=False) as gpu:
        stream = gpu.stream()
        uses: dict[str, Any] = {
            "hipExtMallocWithFlags": lambda: gpu.alloc(1),
            "hipHostRegister": lambda: gpu.pinned(1),
            "hipModuleLoadData": lambda: gpu.compile("", "k.cu"),
            "hipStreamQuery": stream.synchronize,
        }
        paper.fail = {call: code}
        with pytest.raises(kind, match=f"hipError{code}, text of"):
            uses[call]()
        paper.fail = {}
    assert paper.current == 3


def test_a_runtime_that_is_too_old(paper: PaperRuntime) -> None:
    paper.missing = {"hipGetDeviceProperties"}
    with pytest.raises(errors.DriverTooOld, match=r"no hipGetDeviceProperties.*ROCm 6\.0"):
        uccl_ep.accel.open("hip", 1, cache=False)


def test_no_runtime(paper: PaperRuntime) -> None:
    paper.missing = {"hipGetDeviceCount"}
    with pytest.raises(errors.NoDriver, match=r"libamdhip64\.so.*install ROCm"):
        uccl_ep.accel.open("hip", cache=False)


def test_a_device_that_is_not_there(paper: PaperRuntime) -> None:
    with pytest.raises(errors.NoDevice, match="this process sees 4"):
        uccl_ep.accel.open("hip", 4, cache=False)
