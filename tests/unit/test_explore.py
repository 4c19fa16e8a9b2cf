# SPDX-License-Identifier: Apache-2.0
"""`uccl-ep explore`: fixed seeds on every profile, wrong programs, and cores that are broken on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from uccl_ep import paths
from uccl_ep.explorer import explore, tool

PROFILES = ("connectx", "connectx-ro", "efa", "efa3", "thor2", "pollara", "pollara-noatomic", "cxi", "strawman-min")


def command(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "uccl_ep", "explore", *arguments],
        capture_output=True, text=True, check=False, timeout=300, env={**os.environ, **(environment or {})}, cwd="/",
    )  # fmt: skip


def silent(*_: Any) -> None:
    pass


def test_all_profiles_are_there() -> None:
    assert tuple(p["name"] for p in tool.listing()["profiles"]) == PROFILES


@pytest.mark.parametrize("faults", [False, True], ids=["plain", "faults"])
@pytest.mark.parametrize("any_nic", [False, True], ids=["vendors", "any"])
def test_fixed_seeds(faults: bool, any_nic: bool) -> None:
    findings: list[Any] = []
    drawn = explore.Drawn(faults=faults, any_nic=any_nic)
    report = explore.random(list(PROFILES), [], 150, 4242, 2, silent, findings.append, drawn)
    assert report.good, findings[0]
    assert [row["seeds"] for row in report.rows] == [150] * len(PROFILES)
    assert all(row["near_wrap"] > 30 for row in report.rows)
    assert (sum(row["resets"] for row in report.rows) > 10) is faults
    assert (sum(row["refused"] for row in report.rows) > 10) is any_nic
    strategies = {name for row in report.rows for name in row["strategies"]}
    assert strategies >= {"ordered_atomic", "sequenced_immediate", "sender_hold", "sender_hold_mailbox",
                          "sender_hold_sum"}  # fmt: skip


def test_a_seed_is_a_run_in_every_process() -> None:
    told = [tool.run(tool.Job.of("replay", profile="efa3", seed=99)) for _ in range(2)]
    assert told[0] == told[1]
    assert told[0]["hash"] != tool.run(tool.Job.of("replay", profile="efa3", seed=100))["hash"]


def test_report_and_exit_status(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = command("--profile", "cxi", "--seeds", "50", "--json", str(report))
    assert done.returncode == 0, done.stderr
    assert "no forbidden outcome" in done.stdout
    written = json.loads(report.read_text())
    assert (written["schema"], written["mode"], written["good"]) == ("uccl_ep.explore/1", "random", True)
    assert written["results"][0]["seeds"] == 50


def test_a_program_from_a_file(tmp_path: Path) -> None:
    program = tmp_path / "program.txt"
    program.write_text("ranks 2\nr0: signal 0 ->1 s0\nr1: wait s0 2  # one too many\n")
    done = command("--profile", "efa", "--seed", "7", "--program", str(program))
    assert done.returncode == 1
    assert "stuck PRG-1" in done.stdout
    program.write_text("ranks 2\nr0: jump\n")
    done = command("--profile", "efa", "--seed", "7", "--program", str(program))
    assert done.returncode == 2
    assert "no operation 'jump'" in done.stderr


def test_knobs_of_a_campaign() -> None:
    done = command("--profile", "efa", "--seeds", "20", "--knobs", "imm_bits=0")
    assert done.returncode == 1
    assert "--profile efa --seed 1 --knobs imm_bits=0" in done.stdout
    again = command("--profile", "efa", "--seed", "1", "--knobs", "imm_bits=0")
    assert again.returncode == 1
    assert "no signal strategy works" in again.stdout
    done = command("--profile", "efa", "--seeds", "20", "--knobs", "max_wr=1,delay=10")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("--profile", "efq"), ("--program", "mq"), ("--seeds", "0"), ("--json", "/"), ("--choices", "0"), ("--hash",),
        ("--events",), ("--runs", "5"), ("--wrong", "--faults"), ("--exhaustive", "--wrong"), ("--knobs", "max_seg=1"),
    ],
)  # fmt: skip
def test_wrong_command_lines(arguments: tuple[str, ...]) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_wrong_programs() -> None:
    report = explore.wrong(["connectx", "efa", "efa3"], [], tool.listing(), 60, 1, 2, silent)
    assert report.good, [row for row in report.rows if not row["good"]]
    caught = {(row["name"], row["profile"]) for row in report.rows if row["caught"]}
    assert ("wrong-flag", "efa") in caught
    assert ("wrong-flag", "connectx") not in caught


def test_exhaustive() -> None:
    small = ["put-signal", "mp", "quiet-then-third"]
    report = explore.exhaust(["connectx", "cxi"], small, tool.listing(), 3000, 2, silent, silent)
    assert report.good
    assert len(report.rows) == 6
    assert all(row["complete"] for row in report.rows)
    assert "at most 0 pieces landed twice" in report.summary()
    # On a NIC without any order all schedules are too many: the report says how far it came.
    report = explore.exhaust(["efa"], ["chain"], tool.listing(), 1000, 2, silent, silent, duplicates=1)
    assert report.good
    assert not report.rows[0]["complete"]
    assert report.rows[0]["reversed"] >= 1
    assert (report.rows[0]["duplicates"], report.rows[0]["lost_doorbells"]) == (1, 0)


@pytest.mark.parametrize(
    ("programs", "events"),
    [(("signal", "put", "source"), False), (("signal", "put", "source", "reuse"), True)],
    ids=["interleavings", "events"],
)
def test_little_programs_are_complete_on_every_nic(programs: tuple[str, ...], events: bool) -> None:
    """The others of that name, and those of up to six operations, are the nightly script's: docs/model.md."""
    names = [f"little-{name}" for name in programs]
    report = explore.exhaust(list(PROFILES), names, tool.listing(), 4000, 2, silent, silent, events=events)
    assert report.good
    assert len(report.rows) == len(PROFILES) * len(names)
    assert [row for row in report.rows if not row["complete"]] == []


