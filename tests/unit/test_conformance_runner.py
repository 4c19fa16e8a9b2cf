# SPDX-License-Identifier: Apache-2.0
"""The runner of the conformance suite judges its cases rightly, whatever they do, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from uccl_ep.conformance import Options, files, junit, registry, run_suite, runner, scorecard, waivers
from uccl_ep.conformance.context import Context
from uccl_ep.conformance.errors import SuiteError
from uccl_ep.conformance.group import Group, GroupOutcome
from uccl_ep.conformance.registry import Case, RegistryError
from uccl_ep.conformance.worker import run_rank


def go(function: Callable[[Context], None], ranks: int = 2, timeout: float = 10.0, **overrides: Any) -> GroupOutcome:
    """Run one function as a case on the shm backend."""
    case = Case("put1.test", function, ("PUT-1", "SIG-2"), ranks=(ranks,), timeout=timeout, comm=overrides)

    def main(rank: int, sock: socket.socket) -> None:
        run_rank(case, rank, ranks, sock, seed=3, backend={"backend": "shm"}, time_scale=1.0)

    return Group(ranks, main, deadline=timeout).run()


@pytest.fixture(autouse=True)
def nothing_remains() -> Iterator[None]:
    """No child and no descriptor is left by any of these tests."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 1


# ------------------------------------------------------------------------------------------------------------ verdicts


def test_pass() -> None:
    def case(ctx: Context) -> None:
        ctx.check(ctx.share(ctx.rank) == [0, 1, 2], "PUT-1", "shared")

    outcome = go(case, 3)
    assert (outcome.status, outcome.ranks, outcome.checks) == ("pass", ["pass"] * 3, 3)


def test_fail_cites_its_clause_and_values() -> None:
    def case(ctx: Context) -> None:
        ctx.barrier()
        ctx.check(ctx.rank == 0, "SIG-2", "rank one is wrong", got=float("nan"), where=b"x")
        ctx.barrier()

    outcome = go(case)
    assert outcome.status == "fail"
    assert outcome.detail["clause"] == "SIG-2"
    assert outcome.detail["message"] == "rank one is wrong"
    assert outcome.detail["rank"] == 1
    assert outcome.detail["values"]["got"] == "nan"
    assert "test_conformance_runner.py" in outcome.detail["at"]
    json.dumps(outcome.detail, allow_nan=False)


def test_the_others_do_not_blame_the_failed_rank() -> None:
    """Those that wait for the rank that failed are let go, and are not counted as failures of their own."""

    def case(ctx: Context) -> None:
        b = ctx.bench
        if ctx.rank == 0:
            ctx.fail("PUT-1", "the cause")
        b.wait_signal(0, 1)

    outcome = go(case)
    assert outcome.detail["message"] == "the cause"
    assert "fail" not in outcome.ranks[1:]


@pytest.mark.parametrize("how", ["abort", "exit", "segfault"])
def test_crash(how: str) -> None:
    def case(ctx: Context) -> None:
        ctx.barrier()
        if ctx.rank == 1:
            print("last words", flush=True)
            if how == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGABRT if how == "abort" else signal.SIGSEGV)
        ctx.barrier()

    outcome = go(case)
    assert outcome.status == "crash"
    assert outcome.detail["rank"] == 1
    assert (
        outcome.detail["died_of"]
        == {"abort": "signal SIGABRT", "exit": "exit status 3", "segfault": "signal SIGSEGV"}[how]
    )
    assert "last words" in outcome.detail["output"]


def test_timeout_is_reported_with_what_hangs() -> None:
    def case(ctx: Context) -> None:
        b = ctx.bench
        if ctx.rank == 1:
            b.comm.wait_signal(7, 1, timeout=60)

    # Long enough that both have come to their wait, on any machine.
    outcome = go(case, timeout=6)
    assert outcome.status == "timeout"
    assert "comm0" in outcome.detail["report"]["1"]
    assert "wait_signal" in outcome.detail["stacks"]["1"]
    assert outcome.seconds < 30


