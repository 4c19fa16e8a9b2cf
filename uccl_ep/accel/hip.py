# SPDX-License-Identifier: Apache-2.0
"""HIP, by hip-python's bindings of its runtime and of hiprtc: pip install 'uccl_ep[hip]'. ROCm itself is the system's.

Calls leave the device of the calling thread as they found it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .. import errors
from ._driver import Compiler, Handle, Info
from ._runtime import Runtime


def _package(name: str) -> Any:
    try:
        return getattr(importlib.import_module("hip"), name)
    except (ImportError, AttributeError) as error:
        raise errors.MissingPackage(f"hip.{name} cannot be imported ({error}): pip install 'uccl_ep[hip]'") from error


# ------------------------------------------------------------------------------------------------------ the compiler
class Hiprtc(Compiler):
    """Needs no GPU."""

    kind = "hip"

    @functools.cached_property
    def _hiprtc(self) -> Any:
        hiprtc = _package("hiprtc")
        try:
            self._release = self._call(hiprtc, hiprtc.hiprtcVersion())
        except (RuntimeError, OSError) as error:
            raise errors.MissingCompiler(
                f"libhiprtc.so, the compiler of HIP, cannot be loaded ({error}): install ROCm 5.5 or newer, and put "
                "its lib folder into LD_LIBRARY_PATH"
            ) from error
        return hiprtc

    @staticmethod
    def _call(hiprtc: Any, result: Any) -> Any:
        code, *values = result
        if code != hiprtc.hiprtcResult.HIPRTC_SUCCESS:
            raise errors.AcceleratorError(f"hiprtc failed: {code.name}", vendor_code=int(code))
        return values[0] if len(values) == 1 else values

    def version(self) -> str:
        _ = self._hiprtc
        # The version is that of the interface; the compiler's own is the runtime's build.
        try:
            _, build = _package("hip").hipRuntimeGetVersion()
        except RuntimeError:
            build = "unknown"
        return f"hiprtc {self._release[0]}.{self._release[1]} of HIP {build}"

    def compile(
        self, source: str, name: str, architecture: str, options: Sequence[str], headers: Mapping[str, str]
    ) -> bytes:
        hiprtc = self._hiprtc
        named = [*headers.items(), *((key.rsplit("/", 1)[1], text) for key, text in headers.items() if "/" in key)]
        program = self._call(
            hiprtc,
            hiprtc.hiprtcCreateProgram(
                source.encode(), name.encode(), len(named), [text.encode() for _, text in named],
                [key.encode() for key, _ in named],
            ),
        )  # fmt: skip
        try:
            flags = [f"--offload-arch={architecture}", "-std=c++17", *options]
            (code,) = hiprtc.hiprtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
            if code != hiprtc.hiprtcResult.HIPRTC_SUCCESS:
                log = bytearray(max(int(self._call(hiprtc, hiprtc.hiprtcGetProgramLogSize(program))), 1))
                self._call(hiprtc, hiprtc.hiprtcGetProgramLog(program, log))
                # The compiler works on a file of its own.
                text = re.sub(r"\S*/CompileSource\b", name, log.rstrip(b"\0\n").decode("utf-8", "replace"))
                if "HIPRTC_ERROR_INVALID_OPTION" in code.name or ("unsupported" in text and "arch" in text):
                    raise errors.UnsupportedArchitecture(f"{self.version()} makes no code for {architecture}:\n{text}")
                raise errors.CompileError(f"{name} does not compile for {architecture} ({code.name}):\n{text}")
            image = bytearray(int(self._call(hiprtc, hiprtc.hiprtcGetCodeSize(program))))
            self._call(hiprtc, hiprtc.hiprtcGetCode(program, image))
            return bytes(image)
        finally:
            hiprtc.hiprtcDestroyProgram(program.createRef())


# -------------------------------------------------------------------------------------------------------- the driver
class Hip(Runtime):
    prefix = "hip"
    error_prefix = "hipError"
    codes = ("hipSuccess", "hipErrorNotReady", "hipErrorNotFound", "hipErrorHostMemoryAlreadyRegistered")

    def __init__(self, index: int) -> None:
        self._hip: Any = _package("hip")
        super().__init__(self._hip, self._hip.hipError_t)
        self.compiler = Hiprtc()
        try:
            code, count = self._hip.hipGetDeviceCount()
        except RuntimeError as error:
            raise errors.NoDriver(
                f"libamdhip64.so, the runtime of HIP, cannot be loaded ({error}): install ROCm, and put its lib folder "
                "into LD_LIBRARY_PATH"
            ) from error
        if code == self._hip.hipError_t.hipErrorNoDevice or (code == self._hip.hipError_t.hipSuccess and not count):
            raise errors.NoDevice("HIP shows no GPU (HIP_VISIBLE_DEVICES may hide it; /dev/kfd must be accessible)")
        if code != self._hip.hipError_t.hipSuccess:
            raise errors.NoDriver(f"HIP does not start: {self._text(code)}", vendor_code=int(code))
        if not 0 <= index < count:
            raise errors.NoDevice(f"no HIP device {index}: this process sees {count}, from 0")
        self._device = index
        self.info = self._describe(index)

    def _describe(self, index: int) -> Info:
        with self._current():
            properties = self._call("hipGetDeviceProperties", index)
            numa = self._attribute("HostNumaId", -1)
            version = int(self._call("hipRuntimeGetVersion"))
            return Info(
                kind="hip",
                index=index,
                name=properties.name,
                # Without ":sramecc+:xnack-": code for the plain name runs with every setting.
                architecture=properties.gcnArchName.split(":")[0],
                warp_size=int(properties.warpSize),
                multiprocessors=int(properties.multiProcessorCount),
                memory_bytes=int(properties.totalGlobalMem),
                max_threads=int(properties.maxThreadsPerBlock),
                shared_bytes=int(properties.sharedMemPerBlock),
                clock_hz=self._attribute("WallClockRate", 100_000) * 1000,  # s_memrealtime
                # ROCm says nothing of it: the order is that of fine-grained memory, and nothing can be asked to flush.
                writes_ordering="unordered",
                can_flush=False,
                dmabuf=bool(self._attribute("DmaBufSupported", 0)),
                host_atomics=bool(self._attribute("HostNativeAtomicSupported", 0)),
                cooperative=bool(self._attribute("CooperativeLaunch", 0)),
                numa_node=numa if numa >= 0 else None,
                address=f"{properties.pciDomainID:04x}:{properties.pciBusID:02x}:{properties.pciDeviceID:02x}.0",
                driver=f"HIP {version // 10_000_000}.{version // 100_000 % 100}",
            )

    def _attribute(self, name: str, otherwise: int) -> int:
        """Older runtimes know fewer of them."""
        which = getattr(self._hip.hipDeviceAttribute_t, f"hipDeviceAttribute{name}", None)
        if which is None:
            return otherwise
        code, value = self._hip.hipDeviceGetAttribute(which, self._device)
        return int(value) if code == self._hip.hipError_t.hipSuccess else otherwise

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return super()._call(name, *arguments)
        except RuntimeError as error:  # the bindings found the library, and not the function in it
            if isinstance(error, errors.UcclEpError):
                raise
            raise errors.DriverTooOld(f"HIP's runtime has no {name} ({error}): ROCm 6.0 or newer is needed") from error

    def _text(self, code: Any) -> str:
        _, text = self._hip.hipGetErrorString(code)
        return f"{code.name}, {text}"

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        before = self._call("hipGetDevice")
        self._call("hipSetDevice", self._device)
        try:
            yield
        finally:
            self._call("hipSetDevice", before)

    # Memory.
    def alloc(self, nbytes: int) -> int:
        # Fine-grained: what NICs and other processes write is seen by kernels that run, which plain device memory does
        # not promise (MEM-1).
        return int(self._inside("hipExtMallocWithFlags", nbytes, self._hip.hipDeviceMallocFinegrained))

    def host_register(self, address: int, nbytes: int) -> int:
        flags = self._hip.hipHostRegisterMapped | self._hip.hipHostRegisterPortable
        return self._register(address, nbytes, flags)

    def copy(self, stream: Handle, to: int, source: int, nbytes: int) -> None:
        self._inside("hipMemcpyAsync", to, source, nbytes, self._hip.hipMemcpyKind.hipMemcpyDefault, stream)

    def export_dmabuf(self, address: int, nbytes: int) -> int:
        descriptor = ctypes.c_int(-1)
        kind = self._hip.hipMemRangeHandleType.hipMemRangeHandleTypeDmaBufFd
        self._inside("hipMemGetHandleForAddressRange", ctypes.addressof(descriptor), address, nbytes, kind, 0)
        return descriptor.value

    # Streams and events.
    def stream_create(self) -> Handle:
        return int(self._inside("hipStreamCreateWithFlags", self._hip.hipStreamNonBlocking))

    def event_record(self, stream: Handle) -> Handle:
        return self._record(self._hip.hipEventDefault, stream)

    # Code: loading puts all of it onto the device.
    def load(self, image: bytes, name: str) -> Handle:
        return int(self._inside("hipModuleLoadData", np.frombuffer(image, np.uint8).ctypes.data))

    def function(self, module: Handle, name: str) -> Handle | None:
        found = super().function(module, name)
        return None if found is None else int(found)

    def names(self, module: Handle) -> None:
        return None

    def parameter_sizes(self, function: Handle) -> None:
        return None

    def _function_attribute(self, function: Handle, name: str) -> int:
        which = getattr(self._hip.hipFunction_attribute, f"HIP_FUNC_ATTRIBUTE_{name}")
        return int(self._call("hipFuncGetAttribute", which, function))

    def allow_shared(self, function: Handle, nbytes: int) -> None:
        """A block may ask for all that there is."""

    def close(self) -> None:
        """The runtime keeps its context."""
