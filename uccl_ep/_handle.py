# SPDX-License-Identifier: Apache-2.0
"""The guarded pointer to a C communicator.

The C API wants destroy and reset to be alone. Python threads post and wait at any time, so every call passes through
here: it is counted in and out, and whoever wants to be alone keeps newcomers out and waits for the last to leave.

Under a driver (see uccl_ep.communicator.Driver) one thread at a time runs, and only inside a turn of the driver does
anything else happen. So nothing here blocks then, and every call ends with a turn: a program that polls lets time pass.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _native, info
from ._native import lib
from .errors import ChannelClosed, CommandError, DeadlineExceeded, ForkedError

if TYPE_CHECKING:
    from .communicator import Driver

# A wait of the main thread comes up for air so often, since Python's signal handlers run only between calls.
BREATH = 0.2
# How long close() waits for calls that an abort has just ended.
_CLOSE_SECONDS = 10.0


def needs_breath(seconds: float) -> bool:
    return seconds > BREATH and threading.current_thread() is threading.main_thread()


class Handle:
    def __init__(self, driver: Driver | None = None) -> None:
        self.pointer: Any = _native.NULL
        self.driver = driver
        self.proxies = 0
        if driver is not None:
            driver.adopt(self)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._inside = 0
        self._alone = False
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed or self.pointer == _native.NULL

    # ------------------------------------------------------------------------------------------------------- calling

    def call(self, function: Callable[..., int], *arguments: Any) -> int:
        """Returns OK or IN_PROGRESS; raises anything else."""
        self._enter()
        try:
            return self._checked(function, *arguments)
        finally:
            self._leave()
            if self.driver is not None:
                self.driver.turn()

    def call_alone(self, function: Callable[..., int], *arguments: Any, timeout: float) -> int:
        """With no other call inside; those that come meanwhile wait until it is over."""
        self._enter(alone_within=timeout)
        try:
            return self._checked(function, *arguments)
        finally:
            self._leave(alone=True)
            if self.driver is not None:
                self.driver.turn()

    def _checked(self, function: Callable[..., int], *arguments: Any) -> int:
        try:
            status = function(self.pointer, *arguments)
        except (OverflowError, TypeError) as error:
            raise CommandError(f"not a valid argument: {error}") from None
        if status < 0:
            raise info.last_error(status)
        return status

    def wait(self, function: Callable[..., int], *arguments: Any, timeout: float | None, default: float) -> bool:
        """A wait whose last C argument is the timeout. False: it was a poll (timeout 0) and is not finished."""
        total = default if timeout is None else timeout
        if not self.needs_breath(total):
            return self.call(function, *arguments, _native.nanoseconds(total)) == _native.OK
        end = time.monotonic() + total
        while True:
            breath = min(BREATH, max(end - time.monotonic(), 1e-6))
            try:
                self.call(function, *arguments, _native.nanoseconds(breath))
                return True
            except DeadlineExceeded as error:
                if time.monotonic() >= end:
                    raise error.retold(f"within {breath:.3f} s", f"within {total:.3f} s") from None

    def needs_breath(self, seconds: float) -> bool:
        return self.driver is None and needs_breath(seconds)

    # ------------------------------------------------------------------------------------------ proxies of a driver

    def driven(self, pointer: Any, proxies: int) -> None:
        """The communicator is made: its proxies are the driver's from now on."""
        self.pointer, self.proxies = pointer, proxies
        if self.driver is not None:
            self.driver.attach(pointer, proxies)

    # ---------------------------------------------------------------------------------------------- going in and out

    def _wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """As Condition.wait_for, with the lock held; under a driver by turns."""
        if self.driver is None:
            return self._changed.wait_for(condition, timeout)
        end = None if timeout is None else self.driver.now() + timeout
        while not condition():
            if end is not None and self.driver.now() >= end:
                return False
            self._lock.release()
            try:
                self.driver.turn()
            finally:
                self._lock.acquire()
        return True

    def _enter(self, alone_within: float | None = None) -> None:
        if os.getpid() != self._pid:
            raise ForkedError("this communicator belongs to the parent process; make one of its own in the child")
        with self._lock:
            self._wait_for(lambda: self._closed or not self._alone)
            if alone_within is not None and not self._closed:
                self._become_alone(alone_within)
            if self._closed or self.pointer == _native.NULL:
                raise ChannelClosed("this communicator is closed")
            self._inside += 1

    def _become_alone(self, timeout: float) -> None:
        self._alone = True
        try:
            if not self._wait_for(lambda: self._closed or not self._inside, timeout):
                raise DeadlineExceeded(
                    f"{self._inside} other calls on this communicator did not end within {timeout:g} s: "
                    "end its waits before a reset"
                )
        except BaseException:
            self._alone = False
            self._changed.notify_all()
            raise

    def _leave(self, alone: bool = False) -> None:
        with self._lock:
            self._inside -= 1
            if alone:
                self._alone = False
            if not self._inside:
                self._changed.notify_all()

    def abandon(self) -> None:
        """The rank of a driver is gone with all it had: nothing is closed, ever."""
        self._closed = True

    def close(self) -> None:
        """End the waits of other threads, wait until they are out, destroy. Again, or in a forked child: nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed or self.pointer == _native.NULL:
                return
            self._closed = True
            self._changed.notify_all()
            busy = self._inside > 0
        if busy:
            lib.uccl_ep_abort(self.pointer, b"closed while calls were in progress")
        with self._lock:
            # A call that an abort does not end is a bug below; memory that it may still use is then better leaked.
            if not self._wait_for(lambda: self._inside == 0, _CLOSE_SECONDS):
                raise DeadlineExceeded(f"{self._inside} calls did not end within {_CLOSE_SECONDS:g} s of the abort")
            pointer, self.pointer = self.pointer, _native.NULL
        if self.driver is not None:
            self.driver.detach(pointer, self.proxies)
        lib.uccl_ep_comm_destroy(pointer)
