# SPDX-License-Identifier: Apache-2.0
"""The interface of backends: ABI-1."""

from __future__ import annotations

import os
import platform
import struct
import tempfile
from pathlib import Path

from uccl_ep._native import lib
from uccl_ep.conformance.context import Context
from uccl_ep.conformance.registry import case
from uccl_ep.errors import AbiMismatch, NotABackend, UcclEpError
from uccl_ep.info import version_pair

from ._tools import neighbours

# The entry returns the address of the table: `lea table(%rip), %rax; ret` and `adr x0, table; ret`.
_CODE = {"x86_64": (62, "48 8d 05 {rel32} c3"), "aarch64": (183, "{adr} c0 03 5f d6")}
_CODE_AT, _TABLE_AT, _DYNAMIC_AT, _SIZE = 0x100, 0x180, 0x400, 0x1000


def _library(major: int, minor: int, size: int = 512) -> bytes:
    """The smallest library that is a backend of version major.minor, as far as a host may look before it knows that.

    Written here byte by byte, since who runs the suite need not have a compiler.
    """
    machine, code = _CODE[platform.machine()]
    name = b"\0uccl_ep_backend_entry\0"
    rel = _TABLE_AT - (_CODE_AT + 7)
    adr = (_TABLE_AT - _CODE_AT) >> 2 << 5 | 0x10000000
    text = bytes.fromhex(code.format(rel32=struct.pack("<i", rel).hex(), adr=struct.pack("<I", adr).hex()))
    strings, symbols, hashes = 0x300, 0x340, 0x380
    image = bytearray(_SIZE)

    def put(at: int, data: bytes) -> None:
        image[at : at + len(data)] = data

    put(0, struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 3, machine, 1, 0, 64, 0, 0, 64, 56, 3, 0, 0, 0))
    put(64, struct.pack("<IIQQQQQQ", 1, 7, 0, 0, 0, _SIZE, _SIZE, 0x1000))  # one segment, all of it
    put(64 + 56, struct.pack("<IIQQQQQQ", 2, 6, _DYNAMIC_AT, _DYNAMIC_AT, _DYNAMIC_AT, 16 * 6, 16 * 6, 8))
    put(64 + 112, struct.pack("<IIQQQQQQ", 0x6474E551, 6, 0, 0, 0, 0, 0, 16))  # the stack is not executable
    put(_CODE_AT, text)
    put(_TABLE_AT, struct.pack("<IHH", size, major, minor))
    put(strings, name)
    put(symbols + 24, struct.pack("<IBBHQQ", 1, 0x12, 0, 1, _CODE_AT, len(text)))
    put(hashes, struct.pack("<IIIII", 1, 2, 1, 0, 0))
    dynamic = [(4, hashes), (5, strings), (6, symbols), (10, len(name)), (11, 24), (0, 0)]
    put(_DYNAMIC_AT, b"".join(struct.pack("<QQ", tag, value) for tag, value in dynamic))
    return bytes(image)


@case("abi1.identity", clauses=("ABI-1",), ranks=(1, 2))
def identity(ctx: Context) -> None:
    """The backend says who it is, for which ABI it was built, and promises what can be."""
    info = ctx.bench.comm.info
    ctx.check(bool(info.backend) and bool(info.backend_version), "ABI-1", "the backend has no name or no version")
    ctx.check(info.backend_abi[0] >= 1, "ABI-1", "the backend tells no ABI", got=str(info.backend_abi))
    ctx.check(bool(info.device.name), "ABI-1", "the device has no name")
    ctx.check(
        not info.device.unusable, "ABI-1", "a device is in use that calls itself unusable", got=info.device.unusable
    )
    caps = info.device.caps
    ctx.check(0 <= caps.completion_level <= 2, "ABI-1", "there is no such completion level", got=caps.completion_level)
    unknown = [name for name in caps.names if name.startswith("bit")]
    ctx.check(not unknown, "ABI-1", "a promise is made that this ABI does not know", got=str(unknown))
    ctx.check(
        caps.max_message_bytes % max(caps.write_alignment, 1) == 0,
        "ABI-1",
        "the largest operation is not aligned as operations must be",
        got=caps.max_message_bytes,
    )
    names = ctx.share([info.backend, info.backend_version, str(info.strategy)])
    ctx.check(all(n == names[0] for n in names), "ABI-1", "ranks see different backends or strategies", got=str(names))


@case("abi1.other_version", clauses=("ABI-1",), ranks=(1,), needs=("processes",))
def other_version(ctx: Context) -> None:
    """A library of another ABI major, or that needs a newer minor, is refused with a message that names both."""
    major, minor = version_pair(lib.uccl_ep_backend_abi())
    if platform.machine() not in _CODE:
        ctx.fail("ABI-1", "the suite cannot make a library for this machine", machine=platform.machine())
    with tempfile.TemporaryDirectory() as folder:
        for other in ((major + 1, 0), (0, 0), (major, minor + 1), (major, 65535), (65535, 65535), (7, 3)):
            path = Path(folder) / f"backend_{other[0]}_{other[1]}.so"
            path.write_bytes(_library(*other))
            with ctx.raises("ABI-1", AbiMismatch, f"a backend of ABI {other[0]}.{other[1]}") as caught:
                ctx.open(backend=path, backend_options="")
            text = str(caught[0])
            for version in (other, (major, minor)):
                ctx.check(
                    f"{version[0]}.{version[1]}" in text, "ABI-1", "the refusal does not name both versions", got=text
                )
        # Of the right version, but a table too short to be one: whatever is wrong, it is an error and no crash.
        path = Path(folder) / "short.so"
        path.write_bytes(_library(major, minor, size=16))
        with ctx.raises("ABI-1", UcclEpError, "a backend whose table holds nothing"):
            ctx.open(backend=path, backend_options="")
    b = ctx.open()
    b.channel().signal(0, 0).wait()
    b.expect_signal(0)


@case("abi1.not_a_backend", clauses=("ABI-1",), ranks=(2,), needs=("processes",))
def not_a_backend(ctx: Context) -> None:
    """A file that is no library, a library that is no backend, and no file at all are refused as such."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.so"
        text.write_text("not a library\n")
        empty = Path(folder) / "empty.so"
        empty.touch()
        libraries = [text, empty, Path(folder) / "absent.so"]
        # Some library of this process that is surely none of ours.
        with open("/proc/self/maps", encoding="utf-8") as maps:
            libraries += [
                Path(line.split(maxsplit=5)[5].strip()) for line in maps if "libc.so" in line or "libm.so" in line
            ][:1]
        for path in libraries:
            with ctx.raises("ABI-1", NotABackend, f"{path.name} as a backend") as caught:
                ctx.open(backend=path, backend_options="")
            ctx.check(
                os.path.basename(path) in str(caught[0]),
                "ABI-1",
                "the refusal does not name the library",
                got=str(caught[0]),
            )
    b = ctx.open()
    to, _ = neighbours(ctx)
    b.channel().signal(to, 0).wait()
    b.expect_signal(0)
