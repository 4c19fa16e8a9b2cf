# SPDX-License-Identifier: Apache-2.0
"""Libraries that are no backend, and backends that break their interface: a typed error, and everybody else goes on."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from uccl_ep import Communicator, backends
from uccl_ep._core import lib
from uccl_ep.errors import (
    AbiMismatch,
    BackendFault,
    CapabilityError,
    CommandError,
    DeadlineExceeded,
    ErrorRecord,
    NicError,
    NotABackend,
    PeerLost,
    RegistrationError,
    UcclEpError,
)

from .outside import COMMAND, EXAMPLE, HERE, build, needs_compiler, run
from .ranks import Footprint, Member, Ranks, facts_of
from .traffic import Exchange, make

pytestmark = needs_compiler
Library = Callable[..., Path]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Compiles the broken backend, once for each way in which it does not load."""
    folder = tmp_path_factory.mktemp("broken")
    made: dict[str, Path] = {}

    def one(how: str = "") -> Path:
        if how not in made:
            flags = [f"-I{EXAMPLE}", "-Wno-unused-function", *([f"-D{how}"] if how else [])]
            made[how] = build(folder, HERE / "broken_backend.c", f"lib{how.lower() or 'broken'}.so", *flags)
        return made[how]

    return one


# ------------------------------------------------------------------------------------------------------- does not load

MAJOR, MINOR = divmod(lib.uccl_ep_backend_abi(), 1 << 16)
HAS = f"has {MAJOR}.{MINOR}"
LOADS: dict[str, tuple[type[UcclEpError], tuple[str, ...]]] = {
    "TABLE_NEWER_MINOR": (AbiMismatch, (f"needs backend ABI {MAJOR}.{MINOR + 1}", HAS, "install a newer uccl_ep")),
    "TABLE_NEWER_MAJOR": (AbiMismatch, (f"needs backend ABI {MAJOR + 1}.0", HAS, "install a newer uccl_ep")),
    "TABLE_OLDER_MAJOR": (AbiMismatch, (f"needs backend ABI {MAJOR - 1}.0", HAS, "rebuild the backend")),
    "TABLE_LACKS_SUBMIT": (NotABackend, ("lacks the required function submit",)),
    "TABLE_LACKS_NAME": (NotABackend, ("no name or version",)),
    "TABLE_SHORT": (NotABackend, ("64 bytes", "rebuild it")),
    "TABLE_NULL": (NotABackend, ("gave no backend table",)),
    "TABLE_NO_ENTRY": (NotABackend, ("does not export uccl_ep_backend_entry",)),
}


def test_ranks_with_one_backend_of_two_interface_versions(broken: Library) -> None:
    """ABI-1, L9: each would do by itself; together they are refused, both versions named."""
    libraries = [broken(""), broken("TABLE_OTHER_MINOR")]

    def program(member: Member) -> None:
        with pytest.raises(UcclEpError) as refused:
            make(member.bootstrap, backend=libraries[member.rank])
        member.say("refused", **facts_of(refused.value))

    with Ranks(2, program) as ranks:
        for child in ranks.join_well().values():
            said = child.saw("refused")
            assert said
            for part in ("interface version", f"{MAJOR << 16 | MINOR}", "all ranks must agree"):
                assert part in said["text"], said


@pytest.mark.parametrize("how", LOADS)
def test_a_library_that_is_no_backend_for_us(broken: Library, how: str) -> None:
    """ABI-1: refused by create on all ranks and by the command line, naming the file and what to do."""
    kind, parts = LOADS[how]
    library = broken(how)

    def program(member: Member) -> None:
        before = Footprint()
        with pytest.raises(kind) as refused:
            make(member.bootstrap, backend=library if member.rank == 1 else "shm")
        member.say("refused", **facts_of(refused.value))
        assert not before.leaks(), before.leaks()
        make(member.bootstrap).close()  # and the process goes on

    with Ranks(2, program) as ranks:
        for child in ranks.join_well().values():
            said = child.saw("refused")
            assert said
            assert all(part in said["text"] for part in parts), said
            assert said["clause"] == "ABI-1"
            assert library.name in said["text"]
    seen = run(library.parent, COMMAND, "devices", "--backend", f"./{library.name}", "--json")
    assert seen.returncode == 1
    (problem,) = json.loads(seen.stdout)["problems"]
    assert all(part in problem["problem"] for part in parts), problem


