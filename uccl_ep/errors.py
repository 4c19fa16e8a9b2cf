# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, as a tree.

UcclEpError (RuntimeError)
 +-- CommandError (ValueError)           a call or a command is not valid: E_INVALID, E_RANGE, E_ALIGNMENT, E_MALFORMED
 |    +-- CompileError                   a kernel does not compile: the text holds the compiler's log
 +-- DeadlineExceeded (TimeoutError)     E_DEADLINE
 +-- PeerLost (ConnectionError)          E_PEER_LOST: exclude the peer, or reset
 +-- ChannelClosed                       E_CLOSED: the channel, or the way to a peer on it; a closed communicator
 +-- Aborted                             E_ABORTED: only close() is left
 +-- BootstrapError (ConnectionError)    E_BOOTSTRAP: the ranks could not be brought together
 +-- ForkedError                         E_FORKED: a communicator was used in a forked child
 +-- OutOfMemory (MemoryError)           E_NO_MEMORY
 +-- RegistrationError                   E_REGISTRATION: the NIC cannot reach this memory
 +-- CapabilityError                     E_CAPABILITY: the NIC does not promise it
 +-- NicError                            E_NIC: with the vendor's code
 +-- NoDevice                            E_NO_DEVICE
 |    +-- NoDriver                       a GPU's driver is not there, or does not start
 |    +-- DriverTooOld                   it is too old: the text says what is needed
 +-- NotABackend                         E_NOT_A_BACKEND
 +-- AbiMismatch                         E_ABI
 +-- BackendFault                        E_BACKEND: a bug of the backend
 +-- Unsupported                         E_UNSUPPORTED
 |    +-- MissingPackage                 an optional package is not installed: the text says which
 |    +-- MissingCompiler                no compiler for kernels: the text says what to install
 |    +-- UnsupportedArchitecture        the compiler, or the driver, does not know this GPU
 +-- SystemError_ (OSError)              E_SYSTEM: the operating system refused
      +-- AcceleratorError               a GPU's driver refused, or a kernel failed: with the vendor's code

Every one carries `record`, the facts (who, whom, which command), and `advice`, what to do.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import _native


@dataclass(frozen=True)
class ErrorRecord:
    """One failure (ERR-2). None: does not apply."""

    status: int
    rank: int | None = None
    peer: int | None = None
    channel: int | None = None
    op: str | None = None
    ticket: int | None = None
    incarnation: int = 0
    vendor_code: int = 0
    clause: str = ""
    nic: str = ""
    text: str = ""
    time_ns: int = 0

    @property
    def name(self) -> str:
        """As in status.h: "E_RANGE"."""
        return _native.status_name(self.status)

    def where(self) -> str:
        """ "rank 0, peer 3, channel 1, ticket 17, put; SIG-2; NIC mlx5_0 code 12" """
        facts = [
            f"{label} {value}"
            for label, value in (
                ("rank", self.rank),
                ("peer", self.peer),
                ("channel", self.channel),
                ("ticket", self.ticket),
            )
            if value is not None
        ]
        if self.op:
            facts.append(self.op)
        groups = [", ".join(facts), self.clause]
        if self.vendor_code:
            groups.append(f"NIC {self.nic or 'unknown'} code {self.vendor_code}")
        return "; ".join(group for group in groups if group)


class UcclEpError(RuntimeError):
    """Root of the tree. Made from a record of the library, or from a text for what is found in Python."""

    _default = "E_INVALID"  # of an error that is found in Python

    def __init__(self, what: str | ErrorRecord, **facts: Any) -> None:
        if isinstance(what, str):
            what = ErrorRecord(status=_native.status_value(self._default), text=what, **facts)
        self.record = what
        super().__init__(self._message())

    def _message(self) -> str:
        where = self.record.where()
        text = self.record.text or self.advice
        return f"{self.name}: {text} [{where}]" if where else f"{self.name}: {text}"

    @property
    def status(self) -> int:
        return self.record.status

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def advice(self) -> str:
        """What this kind of failure means and what to do, from status.h."""
        return _native.status_text(self.record.status)

    def retold(self, old: str, new: str) -> UcclEpError:
        """The same failure with a part of its text replaced."""
        return type(self)(dataclasses.replace(self.record, text=self.record.text.replace(old, new)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.record,)


class CommandError(UcclEpError, ValueError):
    _default = "E_INVALID"


class DeadlineExceeded(UcclEpError, TimeoutError):
    _default = "E_DEADLINE"


class PeerLost(UcclEpError, ConnectionError):
    _default = "E_PEER_LOST"


class ChannelClosed(UcclEpError):
    _default = "E_CLOSED"


class Aborted(UcclEpError):
    _default = "E_ABORTED"


class BootstrapError(UcclEpError, ConnectionError):
    _default = "E_BOOTSTRAP"


class ForkedError(UcclEpError):
    _default = "E_FORKED"


class OutOfMemory(UcclEpError, MemoryError):
    _default = "E_NO_MEMORY"


class RegistrationError(UcclEpError):
    _default = "E_REGISTRATION"


class CapabilityError(UcclEpError):
    _default = "E_CAPABILITY"


class NicError(UcclEpError):
    _default = "E_NIC"


class NoDevice(UcclEpError):
    _default = "E_NO_DEVICE"


class NotABackend(UcclEpError):
    _default = "E_NOT_A_BACKEND"


class AbiMismatch(UcclEpError):
    _default = "E_ABI"


class BackendFault(UcclEpError):
    _default = "E_BACKEND"


class Unsupported(UcclEpError):
    _default = "E_UNSUPPORTED"


class SystemError_(UcclEpError, OSError):
    _default = "E_SYSTEM"


# More precise kinds of the above, which only Python finds: their status is that of the kind.
class CompileError(CommandError):
    pass


class NoDriver(NoDevice):
    pass


class DriverTooOld(NoDevice):
    pass


class MissingPackage(Unsupported):
    pass


class MissingCompiler(Unsupported):
    pass


class UnsupportedArchitecture(Unsupported):
    pass


class AcceleratorError(SystemError_):
    pass


_BY_NAME: dict[str, type[UcclEpError]] = {kind._default: kind for kind in UcclEpError.__subclasses__()}
# Kinds of wrong command share a class; `name` tells them apart.
for _name in ("E_RANGE", "E_ALIGNMENT", "E_MALFORMED"):
    _BY_NAME[_name] = CommandError


def from_record(record: ErrorRecord) -> UcclEpError:
    return _BY_NAME.get(record.name, UcclEpError)(record)


def nearest(value: str, valid: Iterable[str]) -> str:
    """'known: a, b, c; did you mean "b"?': what a refusal of a name should end with."""
    names = sorted(valid)
    known = "known: " + (", ".join(names) if names else "none")
    close = difflib.get_close_matches(value.lower(), names, n=1)
    return f"{known}; did you mean {close[0]!r}?" if close else known