def test_timeout_that_a_rank_notices_first() -> None:
    """Its clock may be ahead of the runner's: the others are asked where they are all the same."""

    def case(ctx: Context) -> None:
        b = ctx.bench
        if ctx.rank == 1:
            b.channel().signal(0, 0)
            b.comm.wait_signal(7, 1, timeout=60)
        b.wait_signal(0, 1)
        ctx.deadline = ctx.now()
        ctx.barrier()

    outcome = go(case, timeout=60)
    assert outcome.status == "timeout"
    assert outcome.detail["rank"] == 0
    assert "comm0" in outcome.detail["report"]["1"]
    assert "case" in outcome.detail["stacks"]["1"]
    assert outcome.seconds < 30


def test_timeout_of_a_rank_that_holds_the_interpreter() -> None:
    """It cannot answer, and still its stack is told."""

    def hold_on(ctx: Context) -> None:
        if ctx.rank == 1:
            ctypes.PyDLL(None).sleep(60)

    outcome = go(hold_on, timeout=4)
    assert outcome.status == "timeout"
    assert "hold_on" in outcome.detail["stacks"]["1"]
    assert outcome.seconds < 30


def test_timeout_of_a_rank_that_is_stopped() -> None:
    def case(ctx: Context) -> None:
        ctx.barrier()
        if ctx.rank == 0:
            ctx.stop(1)
        ctx.barrier()

    assert go(case, timeout=1.0).status == "timeout"


def test_not_supported() -> None:
    def case(ctx: Context) -> None:
        ctx.not_supported("cuda_memory", "there is none here")

    outcome = go(case)
    assert (outcome.status, outcome.detail["capability"]) == ("not_supported", "cuda_memory")


def test_a_mistake_of_the_suite_is_no_failure_of_the_backend() -> None:
    def wrong(ctx: Context) -> None:
        raise KeyError("oops")

    def undeclared(ctx: Context) -> None:
        ctx.check(True, "ERR-1", "this case says nothing of ERR-1")

    def deserter(ctx: Context) -> None:
        if ctx.rank:
            ctx.barrier()

    for case in (wrong, undeclared, deserter):
        outcome = go(case)
        assert outcome.status == "internal_error", outcome
        assert "Traceback" in outcome.detail["trace"]


def test_an_unexpected_error_of_the_library_is_a_failure() -> None:
    def case(ctx: Context) -> None:
        ctx.bench.channel().put(99, 0, 0, 16)

    outcome = go(case)
    assert (outcome.status, outcome.detail["clause"]) == ("fail", "PUT-1")
    assert "CommandError" in outcome.detail["message"]


# ---------------------------------------------------------------------------------------------- what every case checks


def test_stray_bytes_and_signals_are_seen_without_an_assertion() -> None:
    def bytes_(ctx: Context) -> None:
        b = ctx.bench
        ctx.checked()
        if ctx.rank == 0:
            b.channel().put(1, 0, 4096, 16)

    def signal_(ctx: Context) -> None:
        b = ctx.bench
        ctx.checked()
        b.channel().signal(1 - ctx.rank, 63)

    outcome = go(bytes_)
    assert (outcome.status, outcome.detail["clause"], outcome.detail["rank"]) == ("fail", "PUT-1", 1)
    assert outcome.detail["values"]["first_at"] == 4096
    outcome = go(signal_)
    assert (outcome.status, outcome.detail["clause"]) == ("fail", "SIG-1")


def test_threads_and_descriptors_that_remain_are_seen() -> None:
    def descriptor(ctx: Context) -> None:
        ctx.bench.comm.quiet()
        ctx.checked()
        os.open("/dev/null", os.O_RDONLY)

    def thread(ctx: Context) -> None:
        ctx.checked()
        ctx.spawn(lambda: time.sleep(30))

    for case in (descriptor, thread):
        outcome = go(case)
        assert (outcome.status, outcome.detail["clause"]) == ("fail", "ABT-1")
        assert "remain" in outcome.detail["message"]


