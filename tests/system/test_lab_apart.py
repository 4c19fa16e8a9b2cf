# SPDX-License-Identifier: Apache-2.0
"""The lab's programs and the rest of the machine: users without rights, strangers at the same time, what is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from uccl_ep import paths
from uccl_ep.lab import root

from .lab_pairs import free_port, pair
from .test_lab import SECONDS, lab_of, libraries

__all__ = ["libraries"]
pytestmark = [
    pytest.mark.required_in_ci,
    pytest.mark.skipif(
        not (paths.library_dir() / "libuccl_ep_lab.so").is_file(), reason="built without the kernel's headers"
    ),
]


def test_an_ordinary_user(libraries: root.Libraries, tmp_path: Path) -> None:
    """Without any of root's rights, and with an empty cache."""
    words = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"] if os.geteuid() == 0 else []
    told = os.environ | {"UCCL_EP_CACHE_DIR": str(tmp_path)}

    def run(*command: str) -> str:
        done = subprocess.run(
            [*words, *command], env=told, cwd="/", capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "CapEff:\t0000000000000000" in run("cat", "/proc/self/status")
    uccl_ep = (sys.executable, "-m", "uccl_ep", "lab")
    assert "--variant cx7" in run(*uccl_ep, "list")
    if shutil.which("ibv_devinfo") is None:
        pytest.skip("no ibv_devinfo on this machine")
    said = run(*uccl_ep, "run", "--nic", "connectx", "--libraries", "machine", "--count", "2", "--", "ibv_devinfo")
    assert said.count("PORT_ACTIVE") == 2


def test_strangers_do_not_disturb_each_other(libraries: root.Libraries) -> None:
    """Two pairs of programs on NICs of one kind, and one on another's, at the same time; each checks its data."""

    def meet(nic: str) -> None:
        lab = lab_of(nic, knobs="retry_exc_inflight_bytes=0" if nic == "thor" else "")
        pair(lab, "ibv_rc_pingpong", "-g", "1", "-e", "-c", "-n", "20", "-p", free_port())

    with ThreadPoolExecutor(3) as pool:
        for met in [pool.submit(meet, nic) for nic in ("connectx", "thor", "connectx")]:
            met.result()


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, "it ended"
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)


def sockets(fabric: str) -> list[str]:
    """Names, without a file, under which its programs find each other."""
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if f"/{fabric}/" in line]


def test_of_a_program_that_is_killed_nothing_is_left(libraries: root.Libraries) -> None:
    """Whatever it holds has no name in any folder, so nothing can stay: looked at in the program itself, since others
    make and remove files, too."""
    lab, port = lab_of("connectx"), free_port()
    fabric = lab.spec.partition("fabric=")[2].partition(",")[0]
    listens = f":{int(port):04X}"
    command = lab.command("ibv_rc_pingpong", ["-g", "1", "-p", port])
    with subprocess.Popen(command, env=lab.environment(), stdout=subprocess.DEVNULL, text=True) as process:
        try:
            tables = [Path(f"/proc/{process.pid}/net/{name}") for name in ("tcp", "tcp6")]
            until(lambda: any(listens in table.read_text() for table in tables if table.exists()), process)
            held = [os.readlink(fd) for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
            assert len(sockets(fabric)) == 1
            maps = [line.split(maxsplit=5) for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
        finally:
            process.send_signal(signal.SIGKILL)
    written = [line[5] for line in maps if len(line) > 5 and "s" in line[1] and "w" in line[1]]
    for name in [*held, *written]:
        gone = name.endswith(" (deleted)") or name.startswith(("/memfd:", "anon_inode:", "socket:", "pipe:"))
        assert gone or not name.startswith(("/dev/shm", "/tmp", "/run", "/var")), name
    assert not sockets(fabric)
