# SPDX-License-Identifier: Apache-2.0
"""Guests, booted: the devices and the wire between them, deaths, the suite in the lane `softroce`, and a rank that is
not ours. Everything here shares two cores with an emulator, so it is little; tools/nightly.sh runs the rest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from uccl_ep.softroce import Guest, GuestDied, Missing, wire
from uccl_ep.softroce.guest import Limits

if TYPE_CHECKING:
    from conftest import Conformance

HERE = Path(__file__).with_name("softroce")
pytestmark = pytest.mark.required_in_ci


@pytest.fixture(scope="module")
def guest() -> Guest:
    try:
        return Guest()
    except Missing as missing:
        pytest.skip(str(missing))


def python(program: str | Path, *words: str) -> str:
    """A line for the guest's shell: this Python, from a folder without a source tree."""
    return f"cd /; exec {sys.executable} {program} {' '.join(words)}\n"


WIRE = """
import json, sys
from uccl_ep.softroce import wire
import subprocess
wire.lay()
before = wire.counted()
words = ["-x", "1", "-s", "4096", "-n", "200"]
server = subprocess.Popen(["ib_write_bw", "-d", "rxe1", *words], stdout=subprocess.DEVNULL)
for attempt in range(100):
    client = subprocess.run(
        ["ib_write_bw", "-d", "rxe0", *words, "127.0.0.1"], capture_output=True, text=True
    )
    if client.returncode == 0 or server.poll() is not None:
        break
found = {"before": before, "after": wire.counted(), "said": client.stdout + client.stderr, "server": server.wait(60)}
found["devices"] = subprocess.run(["ibv_devinfo"], capture_output=True, text=True).stdout
json.dump(found, open("/out/found", "w"))
"""


def test_two_devices_and_a_wire_that_packets_cross(guest: Guest) -> None:
    heard: list[bytes] = []
    done = guest.run(
        f"echo here > /dev/ttyS1; {python('/out/program')}",
        Limits(run=200),
        inputs={"program": WIRE.encode()},
        outputs=("found",),
        on_line=heard.append,
    )
    assert done.status == 0, done.stdout + done.stderr
    assert heard == [b"here"]
    found = json.loads(done.files["found"])
    assert found["server"] == 0, found["said"]
    assert found["devices"].count("PORT_ACTIVE") == 2
    crossed = found["after"]["v0"]["tx_packets"] - found["before"]["v0"]["tx_packets"]
    assert crossed >= 200, found


def test_a_panic_is_told_with_the_guests_last_words_after_a_second_try(guest: Guest) -> None:
    deaths: list[GuestDied] = []
    with pytest.raises(GuestDied, match="without an exit status") as caught:
        guest.run("echo begun; echo c > /proc/sysrq-trigger; sleep 100", Limits(run=60), on_death=deaths.append)
    assert len(deaths) == 1
    assert "sysrq triggered crash" in caught.value.console
    assert "begun" in caught.value.console


def test_a_command_that_hangs_is_ended_at_its_deadline(guest: Guest) -> None:
    began = time.monotonic()
    with pytest.raises(GuestDied, match="did not end within 1 s") as caught:
        guest.run("echo begun; sleep 1000", Limits(run=1))
    assert caught.value.kind == "hang"
    assert "begun" in caught.value.console
    assert time.monotonic() - began < 200


def _emulators() -> set[str]:
    """The processes whose files are those of a guest's run in a folder of ours."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(Path.cwd()).encode() in words and b"isa-debug-exit" in words:
                found.add(entry.name)
    return found


def test_nothing_of_a_guest_outlives_who_started_it(guest: Guest) -> None:
    program = """
import tempfile
from uccl_ep.softroce import Guest
from uccl_ep.softroce.guest import Limits
tempfile.tempdir = "."
Guest().run("echo up > /dev/ttyS1; sleep 1000", Limits(run=1000), on_line=lambda line: print(line.decode(), flush=True))
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        folders = list(Path.cwd().glob("uccl_ep-guest-*"))
        assert len(folders) == 1
        assert _emulators()
        owner.send_signal(signal.SIGKILL)
    end = time.monotonic() + 60
    while _emulators() or folders[0].exists():
        assert time.monotonic() < end, "a guest outlived its owner"
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------------------------ the suite