def test_an_error_is_asked_for_by_kind() -> None:
    from uccl_ep.errors import CommandError, PeerLost

    def nothing(ctx: Context) -> None:
        with ctx.raises("PUT-1", CommandError, "a call"):
            pass

    def another(ctx: Context) -> None:
        with ctx.raises("PUT-1", PeerLost, "a call"):
            ctx.bench.channel().put(99, 0, 0, 16)

    assert "not refused" in go(nothing).detail["message"]
    outcome = go(another)
    assert "another error" in outcome.detail["message"]
    assert outcome.detail["values"]["want"] == "PeerLost"


# ------------------------------------------------------------------------------------------------------ the other ranks


def test_kill_stop_resume_and_survivors() -> None:
    def case(ctx: Context) -> None:
        ctx.barrier()
        if ctx.rank == 0:
            ctx.stop(1)
            ctx.resume(1)
            ctx.kill(2)
        if ctx.rank == 2:
            ctx.sleep(20)
        ctx.check(ctx.share(ctx.rank, [0, 1]) == [0, 1], "PUT-1", "the survivors meet")

    outcome = go(case, 3)
    assert (outcome.status, outcome.ranks) == ("pass", ["pass", "pass", "killed"])


def test_pause_ends_by_itself() -> None:
    def case(ctx: Context) -> None:
        if ctx.rank == 1:
            began = ctx.now()
            ctx.stop(1, resume_after=0.2)
            ctx.until(lambda: ctx.now() - began >= 0.2)
        ctx.checked()
        ctx.barrier()

    assert go(case).status == "pass"


def test_meetings_of_the_case_and_of_a_communicator_are_apart() -> None:
    def case(ctx: Context) -> None:
        if ctx.rank == 0:
            with contextlib.suppress(TimeoutError):
                ctx.bootstrap().allgather(b"bootstrap", 0.3)
        ctx.check(ctx.allgather(b"case") == [b"case"] * 2, "PUT-1", "a meeting took the data of another one")

    assert go(case).status == "pass"


def alive(pid: int) -> bool:
    """Whoever inherits a dead process may bury it later."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_children_of_a_rank_end_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"

    def case(ctx: Context) -> None:
        if ctx.rank == 0:
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            note.write_text(str(child))
        ctx.checked()
        ctx.barrier()

    go(case)
    pid = int(note.read_text())
    end = time.monotonic() + 30
    while alive(pid):
        assert time.monotonic() < end, "it lives on"
        time.sleep(0.01)


def test_nested_groups() -> None:
    def inner(sub: Context) -> None:
        sub.checked()
        sub.kill(1) if sub.rank == 0 else sub.sleep(20)

    def case(ctx: Context) -> None:
        outcome = ctx.run_group(2, inner)
        ctx.check_equal(outcome.ranks, ["pass", "killed"], "PUT-1", "nested ranks")

    assert go(case, 1).status == "pass"


# -------------------------------------------------------------------------------------------------- registry and runner


def _write_cases(folder: Path, body: str) -> Path:
    cases = folder / "cases"
    cases.mkdir()
    (cases / "__init__.py").write_text("")
    (cases / "some.py").write_text(
        "from uccl_ep.conformance.registry import case\n" + textwrap.dedent(body), encoding="utf-8"
    )
    return cases


SOME = """
    @case("put1.good", clauses=("PUT-1",), ranks=(1,))
    def good(ctx):
        "A good one."
        ctx.checked()

    @case("put1.bad", clauses=("PUT-1",), ranks=(1,))
    def bad(ctx):
        "A bad one."
        ctx.check(False, "PUT-1", "<b>wrong</b> \\x00")

    @case("sig2.empty", clauses=("SIG-2",), ranks=(1,))
    def empty(ctx):
        "Asserts nothing."

    @case("mem1.cuda", clauses=("MEM-1",), ranks=(1,), requires=("cuda_memory",))
    def cuda(ctx):
        "Needs what the NIC does not promise."
        ctx.checked()

    @case("mem1.liar", clauses=("MEM-1",), ranks=(1,))
    def liar(ctx):
        "Gives up on what the NIC does promise."
        ctx.bench
        ctx.not_supported("atomic_add64", "it does not work")

    @case("qui1.full", clauses=("QUI-1",), ranks=(1,), level="full")
    def full(ctx):
        "Only at level full."
        ctx.checked()

    @case("prg1.elsewhere", clauses=("PRG-1",), ranks=(1,), needs=("virtual_time",))
    def elsewhere(ctx):
        "Needs another lane."
        ctx.checked()

    @case("err1.crash", clauses=("ERR-1",), ranks=(1,))
    def crash(ctx):
        "Crashes."
        import os
        os.abort()
