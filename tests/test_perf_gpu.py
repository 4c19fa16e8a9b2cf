# SPDX-License-Identifier: Apache-2.0
"""`uccl-ep perf gpu` on the CPU's emulation: every kernel, every check. Rates are not asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import uccl_ep.accel
from uccl_ep.perf import against, drain, gpu
from uccl_ep.perf.bench import BenchError

PROGRAM = Path(sys.executable).with_name("uccl-ep")
PLAN = gpu.Plan(
    forms=list(gpu.FORMS), producers=[3, 8], rings=8, threads=2, seconds=0.001, repeats=1, start=200, pings=50, soak=500
)

pytestmark = pytest.mark.required_in_ci


def perf(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [PROGRAM, "perf", *arguments], capture_output=True, text=True, check=False, timeout=600, env=os.environ
    )
    assert "Traceback" not in done.stderr
    return done


# ---------------------------------------------------------------------------------------------------------- the command


def test_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    done = perf("gpu", "--accel", "cpu", "--repeats", "1", "--commands", "3000", "--json", str(path))
    assert done.returncode == 0, done.stderr
    for word in ("single", "batch32", "poster4", "8 warps", "command and quiet", "too slow", "proxies", "none torn"):
        assert word in done.stdout
    document = json.loads(path.read_text())
    assert document["conditions"]["command"].startswith("uccl-ep perf gpu --accel cpu")
    result = document["gpu"]
    assert result["device"]["kind"] == "cpu"
    wanted = {(form, producers) for form in gpu.FORMS for producers in (4, 8)}
    assert {(row["form"], row["producers"]) for row in result["rates"]} == wanted
    for row in [*result["rates"], *result["fewer_threads"], *result["proxies"]]:
        assert len(row["values"]) == 1
        assert row["min"] == row["mops"] == row["max"] > 0
        assert row["commands"] % (row["producers"] * gpu.FORMS[row["form"]].batch) == 0
    for row in result["rates"]:
        assert row["blocks"] * (row["warps_a_block"] - row["form"].startswith("poster")) == row["producers"]
    assert {(row["rings"], row["threads"]) for row in result["fewer_threads"]} >= {(8, 1), (1, 1)}
    for row in result["latency_ns"].values():
        assert row["samples"] == 180
        assert 0 < row["min"] <= row["median"] <= row["p99"]
    assert sum(row["commands"] for row in result["soak"]) >= 3000
    # A consumer that pauses after each command takes no more than that allows. The last pause of a ring is not counted.
    for row in result["slow_consumer"]:
        assert row["mops"] * (row["commands"] - 1) / row["commands"] <= row["consumer_mops"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gpu", "--accel", "cdua"], "cuda"),
        (["gpu", "--accel", "cpu", "--forms", "sngle"], "single"),
        (["gpu", "--accel", "cpu", "--producers", "4,x"], "--producers"),
        (["gpu", "--accel", "cpu", "--producers", "5000"], "--producers"),
        (["gpu", "--accel", "cpu", "--against", "/nonexistent"], "no such file"),
        (["gpu", "--accel", "cpu", "--rounds", "3"], "not for gpu"),
        (["shm", "--forms", "single"], "not for shm"),
        (["gpu", "--accel", "cpu", "--json", "/nonexistent/x.json"], "--json"),
    ],
)
def test_wrong_command_lines(arguments: list[str], says: str) -> None:
    done = perf(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert says in done.stderr


def test_without_the_device_the_reason_is_said() -> None:
    done = perf("gpu", "--accel", "cpu", "--device", "9", "--repeats", "1")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("uccl-ep")


# ---------------------------------------------------------------------------------------------------------- the kernels


@pytest.mark.parametrize(("warp_size", "seed"), [(1, 0), (32, 7), (64, 0)])
def test_every_warp_size(warp_size: int, seed: int) -> None:
    with uccl_ep.accel.open("cpu", warp_size=warp_size, seed=seed) as device:
        result = gpu.measure(lambda text: None, device, PLAN)
    assert len(result["rates"]) == len(result["proxies"]) == 2 * len(gpu.FORMS)
    assert set(result["latency_ns"]) == set(gpu._LATENCIES)
    assert all(row["commands"] >= 500 // len(gpu.FORMS) for row in result["soak"])


@pytest.mark.parametrize("multiprocessors", [1, 2, 66, 132, 304])
@pytest.mark.parametrize("warp_size", [32, 64])
def test_shapes_are_even(multiprocessors: int, warp_size: int) -> None:
    with uccl_ep.accel.open("cpu") as device:
        info = device.info
    info = type(info)(**{**vars(info), "multiprocessors": multiprocessors, "warp_size": warp_size})
    for form in gpu.FORMS.values():
        for producers in (1, 3, 7, 32, 100, 128, 512, 1024, 2048, 4096):
            shape = gpu.Shape.of(form, producers, info, 32)
            workers = shape.warps - bool(form.block)
            assert shape.blocks * workers == producers
            assert producers % shape.rings == 0
            assert 1 <= shape.rings <= 32
            assert shape.warps * warp_size <= info.max_threads
            if form.block:
                assert shape.blocks % shape.rings == 0


# ----------------------------------------------------------------------------------------------- what is wrong is found


@pytest.fixture
def session() -> Iterator[gpu.Session]:
    with uccl_ep.accel.open("cpu") as device:
        made = gpu.Session(device)
        yield made
        made.rest()


def rings(session: gpu.Session, timeout: float = 1.0) -> drain.Drained:
    return session.drained(2, 1, 2, 1 << 16, timeout=timeout)


def launch(session: gpu.Session, drained: drain.Drained, sequence: int, commands: int = 8, producers: int = 2) -> None:
    work = drain.job(payload=drained.heap, commands=commands, producers=producers, rings=2, sequence=sequence)
    session.launch("perf_single", 1, producers, drained.comm, work)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda session, drained, at: launch(session, drained, at, commands=7), "2 of 16 commands did not come"),
        (lambda session, drained, at: launch(session, drained, at + 1), "lost"),
        (lambda session, drained, at: [launch(session, drained, at) for _ in range(2)], "doubled"),
        (lambda session, drained, at: launch(session, drained, at, producers=4), "strange"),
    ],
)
def test_a_wrong_producer_gives_no_figure(
    session: gpu.Session, wrong: Callable[[gpu.Session, drain.Drained, int], None], says: str
) -> None:
    drained = rings(session)
    assert drained.run(lambda at: launch(session, drained, at), 2, 8, 10.0).commands == 16
    with pytest.raises(BenchError, match=says):
        drained.run(lambda at: wrong(session, drained, at), 2, 8, 0.2)


def test_a_kernel_that_fails_is_told(session: gpu.Session) -> None:
    """Three rings are asked for, and there are two."""
    drained = rings(session)

    def beyond(sequence: int) -> None:
        work = drain.job(payload=drained.heap, commands=8, producers=3, rings=3, sequence=sequence)
        session.launch("perf_single", 1, 3, drained.comm, work)

    with pytest.raises(BenchError, match=r"kernel: .*E_RANGE"):
        drained.run(beyond, 2, 8, 10.0)


def test_an_answer_that_does_not_come_is_told(session: gpu.Session) -> None:
    with pytest.raises(BenchError, match="did not answer"):
        rings(session).ping(1, 0.05)


def test_threads_that_cannot_be_placed() -> None:
    with pytest.raises(BenchError, match="E_SYSTEM"):
        drain.Drained(
            uccl_ep.accel.library("cpu"), 0, rings=1, log2_slots=4, threads=1, producers=1, heap_bytes=4096, cpus=[-1]
        )


def test_the_job_is_laid_out_as_the_kernel_reads_it() -> None:
    work = drain.job(
        payload=1, result=2, sequence=3, commands=4, word=5, producers=6, rings=7, batch=8, stamped=True, heap_offset=10
    )
    assert np.frombuffer(work[:40], np.uint64).tolist() == [1, 2, 3, 4, 5]
    assert np.frombuffer(work[40:56], np.uint32).tolist() == [6, 7, 8, 1]
    assert np.frombuffer(work[56:], np.uint64).tolist() == [10]


# ------------------------------------------------------------------------------------------- beside the other's figures

LINE = "Threads: {:4d} | FIFO Size: {:4d} | GPU Pushes: {:6.2f} Mops/s | Proxy Processed: {:6.2f} Mops/s"
TRIP = " | RTT Latency (ns) - Avg: {}, Min: {}, P99: {}, Max: 9999"
RATES = {1: 0.5, 32: 20.0, 128: 70.0, 512: 40.0, 1024: 80.0}


def printed(size: int = 2048, latency: bool = False) -> str:
    lines = ["========", "GPU 0: some", f"FIFO Size: {size}"]
    for threads, rate in RATES.items():
        lines.append(LINE.format(threads, size, rate + 1, rate) + TRIP.format(3400 + threads - 1, 2261, 3490))
        lines.append(LINE.format(threads, 4096, 999, 999) + TRIP.format(1, 1, 1))
    return "\n".join(lines)


def test_its_lines_are_understood() -> None:
    assert against.rates(printed(), 2048) == RATES
    assert against.round_trip(printed(), 2048) == {"mean": 3400, "min": 2261, "p99": 3490}
    with pytest.raises(BenchError, match="no line for a FIFO of 512"):
        against.rates(printed(), 512)
    with pytest.raises(BenchError, match="round trips"):
        against.round_trip(LINE.format(1, 2048, 1.0, 1.0), 2048)


def test_budgets_are_judged() -> None:
    theirs = against.summary([{"rates": printed(), "latency": printed()}], 2048)
    rows = [
        {"form": "single", "producers": 32, "mops": 19.0},
        {"form": "single", "producers": 128, "mops": 30.0},
        {"form": "poster", "producers": 128, "mops": 180.0},
        {"form": "poster4", "producers": 512, "mops": 500.0},
        {"form": "batch8", "producers": 128, "mops": 400.0},
        {"form": "batch8", "producers": 512, "mops": 480.0},
    ]
    found = {row["what"]: row for row in against.judge(rows, 2550.0, theirs)}
    verdict = {what: (row["ratio"], row["met"]) for what, row in found.items()}
    assert verdict == {
        "single commands, 32 warps, no poster": (19.0 / 20.0, False),
        "single commands, 128 warps, best form": (180.0 / 70.0, True),
        "single commands, 512 warps, best form": (500.0 / 40.0, True),
        "batches of 8": (480.0 / 80.0, True),
        "batches of 32": (None, None),
        "round trip, mean": (0.75, True),
    }
    assert found["single commands, 512 warps, best form"]["aim_met"]
    assert not found["single commands, 128 warps, best form"]["aim_met"]
    assert found["batches of 8"]["producers"] == 512


def other_benchmark(folder: Path, body: str) -> Path:
    path = folder / "benchmark"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_side_by_side(tmp_path: Path) -> None:
    """Both orders, and what it said in the report."""
    (tmp_path / "text").write_text(printed())
    program = other_benchmark(tmp_path, f"cat '{tmp_path}/text'")
    done = perf(
        "gpu", "--accel", "cpu", "--repeats", "3", "--forms", "single", "--producers", "32", "--seconds", "0.001",
        "--against", str(program), "--against-runs", "2", "--json", "-",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["gpu"]
    assert result["order"] == ["ours", "theirs", "ours", "theirs", "ours"]
    assert result["against"]["runs"] == 2
    assert [row["mops"] for row in result["against"]["rates"]] == list(RATES.values())
    first = result["budgets"][0]
    assert first["ratio"] == result["rates"][0]["mops"] / RATES[32]
    assert "Budgets" in done.stderr
    assert "missed" in done.stderr
    assert "not measured" in done.stderr


@pytest.mark.parametrize(
    ("body", "says"), [("echo nothing", "is understood"), ("echo reason >&2; exit 3", "ended with 3: reason")]
)
def test_another_benchmark_that_fails(tmp_path: Path, body: str, says: str) -> None:
    program = other_benchmark(tmp_path, body)
    done = perf(
        "gpu", "--accel", "cpu", "--repeats", "1", "--forms", "single", "--producers", "1", "--seconds", "0.001",
        "--against", str(program),
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    assert says in done.stderr
