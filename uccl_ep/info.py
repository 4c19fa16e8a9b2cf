# SPDX-License-Identifier: Apache-2.0
"""What the library tells about a communicator, a NIC and a command, as plain dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from . import _native, errors
from ._native import ffi, lib


@dataclass(frozen=True)
class Caps:
    """A NIC's promises, as in uccl_ep_caps; 0 is "not promised" or "no limit known"."""

    completion_level: int
    flags: int
    max_message_bytes: int
    max_inflight_bytes: int
    max_region_bytes: int
    max_inflight_peer: int
    max_inflight_endpoint: int
    max_batch: int
    max_endpoints: int
    max_peers: int
    max_inline_bytes: int
    write_alignment: int
    immediate_bits: int
    responder_atomics: int
    adding_nics: int
    max_receives: int

    @property
    def names(self) -> list[str]:
        """The flags that are set: ["order_write_write", ...]."""
        known = _native.macro_names("UCCL_EP_CAP_")
        return [known.get(1 << bit, f"bit{bit}").lower() for bit in range(64) if self.flags >> bit & 1]

    @property
    def completion(self) -> str:
        """ "transmitted", "delivered" or "visible"."""
        names = _native.enum_names("uccl_ep_completion_level", "UCCL_EP_COMPLETION_")
        return names.get(self.completion_level, str(self.completion_level)).lower()


@dataclass(frozen=True)
class DeviceInfo:
    name: str
    vendor: str
    model: str
    firmware: str
    address: str
    numa_node: int | None
    unusable: str  # not empty: the device is there and cannot be used, and why
    caps: Caps


@dataclass(frozen=True)
class CommInfo:
    """What the ranks agreed on."""

    rank: int
    size: int
    channels: int
    proxies: int
    signals: int
    granularity: int
    ring_log2: int
    heap_bytes: int
    strategy: str
    strategy_reason: str
    signal_banks: int  # of a signal word: read_signal() gives the sum over them
    window: int  # strategies with a mailbox: operations outstanding to a peer at most; others: 0
    heap_kind: str  # "host", "cuda", "rocm" or "emulated"
    staged: bool  # a heap in device memory that goes through host memory
    staged_reason: str  # and why
    accelerator: str  # "cuda", "hip", "emulation" or ""
    device_channels: int  # channels 0 .. device_channels - 1 are posted to by kernels
    backend: str
    backend_version: str
    backend_abi: tuple[int, int]
    library: Path
    device: DeviceInfo


@dataclass(frozen=True)
class BackendInfo:
    """What a library says of itself when it is probed."""

    name: str
    version: str
    library: Path
    devices: tuple[DeviceInfo, ...]


@dataclass(frozen=True)
class TraceEntry:
    """One command of the flight recorder."""

    time_ns: int
    channel: int
    ticket: int
    op: str
    target: int
    local: int
    remote: int
    bytes: int
    slot: int
    add: int
    words: tuple[int, int]


def _numbers(kind: type[Any], struct: Any) -> dict[str, int]:
    """The fields of a dataclass that the C structure has by the same name, as numbers."""
    numbers = _native.struct_dict(struct)
    return {field.name: numbers[field.name] for field in fields(kind) if field.name in numbers}


def _texts(kind: type[Any], struct: Any) -> dict[str, str]:
    return {
        name: _native.text(getattr(struct, name))
        for name, field in ffi.typeof(struct).fields
        if field.type.kind == "array" and field.type.item.cname == "char" and name in kind.__dataclass_fields__
    }


def caps_from(struct: Any) -> Caps:
    return Caps(**_numbers(Caps, struct))


def device_from(struct: Any) -> DeviceInfo:
    numa = struct.numa_node if struct.numa_node >= 0 else None
    return DeviceInfo(**_texts(DeviceInfo, struct), numa_node=numa, caps=caps_from(struct.caps))


def version_pair(packed: int) -> tuple[int, int]:
    return packed >> 16, packed & 0xFFFF


def strategy_name(value: int) -> str:
    return _native.enum_names("uccl_ep_strategy", "UCCL_EP_STRATEGY_")[value].lower()


def comm_from(struct: Any) -> CommInfo:
    values: dict[str, Any] = {**_numbers(CommInfo, struct), **_texts(CommInfo, struct)}
    values.update(
        strategy=strategy_name(struct.strategy),
        heap_kind=_native.enum_names("uccl_ep_memory_kind", "UCCL_EP_MEMORY_")[struct.heap_kind].lower(),
        staged=bool(struct.staged),
        backend_abi=version_pair(struct.backend_abi),
        library=Path(values["library"]),
        device=device_from(struct.device),
    )
    return CommInfo(**values)


def trace_from(struct: Any) -> TraceEntry:
    command = ffi.new("uccl_ep_command *")
    words = (struct.words.word[0], struct.words.word[1])
    lib.uccl_ep_decode(*words, command)
    return TraceEntry(
        time_ns=struct.time_ns,
        channel=struct.channel,
        ticket=struct.ticket,
        op=op_name(command.op) or f"op {command.op}",
        target=command.target,
        local=command.local,
        remote=command.remote,
        bytes=command.bytes,
        slot=command.slot,
        add=command.add,
        words=words,
    )


def op_name(value: int) -> str | None:
    """ "put_signal"; None for 0, no operation."""
    name = _native.enum_names("uccl_ep_op", "UCCL_EP_OP_").get(value, f"op_{value}")
    return name.lower() if value else None


def error_record_from(struct: Any) -> errors.ErrorRecord:
    def known(value: int, nothing: int) -> int | None:
        return None if value == nothing else value

    return errors.ErrorRecord(
        status=struct.status,
        rank=known(struct.rank, _native.ANY_RANK),
        peer=known(struct.peer, _native.ANY_RANK),
        channel=known(struct.channel, _native.NO_CHANNEL),
        op=op_name(struct.op),
        ticket=known(struct.ticket, _native.NO_TICKET),
        incarnation=struct.incarnation,
        vendor_code=struct.vendor_code,
        clause=_native.text(struct.clause),
        nic=_native.text(struct.nic),
        text=_native.text(struct.text),
        time_ns=struct.time_ns,
    )


def last_error(status: int) -> errors.UcclEpError:
    """The exception for a call of this thread that has just returned `status`."""
    record = error_record_from(lib.uccl_ep_last_error()[0])
    if record.status != status:
        record = errors.ErrorRecord(status)
    return errors.from_record(record)