"""


def run_some(tmp_path: Path, *arguments: str, body: str = SOME) -> tuple[int, dict[str, Any], str]:
    """Through the command line, in a process of its own: the registry is one a process."""
    cases = _write_cases(tmp_path, body)
    report = tmp_path / "report.json"
    code = "from uccl_ep.conformance.cli import conformance; import typer; typer.run(conformance)"
    done = subprocess.run(
        [sys.executable, "-c", code, "--json", str(report), "--seed", "1", *arguments],
        env={**os.environ, registry.CASES_ENVIRONMENT: str(cases)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    text = report.read_text() if report.exists() else ""
    return done.returncode, json.loads(text) if text else {}, done.stdout + done.stderr


def test_statuses_report_and_exit_status(tmp_path: Path) -> None:
    page, xml = tmp_path / "page.html", tmp_path / "junit.xml"
    status, report, said = run_some(tmp_path, "--html", str(page), "--junit", str(xml))
    assert status == 1
    assert {c["id"]: c["status"] for c in report["cases"]} == {
        "put1.good": "pass",
        "put1.bad": "fail",
        "sig2.empty": "internal_error",
        "mem1.cuda": "not_supported",
        "mem1.liar": "fail",
        "err1.crash": "crash",
    }
    assert report["schema"] == "uccl_ep.conformance/1"
    assert report["not_in_lane"] == ["prg1.elsewhere"]
    assert report["summary"] == {
        "pass": 1, "fail": 2, "crash": 1, "timeout": 0, "not_supported": 1, "waived": 0, "internal_error": 1,
    }  # fmt: skip
    for key in ("backend", "lane", "profile", "capabilities", "strategy", "seed", "environment", "verdict"):
        assert key in report
    assert report["verdict"] == "does not conform"
    assert "atomic_add64 is promised, but refused" in said
    assert "Traceback" not in said
    assert "replay: uccl-ep conformance --backend shm --level full --seed 1 --case put1.bad" in said
    shown = said[said.index("fail put1.bad") :].splitlines()
    assert "    rank: 0" in shown
    assert any(line.startswith("    at: ") and "some.py" in line for line in shown)

    html = page.read_text()
    assert "&lt;b&gt;wrong&lt;/b&gt;" in html
    assert "<script" not in html
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert "does not conform" in html
    suite = ET.parse(xml).getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors"), suite.get("skipped")) == (
        "6",
        "2",
        "2",
        "1",
    )


def test_level_globs_and_clauses(tmp_path: Path) -> None:
    status, report, _ = run_some(tmp_path, "--level", "full", "--case", "put1.g*", "--case", "qui*")
    assert status == 0
    assert [c["id"] for c in report["cases"]] == ["put1.good", "qui1.full"]
    assert report["partial"] is True
    missing = len(registry.CLAUSES) - 2
    assert report["verdict"] == f"no verdict: only some cases were run, and {missing} clauses not at all"


def test_a_clause_without_a_case_leaves_no_verdict(tmp_path: Path) -> None:
    """Nobody picked cases, and still the contract was not looked at: it must not be said to hold."""
    page = tmp_path / "page.html"
    body = SOME[: SOME.index('    @case("put1.bad"')]
    status, report, said = run_some(tmp_path, "--html", str(page), body=body)
    assert (status, report["partial"], report["summary"]["pass"]) == (0, False, 1)
    assert report["verdict"] == f"no verdict: {len(registry.CLAUSES) - 1} clauses have no case"
    assert "conforms" not in said
    assert f'<div class="verdict mild">{report["verdict"]}</div>' in page.read_text()


def test_waivers(tmp_path: Path) -> None:
    tomorrow, yesterday = (datetime.date.today() + datetime.timedelta(days=d) for d in (1, -1))
    entry = '[[waiver]]\ncase = "{}"\nowner = "ann"\nreason = "known"\nlink = "https://example.org/1"\nexpiry = {}\n'
    file = tmp_path / "waivers.toml"
    file.write_text(
        entry.format("put1.b*", tomorrow) + entry.format("err1.*", yesterday) + entry.format("nobody", tomorrow)
    )
    status, report, said = run_some(tmp_path, "--waivers", str(file))
    found = {c["id"]: c["status"] for c in report["cases"]}
    assert (found["put1.bad"], found["err1.crash"]) == ("waived", "crash")
    assert status == 1
    assert "waiver for nobody (ann) matched no failure" in said
    assert f"waiver: expired on {yesterday} and counts for nothing: ann, https://example.org/1" in said
    assert f"waiver for err1.* (ann) expired on {yesterday}\n" in said
    bad = next(c for c in report["cases"] if c["id"] == "put1.bad")
    assert bad["detail"]["waived_status"] == "fail"
    assert bad["detail"]["waiver"]["owner"] == "ann"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[waiver]]\ncase = 'x'", "missing"),
        ("[[waiver]", "not TOML"),
        ("a = 1", "nothing else"),
        ("[[waiver]]\ncase='x'\nowner='o'\nreason='r'\nlink='l'\nexpiry='soon'", "not a date"),
        ("[[waiver]]\ncase='x'\nowner='o'\nreason='r'\nlink='l'\nexpiry=2030-01-01\nforever=true", "unknown"),
    ],
)
def test_wrong_waivers_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "waivers.toml"
    file.write_text(text)
    with pytest.raises(SuiteError, match=said):
        waivers.read(file)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--backend", "shn"], "'shm'"),
        (["--lane", "foo"], "valid: gpu, provider, shm, sim, softroce"),
        (["--level", "ful"], "did you mean 'full'"),
        (["--seed", "-1"], "valid: 0"),
        (["--ranks", "0"], "valid: 1 to 8"),
        (["--ranks", "99999"], "valid: 1 to 8"),
        (["--profile", "efa"], "has no profiles"),
        (["--clause", "SIG-9"], "SIG-"),
        (["--case", "put1.goood"], "did you mean 'put1.good'"),
        (["--case", "put1"], "try 'put1.*'"),
        (["--case", "mem1.cu"], "try 'mem1.cu*'"),
        (["--case", "qui1.full"], "is of --level full"),
        (["--case", "put1.*", "--clause", "ERR-1"], "cites none of these clauses"),
        (["--list", "--case", "sig2"], "try 'sig2.*'"),
        (["--library", "/nonexistent.so"], "no such file"),
        (["--html", "/nonexistent/x.html"], "No such file"),
        (["--backend-options", "speed=high"], "promise="),
        (["--strategy", "sender-holt"], "sender_hold"),
        (["--mutants-json", "/nonexistent.json"], "No such file"),
    ],
)
def test_wrong_options_are_refused_in_a_line(tmp_path: Path, arguments: list[str], said: str) -> None:
    status, report, text = run_some(tmp_path, *arguments)
    assert status == 2, text
    assert not report
    assert said in text.replace("\n", " ")
    assert "Traceback" not in text
    assert len(text.strip().splitlines()) <= 2


def test_a_library_that_is_no_backend(tmp_path: Path) -> None:
    fake = tmp_path / "fake.so"
    fake.write_bytes(b"\x7fELF but no more")
    status, _, text = run_some(tmp_path, "--library", str(fake))
    assert status == 2
    assert "fake.so" in text
    assert "Traceback" not in text


def test_a_library_that_ends_the_process(tmp_path: Path) -> None:
    """What a stranger's library does happens in a process that can be spared."""
    source, library = tmp_path / "exits.c", tmp_path / "exits.so"
    source.write_text("#include <stdlib.h>\nconst void *uccl_ep_backend_entry(void) { exit(3); }\n")
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    status, report, text = run_some(tmp_path, "--library", str(library))
    assert status == 2
    assert not report
    assert "ended the process" in text
    assert "Traceback" not in text