# Fault point, profile, and the clauses that may be named: what is broken shows in more than one way.
BROKEN = [
    ("signal_before_put", "connectx", {"SIG-2", "SIG-3"}),
    ("signal_not_held", "cxi", {"SIG-2", "SIG-3"}),
    ("signals_reordered", "connectx", {"SIG-5", "SIG-2", "SIG-3"}),
    ("mailbox_unsequenced", "efa", {"SIG-2", "SIG-3", "SIG-5"}),
    ("source_at_take", "efa", {"QUI-0"}),
    ("complete_at_submit", "efa", {"QUI-1", "QUI-2", "QUI-5", "QUI-0", "SIG-1", "SIG-4", "PUT-5", "PUT-7"}),
    ("quiet_one_channel", "efa", {"QUI-2", "QUI-0", "PUT-5", "PUT-7", "QUI-1", "SIG-1", "SIG-4"}),
    ("merge_across_gap", "connectx", {"PUT-1", "SIG-2", "SIG-3", "QUI-1", "QUI-2", "MEM-2"}),
    ("signal_lost_in_batch", "connectx", {"SIG-1", "SIG-4", "SIG-5", "PRG-1", "QUI-1", "QUI-2"}),
]


# The same by exhaustive search: a fault point, profile, a program that is small, and the clause.
BROKEN_ON_SOME_SCHEDULE = [
    ("signal_before_put", "connectx", "mp", "SIG-2"),
    ("signal_not_held", "cxi", "mp", "SIG-2"),
    ("mailbox_unsequenced", "efa", "mp", "SIG-2"),
    ("signals_reordered", "connectx", "order", "SIG-5"),
    ("source_at_take", "efa", "source", "QUI-0"),
    ("complete_at_submit", "efa", "quiet-then-third", "QUI-5"),
    ("quiet_one_channel", "efa", "quiet-all", "QUI-2"),
    ("transmit_is_visible", "cxi", "quiet-then-third", "QUI-5"),
    ("two_sums_in_flight", "strawman-min", "order", "SIG-1"),
]


@pytest.mark.parametrize(
    ("fault", "profile", "program", "clause"), BROKEN_ON_SOME_SCHEDULE, ids=[b[0] for b in BROKEN_ON_SOME_SCHEDULE]
)
def test_a_broken_core_is_found_by_exhaustive_search(fault: str, profile: str, program: str, clause: str) -> None:
    explorer = paths.library_dir() / "uccl-ep-explore"
    done = subprocess.run(
        [str(explorer), str(tool.simulator()), "exhaustive", f"profile={profile}", f"program={program}", "runs=20000",
         "shrink=0"],
        capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "LD_LIBRARY_PATH": str(paths.mutation_dir()), "UCCL_EP_FAULT_POINTS": fault},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["finding"]
    assert (found["outcome"], found["clause"]) == ("forbidden", clause)


@pytest.mark.parametrize(("fault", "profile", "clauses"), BROKEN, ids=[b[0] for b in BROKEN])
def test_a_broken_core_is_found(fault: str, profile: str, clauses: set[str]) -> None:
    program = paths.library_dir() / "uccl-ep-explore"
    done = subprocess.run(
        [str(program), str(tool.simulator()), "random", f"profile={profile}", "seeds=2000", "seed=1", "shrink=60"],
        capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "LD_LIBRARY_PATH": str(paths.mutation_dir()), "UCCL_EP_FAULT_POINTS": fault},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["outcome"] in ("forbidden", "stuck")
    assert found["clause"] in clauses
    assert found["shrunk"]["clause"] == found["clause"]
    assert len(found["shrunk"]["program"]) <= len(found["program"])
