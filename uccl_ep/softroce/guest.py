# SPDX-License-Identifier: Apache-2.0
"""Boot a guest, run a command in it, bring back what it did. Nothing waits without a deadline, nothing stays.

The command sees the machine's files (read-only: what it writes elsewhere stays in the guest's memory) and `/out`, a
folder of this run alone. A line that it writes to /dev/ttyS1 comes here at once. Its exit status is in a file that the
guest's first program writes last: how QEMU ends says nothing, a panic looks like success.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import image
from .image import Image
from .machine import Machine, cache_folder, find

BOOT_SECONDS = 120.0
_KEEPER = Path(__file__).with_name("keeper.py")
_TAIL = 4000
_MAX_LINE = 16 << 20
_KEEPER_SECONDS = 20.0
# nokaslr, norandmaps: code that lies where it did before needs no second translation. maxcpus=1: see init.sh. A panic
# ends QEMU (with -no-reboot). The rest leaves out what costs an emulated boot seconds and a guest of minutes nothing.
_KERNEL_ARGUMENTS = (
    "console=ttyS0 quiet panic=-1 oops=panic nokaslr norandmaps mitigations=off nopti tsc=reliable no_timer_check "
    "maxcpus=1 audit=0 apparmor=0 cryptomgr.notests random.trust_cpu=on init_on_alloc=0 rcupdate.rcu_expedited=1 "
    "nowatchdog"
)


class GuestDied(Exception):
    """No exit status came back. `kind`: boot, hang or died; `console`: its last words."""

    def __init__(self, kind: str, message: str, console: str) -> None:
        super().__init__(message)
        self.kind, self.console = kind, console


@dataclass
class Outcome:
    status: int  # of the command
    stdout: str
    stderr: str
    version: str  # of the guest's kernel
    boot_seconds: float
    seconds: float  # from start to end
    files: dict[str, bytes] = field(default_factory=dict)  # of those asked for, what is there


@dataclass(frozen=True)
class Limits:
    """Seconds: until the guest is up, for the command, and between two of its lines (0: it need not say anything)."""

    run: float
    boot: float = BOOT_SECONDS
    silence: float = 0.0


class Guest:
    """What is booted, looked for once. Raises Missing."""

    def __init__(self, machine: Machine | None = None, made: Image | None = None, *, memory_mb: int = 2048) -> None:
        self._machine = machine if machine is not None else find()
        self._image = made if made is not None else image.prepare(self._machine, cache_folder())
        self._memory = memory_mb
        self.version = self._image.version

    def run(
        self,
        command: str,
        limits: Limits,
        *,
        inputs: Mapping[str, bytes] | None = None,
        outputs: Sequence[str] = (),
        on_line: Callable[[bytes], None] | None = None,
        on_death: Callable[[GuestDied], None] | None = None,
    ) -> Outcome:
        """Run a /bin/sh command. A guest that died, which emulated ones sometimes do, is tried once more; `on_death` is
        told. Raises GuestDied for a second death, and for a guest that hangs."""
        try:
            return self._once(command, limits, inputs or {}, outputs, on_line)
        except GuestDied as death:
            if death.kind != "died":
                raise
            if on_death is not None:
                on_death(death)
        return self._once(command, limits, inputs or {}, outputs, on_line)

    def _once(
        self,
        command: str,
        limits: Limits,
        inputs: Mapping[str, bytes],
        outputs: Sequence[str],
        on_line: Callable[[bytes], None] | None,
    ) -> Outcome:
        with contextlib.ExitStack() as stack:
            folder = Path(tempfile.mkdtemp(prefix="uccl_ep-guest-")).absolute()
            began = time.monotonic()
            run = stack.enter_context(_Run(folder))
            for name, content in {**inputs, "command": command.encode()}.items():
                (run.out / name).write_bytes(content)
            run.start(self._command(folder))
            lines = run.lines(limits, on_line)
            return Outcome(
                status=run.status(lines),
                stdout=run.text("stdout"),
                stderr=run.text("stderr"),
                version=self.version,
                boot_seconds=lines.ready - began,
                seconds=time.monotonic() - began,
                files={name: (run.out / name).read_bytes() for name in outputs if (run.out / name).is_file()},
            )

    def _command(self, folder: Path) -> list[str]:
        def share(tag: str, path: str, more: str = "") -> list[str]:
            name = path.replace(",", ",,")
            return [
                "-fsdev", f"local,id={tag},path={name},security_model=none,multidevs=remap{more}",
                "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}",
            ]  # fmt: skip

        # Without AVX: QEMU 7.2 emulates it wrongly somewhere, and numpy then computes other numbers. Without 5-level
        # paging: slower.
        return [
            str(self._machine.qemu), "-nodefaults", "-no-user-config", "-machine", "q35", "-accel", "tcg,thread=multi",
            "-cpu", "max,la57=off,avx=off,avx2=off", "-smp", str(min(2, len(os.sched_getaffinity(0)))),
            "-m", f"{self._memory}M",
            "-display", "none", "-no-reboot", "-device", "isa-debug-exit,iobase=0xf4,iosize=4",
            "-chardev", f"file,id=console,path={str(folder / 'console').replace(',', ',,')}",
            "-serial", "chardev:console",
            "-chardev", "stdio,id=lines,signal=off", "-serial", "chardev:lines",
            "-kernel", str(self._image.kernel), "-initrd", str(self._image.files), "-append", _KERNEL_ARGUMENTS,
            *share("rootfs", "/", ",readonly=on"), *share("out", str(folder / "out")),
        ]  # fmt: skip


@dataclass
class _Lines:
    ready: float = 0.0  # when; 0: it never came up
    late: str = ""  # which deadline passed


class _Run:
    """One guest and its folder; both are gone at the end of the `with`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self._keeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Run:
        self.out.mkdir()
        return self

    def start(self, command: list[str]) -> None:
        with open(self.folder / "qemu", "wb") as said:
            # Its own session: an interrupt at the terminal ends the owner, and only then the guest.
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_KEEPER), str(self.folder), *command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, cwd="/", start_new_session=True,
            )  # fmt: skip

    def __exit__(self, *_: object) -> None:
        import shutil

        if self._keeper is not None:
            assert self._keeper.stdin is not None
            assert self._keeper.stdout is not None
            self._keeper.stdin.close()
            try:
                self._keeper.wait(_KEEPER_SECONDS)
            except subprocess.TimeoutExpired:
                self._keeper.kill()  # QEMU dies with it
                self._keeper.wait()
            self._keeper.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def lines(self, limits: Limits, on_line: Callable[[bytes], None] | None) -> _Lines:
        """Hand on what the guest says until it ends or a deadline passes."""
        assert self._keeper is not None
        assert self._keeper.stdout is not None
        found = _Lines()
        received = bytearray()
        began = heard = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._keeper.stdout, selectors.EVENT_READ)
            while True:
                now = time.monotonic()
                if not found.ready:
                    end, late = began + limits.boot, f"it was not up after {limits.boot:g} s"
                else:
                    end, late = found.ready + limits.run, f"the command did not end within {limits.run:g} s"
                    if limits.silence and heard + limits.silence < end:
                        end, late = heard + limits.silence, f"nothing was heard of it for {limits.silence:g} s"
                if now >= end:
                    found.late = late
                    return found
                if not selector.select(end - now):
                    continue
                data = os.read(self._keeper.stdout.fileno(), 1 << 16)
                if not data:
                    return found
                heard = time.monotonic()
                received += data
                *whole, rest = bytes(received).split(b"\n")
                received = bytearray(rest)
                if len(received) > _MAX_LINE:
                    found.late = f"it sent more than {_MAX_LINE} bytes without the end of a line"
                    return found
                for line in whole:
                    if not found.ready:
                        found.ready = heard if line.strip() == b"ready" else 0.0
                    elif on_line is not None:
                        on_line(line)

    def status(self, lines: _Lines) -> int:
        if not lines.late:
            with contextlib.suppress(OSError, ValueError):
                return int((self.out / "rc").read_text())
        if lines.late:
            kind = "hang" if lines.ready else "boot"
            raise GuestDied(kind, f"the guest hangs: {lines.late}", self._last_words())
        raise GuestDied("died", "the guest died: it ended without an exit status of the command", self._last_words())

    def _last_words(self) -> str:
        parts = [(name, _tail(self.folder / name)) for name in ("qemu", "console", "out/stdout", "out/stderr")]
        return "\n".join(f"--- {Path(name).name}\n{text}" for name, text in parts if text)

    def text(self, name: str) -> str:
        with contextlib.suppress(OSError):
            return (self.out / name).read_text(errors="replace")
        return ""


def _tail(path: Path) -> str:
    try:
        data = path.read_bytes()[-_TAIL:]
    except OSError:
        return ""
    return data.decode("utf-8", "replace").replace("\r", "").strip()