def test_list_runs_nothing(tmp_path: Path) -> None:
    status, report, text = run_some(tmp_path, "--list")
    assert (status, report) == (0, {})
    assert "put1.good" in text
    assert "qui1.full" not in text


@pytest.mark.parametrize("columns", ["20", "80"])
def test_every_listed_id_stands_whole(columns: str) -> None:
    """Two lines a case, the variants among them, however narrow the terminal."""
    code = "from uccl_ep.conformance.cli import conformance; import typer; typer.run(conformance)"
    done = subprocess.run(
        [sys.executable, "-c", code, "--list", "--level", "full"],
        env={**os.environ, "COLUMNS": columns}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    *lines, count = done.stdout.splitlines()
    cases = registry.load()
    twice = [c for c in cases if c.weak]
    assert twice
    ids = sorted([c.id for c in cases] + [f"{c.id}@unordered" for c in twice])
    assert sorted(line.split()[0] for line in lines[::2]) == ids
    assert all(line.startswith("    ") for line in lines[1::2])
    assert f"{len(cases)} cases, and {len(twice)} again" in count


SLOW = """
    @case("put1.good", clauses=("PUT-1",), ranks=(1,))
    def good(ctx):
        "A good one."
        ctx.checked()

    @case("put2.slow", clauses=("PUT-2",), ranks=(1,), timeout=60)
    def slow(ctx):
        "Waits to be interrupted."
        ctx.bench.comm.wait_signal(0, 1, timeout=50)
"""


def test_an_interrupt_is_told_and_costs_no_report(tmp_path: Path) -> None:
    cases = _write_cases(tmp_path, SLOW)
    old, new = tmp_path / "old.json", tmp_path / "new.html"
    old.write_text("of before")
    code = "from uccl_ep.conformance.cli import conformance; import typer; typer.run(conformance)"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code, "--json", str(old), "--html", str(new)],
        env={**os.environ, registry.CASES_ENVIRONMENT: str(cases)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("pass"), "the first case"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert said.splitlines() == ["uccl-ep conformance: interrupted after 1 case; no report is written"]
    assert old.read_text() == "of before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cases", "old.json"]


