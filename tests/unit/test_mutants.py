# SPDX-License-Identifier: Apache-2.0
"""The mutants' own machinery: what counts as a kill, and that a mutant can survive."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from uccl_ep import Communicator, paths
from uccl_ep.bootstrap import SingleProcess
from uccl_ep.conformance.registry import CLAUSES, load
from uccl_ep.conformance.results import CaseResult
from uccl_ep.errors import CommandError, NotABackend
from uccl_ep.lab import root
from uccl_ep.mutants import runner
from uccl_ep.mutants.programs import PROGRAMS
from uccl_ep.mutants.registry import MUTANTS, Mutant, by_name
from uccl_ep.mutants.worker import faulty, is_kill

# What the suite must be shown to notice, at least.
NEEDED = {
    "PUB-1", "PUB-2", "PUT-1", "PUT-4", "SIG-1", "SIG-2", "SIG-5", "QUI-0", "QUI-1", "QUI-2", "QUI-5", "LIM-1", "PRG-2",
    "PRG-3", "ERR-2", "ERR-3", "ERR-4", "ERR-5", "ERR-6", "MEM-1", "MEM-2", "ABT-1", "ABI-1",
}  # fmt: skip
BACKEND = "libuccl_ep_backend_mutant.so"


def table(header: Path) -> set[tuple[str, str]]:
    """(fault, clause) of an X table."""
    return set(re.findall(r'X\((\w+), "([A-Z]+-\d)", "', header.read_text()))


def test_registry_is_what_can_be_broken(checkout: Path) -> None:
    for place, header in (("core", "csrc/core/fault_point.h"), ("nic", "csrc/mutation/mutant.h")):
        # The same point may break other clauses on other NICs.
        of_place = [m for m in MUTANTS if m.place == place and (place == "core" or not m.profile)]
        known = table(checkout / header)
        assert {m.fault for m in of_place} == {fault for fault, _ in known}
        assert {(m.fault, m.clause) for m in of_place} >= known
    assert {(m.fault, m.clause) for m in MUTANTS if m.place == "program"} == {
        (name, clause) for name, (clause, _) in PROGRAMS.items()
    }
    vendors = [m for m in MUTANTS if m.place == "vendor"]
    assert {(m.fault, m.clause) for m in vendors} <= table(checkout / "csrc/backends/verbs/fault.h")
    assert all(m.vendor and m.says for m in vendors), "the vendor's words are what kills"


def test_clauses() -> None:
    assert {m.clause for m in MUTANTS} >= NEEDED
    assert {m.clause for m in MUTANTS} <= set(CLAUSES)
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)


def test_cases_to_begin_with_are_there_and_cite_the_clause() -> None:
    cases = {case.id: case for case in load()}
    for mutant in MUTANTS:
        for name in mutant.first:
            case = cases[name.partition("@")[0]]
            assert mutant.clause in case.clauses, (mutant.name, name)
            assert "@" not in name or case.weak, (mutant.name, name)


def test_names() -> None:
    core = ["core.complete_at_submit", "core.complete_at_submit@efa3"]
    assert [m.name for m in by_name("complete_at_submit")] == ["nic.complete_at_submit", *core]
    assert [m.name for m in by_name("core.complete_at_submit")] == core
    assert [m.name for m in by_name("core.complete_at_submit@efa3")] == core[1:]
    assert by_name("no_such") == []


@pytest.mark.parametrize(
    ("status", "message", "kills", "kills_if_about_hanging"),
    [
        ("pass", "", False, False),
        ("fail", "a signal is visible and the bytes before it are not", True, True),
        ("fail", "unexpected DeadlineExceeded: E_DEADLINE: ...", False, True),
        ("timeout", "not finished after 20 s", False, True),
        ("crash", "rank 1 died of signal SIGSEGV", False, False),
        ("internal_error", "AssertionError", False, False),
        ("not_supported", "the NIC does not promise it", False, False),
    ],
)
def test_what_kills(status: str, message: str, kills: bool, kills_if_about_hanging: bool) -> None:
    result = CaseResult("sig2.x", "", ("SIG-2",), "core", status, 0.1, {"message": message}, 2)
    assert is_kill(result, False) is kills
    assert is_kill(result, True) is kills_if_about_hanging


@pytest.mark.parametrize(
    ("status", "message", "recorded", "kills"),
    [
        ("fail", "unexpected NicError: posting: Invalid argument (errno 22)", [], True),
        ("fail", "unexpected ChannelClosed: see errors()", ["posting: Invalid argument (errno 22)"], True),
        ("fail", "a signal is visible and the bytes before it are not", ["something else"], False),
        ("timeout", "not finished after 20 s (errno 22)", [], False),
    ],
)
def test_a_mutant_of_the_vendors_is_killed_by_the_vendors_words_alone(
    status: str, message: str, recorded: list[str], kills: bool
) -> None:
    result = CaseResult("sig2.x", "", ("SIG-2",), "core", status, 0.1, {"message": message, "recorded": recorded}, 2)
    assert is_kill(result, False, "(errno 22)") is kills


def test_what_has_no_library_here_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root, "choose", lambda nic, which: (_ for _ in ()).throw(root.Missing(f"no library of {nic}")))
    vendors = [m for m in MUTANTS if m.vendor]
    told = runner.left_out(vendors)
    assert set(told) == {m.name for m in vendors}
    assert all("is missing" in why or "no library of" in why for why in told.values())
    with pytest.raises(runner.MutantsError):
        runner.run(vendors, [1], jobs=1, progress=lambda *_: None)


def run(mutant: Mutant) -> runner.Verdict:
    (verdict,) = runner.run([mutant], [1], jobs=1, progress=lambda *_: None).verdicts
    return verdict


def test_a_mutant_that_breaks_nothing_survives() -> None:
    verdict = run(Mutant("nic", "none", "QUI-4", "nothing"))
    assert not verdict.killed
    assert "survived on seed 1" in verdict.why_not


def test_a_baseline_that_is_not_clean_is_no_kill() -> None:
    (signal_lost,) = by_name("nic.signal_lost")
    verdict = run(replace(signal_lost, nic=f"{signal_lost.nic},fault=signal_lost"))
    assert not verdict.killed
    assert verdict.why_not.startswith("not clean without the fault: sig1.back_to_back")


def test_a_worker_that_breaks_is_told() -> None:
    verdict = run(Mutant("core", "no_such_point", "QUI-4", "nothing"))
    assert not verdict.killed
    assert "no fault point 'no_such_point'" in verdict.why_not


def test_the_product_has_no_fault_points() -> None:
    point = b"UCCL_EP_FAULT_POINTS"
    assert point not in paths.core_library().read_bytes()
    assert point in (paths.mutation_dir() / "libuccl_ep.so.0").read_bytes()
    for name in ("efa", "pollara"):
        product = paths.library_dir() / f"libuccl_ep_backend_{name}.so"
        if product.is_file():
            assert b"UCCL_EP_BACKEND_FAULT" not in product.read_bytes()
            assert b"UCCL_EP_BACKEND_FAULT" in faulty(name).read_bytes()


def open_with(options: str) -> Communicator:
    return Communicator(
        SingleProcess(), heap_bytes=1 << 16, backend=paths.library_dir() / BACKEND, backend_options=options, timeout=5.0
    )


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ("fault=signal_misplaced", CommandError, "signal_lost, "),
        ("lazy=soon", CommandError, "lazy=soon"),
        ("again=100", CommandError, "up to 95"),
        ("real=no_such_backend", NotABackend, "no_such_backend"),
        ("promise=the_moon", CommandError, "promise=the_moon"),  # for the real backend, which has no such promise
    ],
)
def test_backend_refuses(options: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        open_with(options)


@pytest.mark.parametrize(
    "options", ["", "real=shm,promise=unordered", "room=1,lazy=50", "lazy=300,partial=50,again=50"]
)
@pytest.mark.parametrize("disorder", [0, 1])
def test_backend_without_a_fault_is_one(options: str, disorder: int) -> None:
    with open_with(f"{options},disorder={disorder},seed=7") as comm:
        channel = comm.channel(0)
        for k in range(50):
            comm.heap[k * 64 : k * 64 + 64] = k
            channel.put_signal(0, k * 64, 32768 + k * 64, 64, 0)
            seen = comm.wait_signal(0, k + 1)
            assert seen == k + 1
            assert (comm.heap[32768 + k * 64 : 32768 + k * 64 + 64] == k).all()
        comm.quiet()
        assert comm.read_signal(0) == 50


def test_command_line(tmp_path: Path) -> None:
    def uccl_ep(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "uccl_ep", "mutants", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "COLUMNS": "20"},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    listed = uccl_ep("--list")
    assert listed.returncode == 0
    *lines, count = listed.stdout.splitlines()
    assert count == f"{len(MUTANTS)} mutants"
    assert [line.split()[0] for line in lines[::2]] == [m.name for m in MUTANTS], "whole, to be copied for --only"
    wrong = uccl_ep("--only", "nic.signal_lots")
    assert wrong.returncode == 2
    assert "nic.signal_lost" in wrong.stderr
    one = uccl_ep("--only", "core.abi_not_checked", "--seeds", "1", "--json", "-")
    assert one.returncode == 0, one.stderr
    assert '"score": 1.0' in one.stdout
    assert "mutation score 1.000: 1 of 1 mutants" in one.stderr


def test_an_interrupt_is_told_and_costs_no_report(tmp_path: Path) -> None:
    code = """if True:
        import sys, typer
        from uccl_ep.mutants import cli, runner
        def run(chosen, seeds, *, jobs, progress):
            progress("mutants", 1, len(chosen), None)
            raise KeyboardInterrupt
        runner.run = run
        typer.run(cli.mutants)
    """
    done = subprocess.run(
        [sys.executable, "-c", code, "--json", "report.json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 130
    assert f"interrupted after 1 of {len(MUTANTS)} mutants; no report is written" in done.stderr
    assert list(tmp_path.iterdir()) == []