def _good(report: dict[str, Any], said: str) -> None:
    bad = [(case["id"], case["detail"]) for case in report["cases"] if case["status"] not in ("pass", "not_supported")]
    assert not bad, f"{bad}\n{said}"
    assert report["lane"] == "softroce"
    assert report["wire"]["counted"]["rxe0"]["sent_pkts"] > 0
    assert report["wire"]["counted"]["v0"]["tx_packets"] > 100


def test_connectx_conforms_at_level_core(guest: Guest, conformance: Conformance, tmp_path: Path) -> None:
    page, junit = tmp_path / "page.html", tmp_path / "junit.xml"
    status, report, said = conformance(
        "--backend", "connectx", "--lane", "softroce", "--ranks", "2", "--html", str(page), "--junit", str(junit),
        timeout=1800,
    )  # fmt: skip
    _good(report, said)
    assert status == 0, said
    assert report["labels"] == ["Soft-RoCE", "limits only"]
    assert "limits only" in page.read_text()
    assert "softroce" in junit.read_text()


# What loses packets where it matters: signals behind puts, words that many add to, quiets, large messages.
SELECTED = ("sig1.exact_sum", "sig2.many_puts", "sig5.*", "sig7.*", "qui1.visible*", "put1.sizes", "err3.signal*")


def test_connectx_conforms_on_a_wire_that_loses(guest: Guest, conformance: Conformance) -> None:
    words = [word for glob in SELECTED for word in ("--case", glob)]
    status, report, said = conformance(
        "--backend", "connectx", "--lane", "softroce", "--impair", "--ranks", "2", *words, timeout=900
    )
    _good(report, said)
    assert status == 0, said
    assert wire.bitten(report["wire"]["counted"]), report["wire"]
    assert any("the wire lost" in note for note in report["notes"])


@pytest.mark.parametrize("backend", ["thor", "pollara"])
def test_the_limits_of_other_vendors_hold_on_the_same_wire(
    backend: str, guest: Guest, conformance: Conformance
) -> None:
    status, report, said = conformance(
        "--backend", backend, "--lane", "softroce", "--ranks", "2", "--case", "sig2.sizes", "--case", "sig1.exact_sum",
        "--case", "qui1.visible*", "--case", "err5.killed_in_traffic", timeout=900,
    )  # fmt: skip
    _good(report, said)
    assert status == 0, said
    assert "limits only" in report["labels"]


# ------------------------------------------------------------------------------------------- a rank that is not ours


def _check_traffic(found: dict[str, Any]) -> None:
    watched, theirs = found["watched"], found["theirs"]
    assert (watched["seen"], watched["wrong"], watched["outside"]) == (120, [], 0)
    assert watched["words"] == [0, 0, 0, 120, *[0] * 12]
    assert theirs == {"done": 120, "statuses": {"0": 120}}
    assert (found["wrong"], found["word"]) == ([], 120)


def test_a_rank_written_with_pyverbs_sees_and_says_the_same(guest: Guest) -> None:
    """On a good wire, then on one that loses; and what goes wrong there is an error with the vendor's code."""
    if not os.path.isdir("/usr/lib/python3/dist-packages/pyverbs"):
        pytest.skip("the system's Python has no pyverbs (Debian: apt-get install python3-pyverbs)")
    backends = ("connectx", "thor")
    done = guest.run(python(HERE / "ours.py", "/out/found", *backends), Limits(run=600), outputs=("found",))
    assert done.status == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.files["found"])
    for backend in backends:
        _check_traffic(found[backend]["traffic"])
        for how, error, code in (
            ("bad-key", "RegistrationError", 10), ("silent", "PeerLost", 12), ("killed", "PeerLost", 12),
        ):  # fmt: skip
            told = found[backend]["failures"][how]
            assert (told["error"], told["vendor_code"], told["peer"]) == (error, code, 1), (how, told)
            assert told["own_rank"] == 1, (how, told)
            assert told["seconds"] < 30, (how, told)  # the deadline
    _check_traffic(found["impaired"]["traffic"])
    assert wire.bitten(found["impaired"]["wire"]), found["impaired"]["wire"]