def test_report_files_are_replaced_whole(tmp_path: Path) -> None:
    report, link = tmp_path / "report", tmp_path / "link"
    link.symlink_to(report)
    files.check_writable(link)
    assert not report.exists()
    files.write(link, b"one")
    report.chmod(0o640)
    with open(report, "rb") as before:
        files.write(link, b"two")
        assert before.read() == b"one", "a reader of the old one keeps it"
    assert (report.read_bytes(), report.stat().st_mode & 0o777, link.is_symlink()) == (b"two", 0o640, True)
    files.write(Path(os.devnull), b"gone")
    assert Path(os.devnull).is_char_device()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "report"]
    with pytest.raises(IsADirectoryError):
        files.check_writable(tmp_path)


def test_json_on_standard_output(tmp_path: Path) -> None:
    cases = _write_cases(tmp_path, SOME)
    code = "from uccl_ep.conformance.cli import conformance; import typer; typer.run(conformance)"
    done = subprocess.run(
        [sys.executable, "-c", code, "--json", "-", "--case", "put1.good"],
        env={**os.environ, registry.CASES_ENVIRONMENT: str(cases), "LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout)["summary"]["pass"] == 1


def test_stop_at_failure(tmp_path: Path) -> None:
    _, report, _ = run_some(tmp_path, "--stop-at-failure")
    assert [c["id"] for c in report["cases"] if c["status"] != "pass"] == ["put1.bad"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"id": "Nonsense", "clauses": ("PUT-1",)},
        {"id": "put1.x", "clauses": ()},
        {"id": "put1.x", "clauses": ("PUT-99",)},
        {"id": "put1.x", "clauses": ("PUT-1",), "ranks": (16,)},
        {"id": "put1.x", "clauses": ("PUT-1",), "level": "some"},
    ],
)
def test_wrong_declarations_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(RegistryError):
        registry.case(**arguments)(lambda ctx: None)


def test_ranks_for() -> None:
    case = Case("put1.x", lambda ctx: None, ("PUT-1",), ranks=(2, 4, 8))
    assert [case.ranks_for(n) for n in (1, 2, 3, 4, 7, 8)] == [2, 2, 2, 4, 4, 8]


