# SPDX-License-Identifier: Apache-2.0
"""Programs of others, two at a time, on the lab's NICs: `pytest tests/system/lab_pairs.py`. Not part of `make test`:
with their threads and the NICs' they want four CPUs."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import subprocess
import time

import pytest

from uccl_ep.lab import Lab, root

from .test_lab import SECONDS, lab_of, libraries, run

__all__ = ["libraries"]


def free_port() -> str:
    """None of those that the kernel gives to whoever asks for any: it is free until the program has it."""
    for port in random.sample(range(20000, 32000), 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return str(port)
    pytest.fail("no port is free")


def pair(lab: Lab, program: str, *words: str, client_words: tuple[str, ...] = ()) -> tuple[str, str]:
    """The same program as server and client: what each said. Both have to end well."""
    if lab.libraries.root is None and shutil.which(program) is None:
        pytest.skip(f"no {program} on this machine")
    theirs = ["-P" if word == "-B" else word for word in words]  # fi_pingpong: one's own port; the other's
    with subprocess.Popen(
        lab.command(program, list(words)),
        env=lab.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        try:
            end = time.monotonic() + SECONDS
            # Until it listens, clients are turned away.
            while True:
                client = run(lab, program, *theirs, *client_words, "127.0.0.1")
                if client.returncode == 0 or server.poll() is not None or time.monotonic() > end:
                    break
            said = server.communicate(timeout=SECONDS)[0]
        finally:
            server.kill()
    assert client.returncode == 0, f"client:\n{client.stdout}{client.stderr}\nserver:\n{said}"
    assert server.returncode == 0, f"server:\n{said}\nclient:\n{client.stdout}{client.stderr}"
    assert "not implemented" not in said + client.stdout + client.stderr
    return said, client.stdout


PORT = "PORT"
PINGPONG = ("-g", "1", "-e", "-c", "-p", PORT)  # -c: checks what arrives; -e: sleeps for completions
POLLING = ("-g", "1", "-c", "-p", PORT)
PERFTEST = ("-F", "-x", "1", "-p", PORT)
# Programs do not pace, and the NIC's profile lets retries run out above 1.5 or 2 MiB in flight.
UNPACED = dict.fromkeys(("pollara", "thor"), "retry_exc_inflight_bytes=0")


@pytest.mark.parametrize(
    ("nic", "which", "program", "words"),
    [
        ("connectx", "machine", "ibv_rc_pingpong", ("-n", "100", *PINGPONG)),
        ("connectx", "root", "ibv_rc_pingpong", ("-n", "100", *PINGPONG)),
        ("connectx", "root", "ibv_ud_pingpong", ("-n", "100", "-s", "1024", *PINGPONG)),
        ("connectx", "root", "ibv_srq_pingpong", ("-n", "100", *PINGPONG)),
        ("connectx", "machine", "ib_write_bw", ("-n", "500", "-s", "4096", *PERFTEST)),
        ("connectx", "root", "ib_write_lat", ("-n", "50", *PERFTEST)),
        ("connectx", "root", "ib_send_bw", ("-n", "500", "-s", "4096", *PERFTEST)),
        ("connectx", "root", "ib_read_bw", ("-n", "500", "-s", "4096", *PERFTEST)),
        ("connectx", "root", "ib_atomic_bw", ("-n", "500", *PERFTEST)),
        ("thor", "machine", "ibv_rc_pingpong", ("-n", "100", *PINGPONG)),
        ("thor", "root", "ibv_rc_pingpong", ("-n", "100", *PINGPONG)),
        ("thor", "root", "ibv_ud_pingpong", ("-n", "100", "-s", "1024", *PINGPONG)),
        ("thor", "root", "ibv_srq_pingpong", ("-n", "100", *PINGPONG)),
        ("thor", "machine", "ib_write_bw", ("-n", "500", "-s", "4096", *PERFTEST)),
        ("thor", "root", "ib_write_bw", ("-n", "500", "-s", "4096", *PERFTEST)),
        ("thor", "root", "ib_write_lat", ("-n", "50", *PERFTEST)),
        ("thor", "root", "ib_send_bw", ("-n", "500", "-s", "4096", *PERFTEST)),
        ("thor", "root", "ib_read_bw", ("-n", "500", "-s", "4096", *PERFTEST)),
        ("thor", "root", "ib_atomic_bw", ("-n", "500", *PERFTEST)),
        ("efa", "root", "fi_pingpong", ("-p", "efa", "-e", "rdm", "-c", "-I", "10", "-S", "4096", "-B", PORT)),
        *(
            (nic, "root", program, words)
            for nic in ("pollara", "pollara-v2")
            for program, words in (
                ("ibv_rc_pingpong", ("-n", "100", *POLLING)),
                ("ibv_ud_pingpong", ("-n", "100", "-s", "1024", *POLLING)),
                ("ib_write_bw", ("-n", "500", "-s", "4096", *PERFTEST)),
                ("ib_write_lat", ("-n", "50", *PERFTEST)),
                ("ib_send_bw", ("-n", "500", "-s", "4096", *PERFTEST)),
                ("ib_read_bw", ("-n", "500", "-s", "4096", *PERFTEST)),
                ("ib_atomic_bw", ("-n", "500", *PERFTEST)),
            )
        ),
    ],
)
def test_two_processes_meet(
    libraries: root.Libraries, nic: str, which: str, program: str, words: tuple[str, ...]
) -> None:
    nic, _, version = nic.partition("-")
    options = {"variant": f"{nic}-{version}"} if version else {}
    if (nic, which) == ("thor", "machine"):
        options = {"variant": "thor"}  # the one that older libraries know
    lab = lab_of(nic, "auto" if which == "root" else which, knobs=UNPACED.get(nic, ""), **options)
    pair(lab, program, *(free_port() if word == PORT else word for word in words))


def test_a_pollara_wakes_who_has_asked(libraries: root.Libraries) -> None:
    """The client alone sleeps: libionic 65 asks for an event only with the next post or poll, and this program, told to
    sleep, does neither before it does as a server."""
    lab = lab_of("pollara", knobs=UNPACED["pollara"])
    pair(lab, "ibv_rc_pingpong", "-n", "100", *(free_port() if w == PORT else w for w in POLLING), client_words=("-e",))
