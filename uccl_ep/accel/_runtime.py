# SPDX-License-Identifier: Apache-2.0
"""What CUDA's driver and HIP's runtime have in common: the same calls, by other names.

A call gives a code and values. Every one is made with the device current in the calling thread, and leaves that as it
found it.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, ClassVar

from .. import errors
from ._arguments import Packed
from ._driver import Dim3, Driver, Handle, KernelAttributes


class Runtime(Driver):
    # Names here are HIP's, without the prefix: what is called otherwise, and the codes of success, "not ready", "not
    # found" and "registered already".
    prefix: str
    error_prefix: str
    otherwise: ClassVar[Mapping[str, str]] = MappingProxyType({})
    codes: tuple[str, str, str, str]

    def __init__(self, api: Any, results: Any) -> None:
        self._api, self._results = api, results  # the bindings, and their type of codes
        self._lock = threading.RLock()  # what is given back, the collector may give back anywhere
        self._registered: dict[int, int] = {}  # host memory that somebody else registered: how often it is used here
        self._success, self._not_ready, self._not_found, self._taken = (getattr(results, name) for name in self.codes)

    @abc.abstractmethod
    def _current(self) -> AbstractContextManager[None]:
        """The device, for the calling thread."""

    @abc.abstractmethod
    def _text(self, code: Any) -> str: ...

    # Calls: by name, since an error should say which.
    def _call(self, name: str, *arguments: Any) -> Any:
        code, *values = getattr(self._api, name)(*arguments)
        if code != self._success:
            raise self._error(name, code)
        return values[0] if len(values) == 1 else values

    def _inside(self, name: str, *arguments: Any) -> Any:
        with self._current():
            return self._call(name, *arguments)

    def _name(self, name: str) -> str:
        return self.prefix + self.otherwise.get(name, name)

    def _named(self, name: str, *arguments: Any) -> Any:
        return self._inside(self._name(name), *arguments)

    def _error(self, name: str, code: Any) -> errors.UcclEpError:
        kinds = {
            "outofmemory": errors.OutOfMemory,
            "nodevice": errors.NoDevice,
            "invaliddevice": errors.NoDevice,
            "notsupported": errors.Unsupported,
            "nobinaryforgpu": errors.UnsupportedArchitecture,
            "cooperativelaunchtoolarge": errors.CommandError,
            "launchoutofresources": errors.CommandError,
        }
        what = code.name.removeprefix(self.error_prefix).replace("_", "").lower()
        return kinds.get(what, errors.AcceleratorError)(f"{name}: {self._text(code)}", vendor_code=int(code))

    # Memory.
    def free(self, address: int) -> None:
        self._named("Free", address)

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        with self._lock, self._current():
            (code,) = getattr(self._api, self._name("HostRegister"))(address, nbytes, flags)
            if code not in (self._success, self._taken):
                raise errors.RegistrationError(
                    f"{nbytes} bytes of host memory cannot be registered with the GPU: {self._text(code)}. It must be "
                    "ordinary memory of this process, and as much must be allowed to be locked (ulimit -l)",
                    vendor_code=int(code),
                )
            if code == self._taken:
                self._registered[address] = self._registered.get(address, 0) + 1
            return int(self._call(self._name("HostGetDevicePointer"), address, 0))

    def host_unregister(self, address: int) -> None:
        with self._lock, self._current():
            if self._registered.get(address, 0):
                self._registered[address] -= 1
            else:
                self._call(self._name("HostUnregister"), address)

    def fill(self, stream: Handle, address: int, value: int, nbytes: int) -> None:
        self._named("MemsetAsync", address, value, nbytes, stream)

    # Streams and events.
    def stream_destroy(self, stream: Handle) -> None:
        self._named("StreamDestroy", stream)

    def stream_done(self, stream: Handle) -> bool:
        return self._ready(self._name("StreamQuery"), stream)

    def _ready(self, name: str, handle: Handle) -> bool:
        with self._current():
            (code,) = getattr(self._api, name)(handle)
        if code == self._not_ready:
            return False
        if code != self._success:
            raise self._error(name, code)
        return True

    def stream_wait(self, stream: Handle, event: Handle) -> None:
        self._named("StreamWaitEvent", stream, event, 0)

    def _record(self, flags: Any, stream: Handle) -> Handle:
        with self._current():
            event = int(self._call(self._name("EventCreateWithFlags"), flags))
            self._call(self._name("EventRecord"), event, stream)
            return event

    def event_destroy(self, event: Handle) -> None:
        self._named("EventDestroy", event)

    def event_done(self, event: Handle) -> bool:
        return self._ready(self._name("EventQuery"), event)

    def event_seconds(self, begin: Handle, end: Handle) -> float:
        return float(self._named("EventElapsedTime", begin, end)) / 1e3

    # Code.
    def unload(self, module: Handle) -> None:
        self._named("ModuleUnload", module)

    def function(self, module: Handle, name: str) -> Handle | None:
        call = self._name("ModuleGetFunction")
        with self._current():
            code, function = getattr(self._api, call)(module, name.encode())
        if code == self._not_found:
            return None
        if code != self._success:
            raise self._error(call, code)
        return function

    def attributes(self, function: Handle) -> KernelAttributes:
        with self._current():
            return KernelAttributes(
                max_threads=self._function_attribute(function, "MAX_THREADS_PER_BLOCK"),
                registers=self._function_attribute(function, "NUM_REGS"),
                shared_bytes=self._function_attribute(function, "SHARED_SIZE_BYTES"),
                local_bytes=self._function_attribute(function, "LOCAL_SIZE_BYTES"),
            )

    @abc.abstractmethod
    def _function_attribute(self, function: Handle, name: str) -> int: ...

    def blocks_per_multiprocessor(self, function: Handle, threads: int, shared: int) -> int:
        return int(self._named("ModuleOccupancyMaxActiveBlocksPerMultiprocessor", function, threads, shared))

    def launch(
        self, function: Handle, stream: Handle, grid: Dim3, block: Dim3, packed: Packed, shared: int, cooperative: bool
    ) -> None:
        if cooperative:
            self._named("ModuleLaunchCooperativeKernel", function, *grid, *block, shared, stream, packed.address)
        else:
            self._named("ModuleLaunchKernel", function, *grid, *block, shared, stream, packed.address, 0)