# ------------------------------------------------------------------------------------------------------- the real suite


def test_the_suite_covers_the_contract() -> None:
    """At least 45 cases, each clause cited by one that is about it, each with a title."""
    cases = registry.load()
    assert len(cases) >= 45
    cited = {clause for c in cases for clause in c.clauses}
    assert cited == set(registry.CLAUSES)
    core = {clause for c in cases if c.level == "core" for clause in c.clauses}
    assert core == set(registry.CLAUSES)
    assert [c.id for c in cases if c.title == c.id] == []
    assert {8} <= {max(c.ranks) for c in cases}


def test_clauses_are_those_of_the_contract(request: pytest.FixtureRequest) -> None:
    contract = request.config.rootpath / "docs" / "contract.md"
    if not contract.is_file():
        pytest.skip("no docs/ here: not a checkout")
    import re

    written = set(re.findall(r"^(?:- |#+ |\*\*)?\**([A-Z]{3}-\d)\b", contract.read_text(), re.M))
    assert written == set(registry.CLAUSES)


def test_library_use_and_mutation_score(tmp_path: Path) -> None:
    result = run_suite(Options(seed=5, cases=("put6.alone", "sig7.strategy")))
    assert not result.failed
    assert result.backend["name"] == "shm"
    mutants = tmp_path / "mutants.json"
    listed = [
        {"name": "a", "clause": "SIG-2", "killed": True},
        {"name": "survivor", "clause": "PUT-1", "killed": False},
    ]
    mutants.write_text(json.dumps({"schema": "uccl_ep.mutants/1", "score": 0.5, "mutants": listed}))
    result.mutation = scorecard.read_mutants(mutants)
    html = scorecard.render(result)
    assert "0.50" in html
    assert "survivor" in html
    junit.write(result, tmp_path / "junit.xml")
    ET.parse(tmp_path / "junit.xml")
    mutants.write_text("{}")
    with pytest.raises(SuiteError, match="mutants"):
        scorecard.read_mutants(mutants)


def test_the_same_seed_makes_the_same_choices() -> None:
    def case(ctx: Context) -> None:
        ctx.checked()
        ctx.notes = {"drawn": [int(ctx.rng.integers(1 << 30)), int(ctx.shared_rng.integers(1 << 30))]}

    assert go(case).notes == go(case).notes


def test_probe_refuses_in_one_line() -> None:
    with pytest.raises(SuiteError, match="promise"):
        runner.probe(Options(backend_options="promise=everything"))


# ---------------------------------------------------------------------------------------------------- the pytest plugin


def _pytest(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "uccl_ep.conformance.plugin", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_plugin_runs_cases(tmp_path: Path) -> None:
    cases = _write_cases(tmp_path, SOME)
    empty = tmp_path / "empty"
    empty.mkdir()
    done = _pytest(empty, "--uccl-ep-backend", "shm", "--uccl-ep-seed", "4", UCCL_EP_CONFORMANCE_CASES=str(cases))
    assert "1 skipped" in done.stdout
    assert "4 failed" in done.stdout
    assert "1 passed" in done.stdout
    assert "PUT-1: <b>wrong</b>" in done.stdout
    assert "seed 4" in done.stdout
    done = _pytest(empty, "--uccl-ep-backend", "shm", "-k", "good", UCCL_EP_CONFORMANCE_CASES=str(cases))
    assert done.returncode == 0
    assert "1 passed" in done.stdout
    done = _pytest(empty, "--uccl-ep-backend", "smh")
    assert done.returncode == 4
    assert "did you mean" in done.stdout + done.stderr


def test_plugin_is_silent_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "test_foreign.py").write_text("import sys\ndef test_it():\n    assert 'numpy' not in sys.modules\n")
    done = _pytest(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "uccl" not in done.stdout


def test_plugin_costs_little() -> None:
    code = (
        "import pytest, time; t = time.perf_counter(); import uccl_ep.conformance.plugin; "
        "print(time.perf_counter() - t); import sys; assert 'numpy' not in sys.modules"
    )
    times = [float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
             for _ in range(5)]  # fmt: skip
    assert min(times) < 0.05