@pytest.mark.parametrize("content", [b"", b"int x;\n", b"\x7fELF", None], ids=["empty", "text", "half", "folder"])
def test_a_file_that_is_no_library(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "libnic.so"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(NotABackend) as refused:
        backends.probe(backends.find(path).library)
    assert "libnic.so" in refused.value.record.text


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotABackend, match="no such file"):
        backends.find(tmp_path / "libnic.so")
    for command in (("devices", "--backend", "./libnic.so"), ("conformance", "--library", "./libnic.so")):
        done = run(tmp_path, COMMAND, *command)
        assert done.returncode in (1, 2)
        assert "libnic.so" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


ENDS = {
    "TABLE_CRASHES": "signal (11|SIGSEGV)",
    "TABLE_EXITS": "3",
    "TABLE_EXITS_WITH_0": "0",
    "TABLE_ENTRY_EXITS": "4",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_library_that_ends_the_process(broken: Library, how: str) -> None:
    """M3: looked at in a process of its own first; one line of cause, no traceback, and no broken report."""
    library = broken(how)
    cause = rf"(ended with |killed by |exit status |\(){ENDS[how]}"
    with pytest.raises(BackendFault, match=cause) as refused:
        backends.probe_apart(library)
    assert library.name in refused.value.record.text
    devices = run(library.parent, COMMAND, "devices", "--backend", f"./{library.name}", "--json")
    assert devices.returncode == 1
    (problem,) = json.loads(devices.stdout)["problems"]
    assert re.search(cause, problem["problem"]), problem
    assert not devices.stderr
    report = library.parent / f"{how}.json"
    suite = run(library.parent, COMMAND, "conformance", "--library", f"./{library.name}", "--json", report)
    assert suite.returncode == 2
    (line,) = suite.stderr.splitlines()
    assert re.search(cause, line), line
    assert library.name in line
    assert not report.exists() or not report.read_text() or json.loads(report.read_text())


def test_a_library_that_talks_is_taken(broken: Library) -> None:
    library = broken("TABLE_PRINTS")
    assert backends.probe_apart(library).name == "minimal"
    seen = run(library.parent, COMMAND, "devices", "--backend", f"./{library.name}", "--json")
    assert seen.returncode == 0
    assert json.loads(seen.stdout)["devices"]


def test_a_library_that_hangs(broken: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_PROBE_SECONDS", 1.0)
    with pytest.raises(BackendFault, match="did not answer within"):
        backends.probe_apart(broken("TABLE_HANGS"))


def test_a_table_of_a_later_minor_that_asks_for_no_more_is_taken(broken: Library) -> None:
    assert backends.probe(broken("TABLE_LONG")).name == "minimal"


def test_texts_of_a_device_that_never_end(broken: Library) -> None:
    """Character arrays full to the last byte are cut, not read beyond."""

    def program(member: Member) -> None:
        comm = make(member.bootstrap, backend=broken(), backend_options="break=unterminated")
        seen = [comm.info.device, *backends.probe(broken()).devices]
        assert len(seen) == 2
        for device in seen:
            texts = (device.name, device.vendor, device.model, device.firmware, device.address, device.unusable)
            assert all(len(set(text)) <= 1 for text in texts), texts
        assert len(seen[1].name) == 63
        comm.close()

    with Ranks(1, program) as ranks:
        ranks.join_well()


# ---------------------------------------------------------------------------------------------- breaks in the beginning

CREATES: dict[str, tuple[type[UcclEpError], tuple[str, ...]]] = {
    "open_unknown": (BackendFault, ("opening the NIC", "-1", "author")),
    "open_positive": (BackendFault, ("opening the NIC", "42", "author")),
    "open_binary_text": (NicError, ("opening the NIC", "%n%s")),
    "open_null_text": (NicError, ("opening the NIC", "vendor's code")),
    "device_null": (BackendFault, ("no device", "author")),
    "memory_null": (BackendFault, ("no memory that starts at a page", "author")),
    "memory_misaligned": (BackendFault, ("no memory that starts at a page", "author")),
    "endpoint_null": (BackendFault, ("no endpoint", "author")),
    "address_too_long": (BackendFault, ("more than a blob holds",)),
    "pair_too_long": (BackendFault, ("17 bytes as its address for a peer",)),
    "pair_empty": (BackendFault, ("0 bytes as its address for a peer",)),
    "pair_varies": (BackendFault, ("5 bytes as its address for a peer", "the same for all")),
    "pair_refused": (NicError, ("reading an endpoint's address for a peer",)),
    "region_too_long": (BackendFault, ("more than a blob holds",)),
    "region_huge": (BackendFault, ("more than a blob holds",)),
    "connect_in_progress": (BackendFault, ("connecting", "IN_PROGRESS")),
    "connect_never": (DeadlineExceeded, ("rank 2 did not connect",)),
    # What a broken peer sends is refused by its receivers.
    "region_garbage": (UcclEpError, ("reaching the memory of a peer",)),
    "region_empty": (CommandError, ("reaching the memory of a peer", "do all ranks run the same one?")),
    # Promises that the core cannot live with.
    "coarse_alignment": (CapabilityError, ("64", "granularity")),
    "transmitted_only": (CapabilityError, ("completions that are, or can be made, visible",)),
    "two_ranks_at_most": (CapabilityError, ("3 ranks", "reaches 2")),
    "small_regions": (RegistrationError, ("registers at most 8192",)),
}


@pytest.mark.parametrize("how", CREATES)
def test_a_backend_that_breaks_in_the_beginning(broken: Library, how: str) -> None:
    """Rank 0's NIC is broken: all ranks are told which rank and why, nothing remains, and a healthy start follows."""
    kind, parts = CREATES[how]
    library = broken()

    def program(member: Member) -> None:
        before = Footprint()
        options = f"break={how}" if member.rank == 0 else ""
        begin = time.monotonic()
        with pytest.raises(kind) as refused:
            make(member.bootstrap, backend=library, backend_options=options, bootstrap_timeout=4.0)
        assert time.monotonic() - begin < 20
        member.say("refused", **facts_of(refused.value))
        assert not before.leaks(), before.leaks()
        comm = make(member.bootstrap, backend=library)
        exchange = Exchange(member, comm)
        for _ in range(3):
            exchange.round()
        comm.quiet()
        comm.barrier()
        comm.close()

    with Ranks(3, program) as ranks:
        for child in ranks.join_well().values():
            said = child.saw("refused")
            assert said
            assert all(part in said["text"] for part in parts), said
            # Whoever found it is named to the others. (All ranks weigh promises, each for itself.)
            if how not in ("region_garbage", "region_empty", "transmitted_only"):
                assert child.rank == 0 or said["text"].startswith("rank 0: "), said


# ------------------------------------------------------------------------------------------- breaks in the middle of it

BREAKS = {  # the record of the failure: its status, and a part of its text
    "submit_unknown": ("E_BACKEND", "towards rank"),
    "submit_positive": ("E_BACKEND", "towards rank"),
    "accepted_too_many": ("E_BACKEND", "towards rank"),
    "accepted_garbage": ("E_BACKEND", "towards rank"),
    "poll_too_many": ("E_BACKEND", "have room: report it to the backend's author"),
    "poll_far_too_many": ("E_BACKEND", "2147483647 completions where"),
    "poll_broken": ("E_NIC", "it is on fire"),
    "poll_unknown": ("E_BACKEND", "poll() gave unknown (-5)"),
    "never_completes": ("E_PEER_LOST", "no completion for 500 ms"),
}


def put_until_refused(comm: Communicator) -> None:
    for number in range(100_000):
        comm.channel(0).put_signal(1 + number % 2, 0, 1 << 16, 4096, slot=60)
        comm.quiet(timeout=15)


def the_others(member: Member, comm: Communicator) -> None:
    """Ranks 1 and 2, whose NICs are well, go on between themselves."""
    other = 3 - member.rank
    for number in range(1, 201):
        comm.heap[:64] = number % 251
        comm.channel(0).put_signal(other, 0, 4096, 64, slot=61)
        comm.wait_signal(61, number, source=other)
        assert (comm.heap[4096:4160] == number % 251).all()
        comm.quiet()
        comm.channel(0).signal(other, 62)
        comm.wait_signal(62, number, source=other)
    assert not comm.errors()


@pytest.mark.parametrize("how", BREAKS)
def test_a_backend_that_breaks_in_the_middle(broken: Library, how: str) -> None:
    """Rank 0's NIC breaks its interface: rank 0 gets a typed error in time, its process lives, the others go on."""
    status, part = BREAKS[how]
    library = broken()

    def program(member: Member) -> None:
        before = Footprint()
        options = f"break={how}" if member.rank == 0 else ""
        comm = make(member.bootstrap, backend=library, backend_options=options, peer_timeout=0.5)
        comm.barrier()
        if member.rank == 0:
            begin = time.monotonic()
            with pytest.raises(UcclEpError) as failed:
                put_until_refused(comm)
            assert time.monotonic() - begin < 30
            # A wait that covers it is told of it; who comes after it is refused, and finds it among the errors.
            assert failed.value.name in (status, "E_CLOSED"), failed.value
            first = comm.errors()[0]
            assert (first.name, first.nic) == (status, "minimal0"), first
            assert part in first.text, first
            assert first.peer is not None
            assert first.vendor_code == (5 if how == "poll_broken" else 0)
            with pytest.raises(UcclEpError):
                comm.channel(0).put(first.peer, 0, 0, 16)
        else:
            the_others(member, comm)
        member.bootstrap.barrier(40.0)
        comm.close()
        assert not before.leaks(), before.leaks()
        make(member.bootstrap, backend=library).close()

    with Ranks(3, program) as ranks:
        ranks.join_well()


@pytest.mark.parametrize(("how", "status"), [("disconnect_never", "E_NIC"), ("disconnect_refused", "E_BACKEND")])
def test_a_nic_that_does_not_let_go(broken: Library, how: str, status: str) -> None:
    """A peer is lost and its operations cannot be taken back: closing the endpoint makes the sources safe (ERR-2)."""

    def program(member: Member) -> None:
        before = Footprint()
        options = f"break={how}" if member.rank == 0 else ""
        comm = make(member.bootstrap, backend=broken(), backend_options=options, peer_timeout=0.5)
        comm.barrier()
        if member.rank == 0:
            begin = time.monotonic()
            with pytest.raises(PeerLost) as lost:
                put_until_refused(comm)
            assert lost.value.record.peer in (1, 2)
            other = 3 - lost.value.record.peer
            records: list[ErrorRecord] = []
            while not records and time.monotonic() - begin < 20:
                records = [record for record in comm.errors() if record.name == status and record.peer == other]
            assert records, comm.errors()
            assert f"did not let go of rank {lost.value.record.peer}" in records[0].text
            with pytest.raises(UcclEpError):
                comm.channel(0).put(other, 0, 0, 16).wait(timeout=15)
        else:
            the_others(member, comm)
        member.bootstrap.barrier(40.0)
        comm.close()
        assert not before.leaks(), before.leaks()

    with Ranks(3, program) as ranks:
        ranks.join_well()


@pytest.mark.parametrize("how", ["garbage_completions", "completes_twice", "garbage_events"])
def test_a_backend_that_says_too_much(broken: Library, how: str) -> None:
    """Completions of nothing, twice, and events about nobody: counted, and otherwise without effect."""

    def program(member: Member) -> None:
        comm = make(member.bootstrap, backend=broken(), backend_options=f"break={how}")
        exchange = Exchange(member, comm)
        for _ in range(40):
            exchange.round()
        exchange.check_guards()
        comm.quiet()
        comm.barrier()
        assert not comm.errors()
        assert not comm.lost
        stale = sum(proxy["stale"] for proxy in comm.stats()["proxies"])
        assert (stale > 0) == (how != "garbage_events"), stale
        comm.close()

    with Ranks(3, program) as ranks:
        ranks.join_well()
