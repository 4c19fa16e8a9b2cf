# SPDX-License-Identifier: Apache-2.0
"""CUDA, by cuda-python's bindings of its driver and of NVRTC: pip install 'uccl_ep[cuda]'.

The device's primary context is used, which is that of torch and of everything else made with the CUDA runtime: memory
and streams are the same to all of them. Calls leave the context of the calling thread as they found it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np

from .. import errors
from ._driver import Compiler, Handle, Info
from ._runtime import Runtime

# What first has cuFuncLoad, cuModuleEnumerateFunctions and cuFuncGetParamInfo.
_NEEDED = (12, 4)
_RELEASES = {12: "550", 13: "580"}  # of the driver: the first for a major version of CUDA, 12.4 for 12
_ORDERING = {0: "unordered", 100: "ordered", 200: "ordered_all"}


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise errors.MissingPackage(
            f"cuda.bindings.{name} cannot be imported ({error}): pip install 'uccl_ep[cuda]'"
        ) from error


# ------------------------------------------------------------------------------------------------------ the compiler
class Nvrtc(Compiler):
    """Needs no GPU and no driver."""

    kind = "cuda"

    @functools.cached_property
    def _nvrtc(self) -> Any:
        nvrtc = _package("nvrtc")
        try:
            self._release = self._call(nvrtc, nvrtc.nvrtcVersion())
            self.architectures = [f"sm_{number}" for number in self._call(nvrtc, nvrtc.nvrtcGetSupportedArchs())]
        except (RuntimeError, OSError) as error:
            raise errors.MissingCompiler(
                f"libnvrtc, the compiler of CUDA, is not found ({error}): pip install nvidia-cuda-nvrtc, or install "
                "the CUDA toolkit"
            ) from error
        return nvrtc

    @staticmethod
    def _call(nvrtc: Any, result: Any) -> Any:
        code, *values = result
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise errors.AcceleratorError(f"NVRTC failed: {code.name}", vendor_code=int(code))
        return values[0] if len(values) == 1 else values

    @property
    def release(self) -> tuple[int, int]:
        """Of CUDA."""
        _ = self._nvrtc
        major, minor = self._release
        return major, minor

    def version(self) -> str:
        # The bindings tell no build, but a release changes what it makes only with its number.
        return f"nvrtc {self.release[0]}.{self.release[1]}"

    def architecture(self, major: int, minor: int) -> str:
        """What runs on a device of this compute capability: its own, or the nearest older one of the same major."""
        _ = self._nvrtc
        known = [int(name.removeprefix("sm_")) for name in self.architectures]
        fitting = [number for number in known if number // 10 == major and number % 10 <= minor]
        if not fitting:
            raise errors.UnsupportedArchitecture(
                f"{self.version()} makes no code for a GPU of compute capability {major}.{minor} (it knows "
                f"{', '.join(self.architectures)}): install the nvidia-cuda-nvrtc of another CUDA release"
            )
        return f"sm_{max(fitting)}"

    def compile(
        self, source: str, name: str, architecture: str, options: Sequence[str], headers: Mapping[str, str]
    ) -> bytes:
        nvrtc = self._nvrtc
        if re.sub(r"[a-z]$", "", architecture) not in self.architectures:  # sm_90a is for an sm_90
            raise errors.UnsupportedArchitecture(
                f"{self.version()} does not know {architecture!r}; it knows {', '.join(self.architectures)}"
            )
        # A header that includes its neighbour as "ring.h" finds it under that name.
        named = [*headers.items(), *((key.rsplit("/", 1)[1], text) for key, text in headers.items() if "/" in key)]
        program = self._call(
            nvrtc,
            nvrtc.nvrtcCreateProgram(
                source.encode(), name.encode(), len(named), [text.encode() for _, text in named],
                [key.encode() for key, _ in named],
            ),
        )  # fmt: skip
        try:
            flags = [f"--gpu-architecture={architecture}", "--std=c++17", "--generate-line-info", *options]
            (code,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
            if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                log = bytearray(self._call(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
                self._call(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
                raise errors.CompileError(
                    f"{name} does not compile for {architecture} ({code.name}):\n"
                    + log.rstrip(b"\0\n").decode("utf-8", "replace")
                )
            image = bytearray(self._call(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
            self._call(nvrtc, nvrtc.nvrtcGetCUBIN(program, image))
            return bytes(image)
        finally:
            nvrtc.nvrtcDestroyProgram(program)


# -------------------------------------------------------------------------------------------------------- the driver
class Cuda(Runtime):
    prefix = "cu"
    error_prefix = "CUDA_ERROR_"
    otherwise = MappingProxyType(
        {
            "Free": "MemFree",
            "HostRegister": "MemHostRegister",
            "HostGetDevicePointer": "MemHostGetDevicePointer",
            "HostUnregister": "MemHostUnregister",
            "MemsetAsync": "MemsetD8Async",
            "EventCreateWithFlags": "EventCreate",
            "ModuleOccupancyMaxActiveBlocksPerMultiprocessor": "OccupancyMaxActiveBlocksPerMultiprocessor",
            "ModuleLaunchKernel": "LaunchKernel",
            "ModuleLaunchCooperativeKernel": "LaunchCooperativeKernel",
        }
    )
    codes = (
        "CUDA_SUCCESS",
        "CUDA_ERROR_NOT_READY",
        "CUDA_ERROR_NOT_FOUND",
        "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
    )

    def __init__(self, index: int) -> None:
        self._cuda: Any = _package("driver")
        super().__init__(self._cuda, self._cuda.CUresult)
        nvrtc = Nvrtc()
        self.compiler = nvrtc
        try:
            version = self._start(nvrtc)
            self._device = self._find(index)
            self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        except RuntimeError as error:  # of the bindings: ours are RuntimeErrors, too
            if isinstance(error, errors.UcclEpError):
                raise
            if "not found" in str(error) and "Function" in str(error):
                raise errors.DriverTooOld(f"the driver of CUDA is too old: {error}. {_advice(nvrtc)}") from error
            raise errors.NoDriver(
                f"libcuda.so.1, which the driver of NVIDIA GPUs brings, cannot be loaded ({error})"
            ) from error
        try:
            self.info = self._describe(index, version)
        except BaseException:
            self.close()
            raise

    def _start(self, nvrtc: Nvrtc) -> int:
        results = self._cuda.CUresult
        (code,) = self._cuda.cuInit(0)
        if code in (results.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, results.CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE):
            raise errors.NoDriver(f"the driver does not start: {self._text(code)}", vendor_code=int(code))
        if code == results.CUDA_ERROR_NO_DEVICE:
            raise errors.NoDevice("the driver of CUDA shows no GPU (CUDA_VISIBLE_DEVICES may hide it)")
        if code != results.CUDA_SUCCESS:
            raise errors.NoDriver(f"the driver does not start: {self._text(code)}", vendor_code=int(code))
        version: int = self._call("cuDriverGetVersion")
        needed = max(_NEEDED, (nvrtc.release[0], 0))
        if (version // 1000, version % 1000 // 10) < needed:
            raise errors.DriverTooOld(
                f"the driver is made for CUDA {version // 1000}.{version % 1000 // 10}. {_advice(nvrtc)}"
            )
        return version

    def _find(self, index: int) -> Any:
        count = self._call("cuDeviceGetCount")
        if not 0 <= index < count:
            raise errors.NoDevice(f"no CUDA device {index}: this process sees {count}, from 0")
        return self._call("cuDeviceGet", index)

    def _describe(self, index: int, version: int) -> Info:
        major, minor = self._attribute("COMPUTE_CAPABILITY_MAJOR"), self._attribute("COMPUTE_CAPABILITY_MINOR")
        numa = self._attribute("HOST_NUMA_ID")
        return Info(
            kind="cuda",
            index=index,
            name=_string(self._call("cuDeviceGetName", 256, self._device)),
            architecture=self.compiler.architecture(major, minor),  # type: ignore[attr-defined]
            warp_size=self._attribute("WARP_SIZE"),
            multiprocessors=self._attribute("MULTIPROCESSOR_COUNT"),
            memory_bytes=int(self._call("cuDeviceTotalMem", self._device)),
            max_threads=self._attribute("MAX_THREADS_PER_BLOCK"),
            shared_bytes=self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            clock_hz=10**9,  # %globaltimer
            writes_ordering=_ORDERING.get(self._attribute("GPU_DIRECT_RDMA_WRITES_ORDERING"), "unordered"),  # type: ignore[arg-type]
            can_flush=bool(self._attribute("GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS") & 1),
            dmabuf=bool(self._attribute("DMA_BUF_SUPPORTED")),
            host_atomics=bool(self._attribute("HOST_NATIVE_ATOMIC_SUPPORTED")),
            cooperative=bool(self._attribute("COOPERATIVE_LAUNCH")),
            numa_node=numa if numa >= 0 else None,
            address=_string(self._call("cuDeviceGetPCIBusId", 32, self._device)),
            driver=f"CUDA {version // 1000}.{version % 1000 // 10}",
        )

    def _attribute(self, name: str) -> int:
        which = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", which, self._device))

    def _text(self, code: Any) -> str:
        _, text = self._cuda.cuGetErrorString(code)
        return f"{code.name}" + (f", {_string(text)}" if text else "")

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    # Memory.
    def alloc(self, nbytes: int) -> int:
        return int(self._inside("cuMemAlloc", nbytes))

    def host_register(self, address: int, nbytes: int) -> int:
        flags = self._cuda.CU_MEMHOSTREGISTER_PORTABLE | self._cuda.CU_MEMHOSTREGISTER_DEVICEMAP
        return self._register(address, nbytes, flags)

    def copy(self, stream: Handle, to: int, source: int, nbytes: int) -> None:
        self._inside("cuMemcpyAsync", to, source, nbytes, stream)

    def export_dmabuf(self, address: int, nbytes: int) -> int:
        kind = self._cuda.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        return int(self._inside("cuMemGetHandleForAddressRange", address, nbytes, kind, 0))

    # Streams and events.
    def stream_create(self) -> Handle:
        return int(self._inside("cuStreamCreate", self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def event_record(self, stream: Handle) -> Handle:
        return self._record(self._cuda.CUevent_flags.CU_EVENT_DEFAULT, stream)

    # Code.
    def load(self, image: bytes, name: str) -> Handle:
        with self._current():
            module = self._call("cuModuleLoadData", np.frombuffer(image, np.uint8).ctypes.data)
            # Where modules are loaded lazily, the first launch would wait for kernels that run: load all of it now.
            for function in self._functions(module):
                self._call("cuFuncLoad", function)
            return module

    def _functions(self, module: Handle) -> list[Any]:
        count = self._call("cuModuleGetFunctionCount", module)
        return list(self._call("cuModuleEnumerateFunctions", count, module)) if count else []

    def names(self, module: Handle) -> Sequence[str]:
        with self._current():
            return [_string(self._call("cuFuncGetName", function)) for function in self._functions(module)]

    def parameter_sizes(self, function: Handle) -> Sequence[int]:
        sizes: list[int] = []
        with self._current():
            while True:
                code, _, size = self._cuda.cuFuncGetParamInfo(function, len(sizes))
                if code == self._cuda.CUresult.CUDA_ERROR_INVALID_VALUE:  # past the last one
                    return sizes
                if code != self._cuda.CUresult.CUDA_SUCCESS:
                    raise self._error("cuFuncGetParamInfo", code)
                sizes.append(int(size))

    def _function_attribute(self, function: Handle, name: str) -> int:
        which = getattr(self._cuda.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(self._call("cuFuncGetAttribute", which, function))

    def allow_shared(self, function: Handle, nbytes: int) -> None:
        which = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._inside("cuFuncSetAttribute", function, which, nbytes)

    def close(self) -> None:
        self._call("cuDevicePrimaryCtxRelease", self._device)


def _string(text: Any) -> str:
    return bytes(text).split(b"\0")[0].decode("utf-8", "replace")


def _advice(nvrtc: Nvrtc) -> str:
    major = nvrtc.release[0]
    needed = max(_NEEDED, (major, 0))
    release = _RELEASES.get(needed[0], "of that release")
    return (
        f"CUDA {needed[0]}.{needed[1]} is needed (driver {release} or newer), since kernels are compiled by "
        f"{nvrtc.version()}; or install the nvidia-cuda-nvrtc and cuda-bindings of the driver's CUDA release"
    )
