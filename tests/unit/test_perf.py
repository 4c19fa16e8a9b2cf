# SPDX-License-Identifier: Apache-2.0
"""`uccl-ep perf`: its figures stand for work that was done. Rates are not asserted; instructions are, being no luck."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from uccl_ep import backends
from uccl_ep.paths import library_dir
from uccl_ep.perf import bench, proxy, rdma, shm
from uccl_ep.perf.conditions import conditions

PROGRAM = Path(sys.executable).with_name("uccl-ep")
SIZES = [16 << 2 * i for i in range(11)]  # 16 B .. 16 MiB


def perf(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [PROGRAM, "perf", *arguments],
        capture_output=True, text=True, check=False, timeout=600, env={**os.environ, **environment},
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done


# ------------------------------------------------------------------------------------------------------- the benchmark


@pytest.mark.parametrize("mix", ["put", "put_adjacent", "put_signal", "signal"])
@pytest.mark.parametrize("strategy", ["ordered_atomic", "sender_hold"])
@pytest.mark.parametrize("complete", ["cumulative", "each"])
def test_prefilled_does_all_that_was_posted(mix: str, strategy: str, complete: str) -> None:
    """The program itself compares commands, operations and completions, and gives no figure if they differ."""
    (figures,) = bench.run(
        bench.noop_backend(), "prefilled",
        mix=mix, strategy=strategy, complete=complete, rounds=3, ring_log2=8, ranks=16, targets=8, channels=2,
    )  # fmt: skip
    assert figures["commands"] == 3 * 2 * 256
    assert figures["operations"] + figures["merged"] == figures["commands"] * (2 if mix == "put_signal" else 1)
    assert figures["ns_per_command"] > 0


def test_adjacent_puts_are_merged_and_others_are_not() -> None:
    (adjacent,) = bench.run(bench.noop_backend(), "prefilled", mix="put_adjacent", rounds=2, bytes=256)
    (apart,) = bench.run(bench.noop_backend(), "prefilled", mix="put", rounds=2, bytes=256)
    assert adjacent["merged"] > adjacent["commands"] * 0.9
    assert apart["merged"] == 0


def test_live_producers() -> None:
    (figures,) = bench.run(bench.noop_backend(), "live", producers=3, channels=2, commands=5000, ranks=4, targets=4)
    assert figures["commands"] == 15000


def test_an_idle_proxy_is_idle() -> None:
    (figures,) = bench.run(bench.noop_backend(), "idle", ranks=4096, passes=1000)
    assert figures["idle_passes"] == figures["passes"] > 0


@pytest.mark.parametrize(
    ("backend", "mode", "options", "says"),
    [
        ("noop", "nonsense", {}, "no mode"),
        ("noop", "prefilled", {"nonsense": 1}, "no option"),
        ("noop", "prefilled", {"mix": "nonsense"}, "mix is"),
        ("noop", "prefilled", {"targets": 9, "ranks": 8}, "targets=9"),
        ("noop", "prefilled", {"ranks": 0}, "1 to 4096"),
        ("missing", "prefilled", {}, "E_NOT_A_BACKEND"),
    ],
)
def test_wrong_use_gives_no_figure(backend: str, mode: str, options: dict[str, object], says: str) -> None:
    library = bench.noop_backend() if backend == "noop" else Path("/nonexistent.so")
    with pytest.raises(bench.BenchError, match=says):
        bench.run(library, mode, **options)


def test_a_failed_data_check_gives_no_figure() -> None:
    """M11. The NIC that moves nothing reports every put as complete."""
    with pytest.raises(bench.BenchError, match="DATA CHECK FAILED") as caught:
        bench.run(bench.noop_backend(), "pair", rounds=1)
    assert "ns" not in str(caught.value)


def test_pair_checks_every_size() -> None:
    figures = shm.arrange(bench.run(backends.find("shm").library, "pair", rounds=1))
    assert [row["bytes"] for row in figures["put"]] == SIZES
    for row in figures["put"]:
        assert row["checked_bytes"] == min((32 << 20) // row["bytes"], 16384) * row["bytes"]
        assert row["put_ns"] > 0
        assert row["of_memcpy"] == row["memcpy_ns"] / row["put_ns"]
    assert figures["signal"]["count"] == 2000


def test_the_no_op_backend_is_not_offered() -> None:
    assert "noop" not in backends.names()
    assert bench.noop_backend().is_file()
    assert os.access(library_dir() / "uccl-ep-bench", os.X_OK)


# --------------------------------------------------------------------------------------------------------- instructions

needs_valgrind = pytest.mark.skipif(shutil.which("valgrind") is None, reason=bench.missing_valgrind())


@needs_valgrind
@pytest.mark.required_in_ci
def test_instructions_a_command() -> None:
    """At most 120 from a full ring to a NIC that does nothing. A put_signal is two operations of the NIC, and counted
    by operation. Of x86-64: other instruction sets count differently."""
    counted = proxy.count(lambda text: None)
    found = {row["name"]: row["instructions"] for row in counted["commands"]}
    assert set(found) == set(proxy.MIXES)
    first, second = (row["instructions"] for row in counted["idle"])
    assert first == second, "an idle pass costs the same with 8 and with 4096 ranks"
    if platform.machine() == "x86_64":
        assert found["put, 1 target"] <= proxy.BUDGET_INSTRUCTIONS
        assert found["put, 1 target, adjacent"] <= proxy.BUDGET_INSTRUCTIONS
        assert found["signal, 1 target"] <= proxy.BUDGET_INSTRUCTIONS
        assert found["put_signal, 1 target"] / 2 <= proxy.BUDGET_INSTRUCTIONS
        assert found["put_signal, 8 targets"] / 2 <= proxy.BUDGET_INSTRUCTIONS


def test_callgrind_output_is_understood() -> None:
    text = (
        "events: Ir\n\nob=(1) /x/libuccl_ep.so.0\nfl=(1) a.c\nfn=(1) pass\n10 5\n+1 7\ncob=(2) /x/libbackend.so\n"
        "cfn=(2) poll\ncalls=3 20\n* 30\n-1 1\n\nob=(2)\nfn=(2)\n20 30\n\ntotals: 43\n"
    )
    assert bench.by_library(text) == {"libuccl_ep.so.0": 13, "libbackend.so": 30}
    with pytest.raises(bench.BenchError, match="counts 44"):
        bench.by_library(text.replace("totals: 43", "totals: 44"))


def test_without_valgrind_the_reason_is_said() -> None:
    done = perf("proxy", "--instructions", "--rounds", "1", "--json", "-", PATH="/nonexistent")
    assert done.returncode == 0
    assert "valgrind is not installed" in json.loads(done.stdout)["proxy"]["instructions"]["skipped"]
    assert "valgrind is not installed" in done.stderr


# ---------------------------------------------------------------------------------------------------------- the command


def test_command_shows_and_writes(tmp_path: Path) -> None:
    path = tmp_path / "perf.json"
    done = perf("all", "--rounds", "1", "--json", str(path))
    assert done.returncode == 0, done.stderr
    for word in (
        "put_signal, 8 targets",
        "4 producers",
        "4096 ranks",
        "16 MiB",
        "memcpy",
        "put and its quiet",
        "signal",
    ):
        assert word in done.stdout
    assert done.stdout.count("120 instructions") == len(proxy.BUDGETED)
    document = json.loads(path.read_text())
    assert document["schema"] == "uccl_ep.perf/1"
    assert set(document["conditions"]) == set(conditions())
    assert document["conditions"]["command"].startswith("uccl-ep perf all --rounds 1")
    assert [row["bytes"] for row in document["shm"]["put"]] == SIZES
    assert "instructions" not in document["proxy"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["prxy"], 2), (["shm", "--rounds", "0"], 2), (["shm", "--json", "/nonexistent/x.json"], 2), (["--json", "/"], 2)],
)
def test_wrong_command_lines(arguments: list[str], code: int) -> None:
    done = perf(*arguments)
    assert done.returncode == code
    assert done.stdout == ""


# ----------------------------------------------------------------------------------------------------- beside perftest

PERFTEST = """ #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 4096       1000             1.21               0.55   \t\t   0.000141
---------------------------------------------------------------------------------------
"""


def test_the_numbers_of_another_benchmark_are_read_or_it_gave_none() -> None:
    assert rdma.numbers(PERFTEST) == [4096, 1000, 1.21, 0.55, 0.000141]
    for nothing in ("", "Couldn't connect to 127.0.0.1:18515", " 4096 1000", "1 2 3 4 x"):
        assert rdma.numbers(nothing) == []


def test_puts_over_one_size_are_checked_and_timed() -> None:
    lines = bench.run(backends.find("shm").library, "rdma", bytes=4096, commands=300, rounds=2, window=16)
    assert [line["what"] for line in lines] == ["signal", "put_quiet", "put"]
    assert (lines[-1]["bytes"], lines[-1]["count"]) == (4096, 300)
    assert lines[-1]["put_ns"] > 0
    assert 0 < lines[-1]["submits"] <= 600
    assert 0 < lines[-1]["completions"] <= 600


def test_a_device_that_is_not_there_is_an_error_and_no_figure() -> None:
    with pytest.raises(bench.BenchError, match="no device 'nope'"):
        bench.run(backends.find("shm").library, "rdma", device="nope")


@pytest.mark.parametrize(
    ("rate", "require", "code"), [("0.000001", True, 0), ("1000000", True, 3), ("1000000", False, 0)]
)
def test_a_ratio_that_is_required_and_missed_is_the_exit_status(
    tmp_path: Path, rate: str, require: bool, code: int
) -> None:
    """Beside programs that say they reached one message a second, or 10^12."""
    for name in ("ib_write_bw", "ib_write_lat", "ib_atomic_lat"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho 1 2 3 4 {rate}\n")
        (tmp_path / name).chmod(0o755)
    words = ["--devices", "shm0,shm0", "--backend", "shm", "--turns", "1", "--scale", "0.001", "--json", "-"]
    done = perf("rdma", *words, *["--require"] * require, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == code, done.stderr
    rows = json.loads(done.stdout)["rdma"]["rates"]
    assert [row["met"] for row in rows] == [rate == "0.000001"] * 3
    assert all(row["operations"]["completions"] > 0 for row in rows)


def test_the_two_of_a_benchmark_run_on_the_cpus_that_are_named(tmp_path: Path) -> None:
    """The server says on which before the client gives a figure, and waits to be killed."""
    told = "grep Cpus_allowed_list /proc/self/status >>"
    for name in ("ib_write_bw", "ib_write_lat", "ib_atomic_lat"):
        (tmp_path / name).write_text(
            '#!/bin/sh\ncase "$*" in\n'
            f"*127.0.0.1) [ -s {tmp_path}/server ] || exit 1; {told}{tmp_path}/client; echo 1 2 3 4 0.000001 ;;\n"
            f"*) {told}{tmp_path}/server; exec sleep 60 ;;\nesac\n"
        )
        (tmp_path / name).chmod(0o755)
    one, other = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
    words = ["--devices", "shm0,shm0", "--backend", "shm", "--turns", "2", "--scale", "0.001", "--json", "-"]
    done = perf("rdma", *words, "--cpus", f"{one},{other}", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    for who, cpu in (("client", one), ("server", other)):
        assert {line.split()[1] for line in (tmp_path / who).read_text().splitlines()} == {str(cpu)}
    document = json.loads(done.stdout)["rdma"]
    assert document["cpus"] == [[one], [other]]
    for row in document["rates"]:
        assert row["ratios"] == pytest.approx(row["values"])  # of one message a second
        assert row["ratio"] == pytest.approx(sum(row["ratios"]) / 2)


def test_cpus_that_are_none_are_an_error_and_no_figure() -> None:
    shm = backends.find("shm").library
    for name in ("cpus", "other_cpus"):
        with pytest.raises(bench.BenchError, match="no list of CPUs"):
            bench.run(shm, "rdma", commands=1, **{name: "0+"})
    with pytest.raises(bench.BenchError, match="CPUs 1023"):
        bench.run(shm, "rdma", commands=1, cpus="1023")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["rdma"], "two names of RDMA devices"),
        (["rdma", "--devices", "a,b", "--cpus", "0"], "two sets of CPUs"),
        (["rdma", "--devices", "a,b", "--cpus", "0+,1"], "two sets of CPUs"),
        (["rdma", "--devices", "a"], "two names of RDMA devices"),
        (["rdma", "--devices", "a,b", "--rounds", "3"], "not for rdma"),
        (["shm", "--require"], "not for shm"),
        (["shm", "--gid-index", "3"], "not for shm"),
        (["gpu", "--window", "3"], "not for gpu"),
    ],
)
def test_options_of_another_measurement_are_refused(words: list[str], text: str) -> None:
    done = perf(*words)
    assert done.returncode == 2
    assert text in done.stderr
