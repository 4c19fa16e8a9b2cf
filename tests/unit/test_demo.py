# SPDX-License-Identifier: Apache-2.0
"""The demo: its arithmetic against the definition, its routing, and real exchanges between processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from uccl_ep.demo import driver, tokens
from uccl_ep.demo.routing import Router, Routing, RoutingError, load, rows_between
from uccl_ep.demo.worker import compare

PROGRAM = Path(sys.executable).with_name("uccl-ep")
SMALL = {"ranks": 2, "tokens": "9", "hidden": 64, "experts": 8, "topk": 3, "iterations": 2, "timeout": 60.0}
FROM_FILE = {"tokens": None, "topk": None}


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    small = ["--ranks", "2", "--tokens", "5", "--hidden", "32", "--experts", "4", "--topk", "2", "--iterations", "1"]
    done = subprocess.run(
        [PROGRAM, "demo", *small, *arguments], capture_output=True, text=True, check=False, timeout=120, env=os.environ
    )
    assert "Traceback" not in done.stderr
    return done


def save(path: Path, idx: npt.NDArray[Any], weights: npt.NDArray[Any] | None = None) -> Path:
    np.savez(path, topk_idx=idx, topk_weights=np.ones(idx.shape, np.float32) if weights is None else weights)
    return path


# ------------------------------------------------------------------------------------------------------------ bf16


def test_every_bf16_value_survives_widening() -> None:
    everything = np.arange(1 << 16, dtype=np.uint16)
    numbers = everything[~np.isnan(tokens.widen(everything))]
    assert np.array_equal(tokens.round_to_bf16(tokens.widen(numbers)), numbers)


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.0, 0x3F80),
        (1.0 + 2**-8, 0x3F80),  # half way: to the even one
        (1.0 + 3 * 2**-8, 0x3F82),
        (1.0 + 2**-8 + 2**-20, 0x3F81),
        (-0.0, 0x8000),
        (3.4e38, 0x7F80),  # beyond the largest bf16: infinity
        (float("inf"), 0x7F80),
        (float("nan"), 0x7FC0),
    ],
)
def test_rounding(value: float, bits: int) -> None:
    assert tokens.round_to_bf16(np.array([value], np.float32))[0] == bits


def test_a_nan_with_low_bits_only_stays_a_nan() -> None:
    """Rounding its bits as those of a number would make it infinity."""
    nan = np.array([0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(tokens.widen(tokens.round_to_bf16(nan))).all()


def test_reference_is_the_definition() -> None:
    """Token by token and in Python's own order, against the vectorised one."""
    rng = np.random.default_rng(5)
    x = tokens.tokens(1, 0, 0, 40, 16)
    idx = rng.integers(-1, 9, (40, 4))
    weights = rng.random((40, 4), np.float32)
    found = tokens.reference(x, idx, weights)
    for i in range(40):
        total = np.zeros(16, np.float32)
        for expert, weight in zip(idx[i], weights[i], strict=True):
            if expert >= 0:
                scaled = tokens.widen(x[i]) * np.float32(2.0 ** (int(expert) % 7 - 3))
                result = tokens.round_to_bf16(scaled + np.float32(int(expert) % 61) / np.float32(16))
                total += tokens.widen(result) * weight
        assert np.array_equal(tokens.round_to_bf16(total), found[i])


def test_tokens_are_finite_and_differ() -> None:
    assert np.isfinite(tokens.widen(tokens.tokens(0, 0, 0, 16, 512))).all()
    assert not np.array_equal(tokens.tokens(0, 0, 0, 4, 8), tokens.tokens(0, 1, 0, 4, 8))
    assert not np.array_equal(tokens.tokens(0, 0, 0, 4, 8), tokens.tokens(0, 0, 1, 4, 8))


def test_one_wrong_bit_is_seen() -> None:
    expected = tokens.tokens(0, 0, 0, 4, 8)
    found = expected.copy()
    assert compare(found, expected) == ""
    found[2, 5] ^= 1
    assert "1 values in 1 of 4 tokens" in compare(found, expected)
    assert "token 2, column 5" in compare(found, expected)


# --------------------------------------------------------------------------------------------------------- routing


@pytest.mark.parametrize("kind", ["uniform", "zipf"])
def test_drawn_routing(kind: str) -> None:
    router = Router(kind, ranks=2, tokens=[50, 0], experts=16, topk=4, seed=3)
    routing = router.routing(0, 0)
    assert routing.topk_idx.shape == (50, 4)
    assert ((routing.topk_idx >= 0) & (routing.topk_idx < 16)).all()
    assert all(len(set(row)) == 4 for row in routing.topk_idx.tolist())
    assert np.allclose(routing.topk_weights.sum(axis=1), 1)
    assert np.array_equal(routing.topk_idx, router.routing(0, 0).topk_idx)
    assert not np.array_equal(routing.topk_idx, router.routing(1, 0).topk_idx)
    assert router.routing(0, 1).topk_idx.shape == (0, 4)


def test_zipf_is_skewed() -> None:
    def busiest(kind: str) -> int:
        router = Router(kind, ranks=1, tokens=[512], experts=64, topk=2, seed=0)
        return int(np.bincount(router.routing(0, 0).topk_idx.ravel(), minlength=64).max())

    assert busiest("zipf") > 3 * busiest("uniform")


def test_file_of_tokens_is_split(tmp_path: Path) -> None:
    idx = np.arange(14, dtype=np.int32).reshape(7, 2)
    parts = load(save(tmp_path / "r.npz", idx), 3, 16)
    assert [len(part.topk_idx) for part in parts] == [3, 2, 2]
    assert np.array_equal(np.concatenate([part.topk_idx for part in parts]), idx)
    assert [len(part.topk_idx) for part in load(save(tmp_path / "s.npz", idx[:2]), 4, 16)] == [1, 1, 0, 0]


def test_file_of_ranks(tmp_path: Path) -> None:
    idx = np.arange(12).reshape(2, 3, 2)
    path = save(tmp_path / "r.npz", idx)
    assert np.array_equal(load(path, 2, 16)[1].topk_idx, idx[1])
    with pytest.raises(RoutingError, match="--ranks 2"):
        load(path, 4, 16)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    idx = np.zeros((4, 2), np.int64)
    weights = np.ones((4, 2), np.float32)

    def refused(match: str, **arrays: Any) -> None:
        np.savez(tmp_path / "bad.npz", **arrays)
        with pytest.raises(RoutingError, match=match):
            load(tmp_path / "bad.npz", 2, 8)

    refused("topk_weights", topk_idx=idx)
    refused("not integers", topk_idx=weights, topk_weights=weights)
    refused("not floats", topk_idx=idx, topk_weights=idx)
    refused("must both be", topk_idx=idx, topk_weights=weights[:2])
    refused("must both be", topk_idx=idx[0], topk_weights=weights[0])
    refused("give --experts 10", topk_idx=idx + 8, topk_weights=weights)
    refused("has -2; -1 is no expert", topk_idx=idx - 2, topk_weights=weights)
    refused("not finite", topk_idx=idx, topk_weights=weights * np.nan)
    refused("plain arrays", topk_idx=np.array([[object()]]), topk_weights=weights)  # nothing is unpickled
    with pytest.raises(RoutingError, match="no file"):
        load(tmp_path / "missing.npz", 2, 8)
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(RoutingError, match=r"not a \.npz"):
        load(tmp_path / "text.npz", 2, 8)
    with zipfile.ZipFile(tmp_path / "junk.npz", "w") as archive:
        archive.writestr("topk_idx.npy", b"junk")
        archive.writestr("topk_weights.npy", b"junk")
    with pytest.raises(RoutingError, match="damaged"):
        load(tmp_path / "junk.npz", 2, 8)
    np.save(tmp_path / "plain.npy", idx)
    with pytest.raises(RoutingError, match=r"not a \.npz"):
        load(tmp_path / "plain.npy", 2, 8)


def test_rows_between() -> None:
    routing = Routing(np.array([[0, 3], [-1, 3], [2, 1]]), np.ones((3, 2), np.float32))
    assert rows_between(routing, 2, 4).tolist() == [2, 3]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"experts": 9}, "multiple"),
        ({"experts": 0}, "multiple"),
        ({"ranks": 0}, "processes"),
        ({"ranks": 1000, "experts": 1000}, "processes"),
        ({"experts": 1 << 14}, "at most"),
        ({"hidden": 12}, "multiple of 16 bytes"),
        ({"topk": 9}, "cannot choose more"),
        ({"topk": 0}, "at least 1"),
        ({"iterations": 0}, "at least 1"),
        ({"channels": 0}, "at least 1"),
        ({"tokens": "1,2,3"}, "one for each of 2"),
        ({"tokens": "-1"}, "one for each of 2"),
        ({"tokens": "99999999999999999999"}, "give fewer"),
        ({"tokens": "many"}, "one for each of 2"),
        ({"dtype": "fp8"}, "bf16"),
        ({"seed": -1}, "negative"),
        ({"accel": "cdua"}, "cuda"),
        ({"accel": "cpu", "heap": "shared"}, "host or device"),
        ({"heap": "device"}, "add --accel"),
    ],
)
def test_options_that_cannot_be(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(RoutingError, match=match):
        driver.plan(driver.Options(**{**SMALL, **wrong}))


# ------------------------------------------------------------------------------------------------- real exchanges


def test_options_that_contradict_a_file(tmp_path: Path) -> None:
    path = str(save(tmp_path / "r.npz", np.zeros((6, 2), np.int64)))
    small = {**SMALL, **FROM_FILE, "routing": path}
    with pytest.raises(RoutingError, match=r"--tokens 9, but .* has 3,3"):
        driver.plan(driver.Options(**{**small, "tokens": "9"}))
    with pytest.raises(RoutingError, match=r"--topk 3, but .* has 2"):
        driver.plan(driver.Options(**{**small, "topk": 3}))
    shape, routing = driver.plan(driver.Options(**{**small, "tokens": "3", "topk": 2}))
    assert (shape.tokens, routing["topk"]) == (3, 2)


def exchange(**options: Any) -> driver.Result:
    result = driver.run(driver.Options(**{**SMALL, **options}))
    assert result.problems == []
    assert result.exact
    return result


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ranks": 1},
        {"ranks": 4, "channels": 3, "routing": "zipf"},
        {"strategy": "sender_hold", "iterations": 3},
        {"ranks": 3, "experts": 3, "topk": 1, "tokens": "0,7,31"},
        {"tokens": "0"},
        {"tokens": "257", "hidden": 8, "experts": 2, "topk": 2},
        {"accel": "cpu"},
        {"accel": "cpu", "heap": "device", "ranks": 4, "channels": 3, "routing": "zipf"},
        {"accel": "cpu", "heap": "device", "ranks": 3, "experts": 3, "topk": 1, "tokens": "0,7,310", "iterations": 3},
        {"accel": "cpu", "tokens": "0"},
    ],
    ids=str,
)
def test_exchange_is_exact(options: dict[str, Any]) -> None:
    result = exchange(**options)
    counted = result.channels
    each_way = sum(rank["samples"][0]["rows_sent"] for rank in result.ranks)
    assert each_way == sum(result.tokens) * result.options.topk
    rounds = driver.WARMUP + result.options.iterations
    # Dispatch, combine, and an announcement for each expert from each rank.
    commands = rounds * (2 * each_way + result.options.experts * result.options.ranks)
    assert sum(channel["posted"] for channel in counted) == commands
    assert sum(channel["signals"] for channel in counted) == commands
    assert sum(channel["bytes"] for channel in counted) == rounds * 2 * each_way * 2 * result.options.hidden
    assert sum(channel["failed"] for channel in counted) == 0


def test_recorded_routing_with_everything_odd(tmp_path: Path) -> None:
    """H29 and B11: padding rows (whose tokens are NaN), single -1 entries, an expert twice in a row, idle ranks."""
    rng = np.random.default_rng(11)
    idx = rng.integers(-1, 8, (13, 4))
    idx[-3:] = -1
    idx[0] = 5
    weights = rng.standard_normal((13, 4)).astype(np.float32)
    weights[-3:] = np.nan
    path = save(tmp_path / "r.npz", idx, weights)
    result = exchange(ranks=4, routing=str(path), **FROM_FILE)
    assert result.tokens == [4, 3, 3, 3]
    assert result.rows == int((idx >= 0).sum())


def test_recorded_routing_of_nobody(tmp_path: Path) -> None:
    assert exchange(routing=str(save(tmp_path / "r.npz", np.full((6, 2), -1))), **FROM_FILE).rows == 0
    assert exchange(routing=str(save(tmp_path / "s.npz", np.full((0, 2), -1))), **FROM_FILE).rows == 0


# ---------------------------------------------------------------------------------------------------- the command


def test_command_says_what_it_did() -> None:
    done = demo()
    assert done.returncode == 0, done.stderr
    for word in (
        "results: exact",
        "tokens: 5 a rank",
        "shm",
        "ordered_atomic",
        "dispatch",
        "combine",
        "GB/s",
        "channel",
    ):
        assert word in done.stdout
    assert done.stderr == ""


def test_command_writes_json(tmp_path: Path) -> None:
    done = demo("--json", "-", "--channels", "2")
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert document["schema"] == "uccl_ep.demo/1"
    assert document["results"] == "exact"
    assert len(document["channels"]) == 2
    assert document["commands"] == sum(channel["posted"] for channel in document["channels"])
    path = tmp_path / "demo.json"
    assert demo("--json", str(path), "--tokens", "0").returncode == 0
    assert json.loads(path.read_text())["rows"] == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--experts", "5"], "multiple"),
        (["--routing", "zipff"], "uniform, zipf"),
        (["--json", "/nonexistent/x.json"], "No such file"),
        (["--json", "/"], "Is a directory"),
        (["--backend", "shn"], "shm"),
        (["--channels", "100000"], "ranks 0, 1: CommandError"),
    ],
)
def test_command_refuses(arguments: list[str], word: str) -> None:
    done = demo(*arguments)
    assert done.returncode in (1, 2)
    assert word in done.stderr
    assert done.stdout == ""
    assert done.stderr.count("did you mean") <= 1  # not once a rank


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    """As a terminal sends it: to the command and to its ranks."""
    path = str(save(tmp_path / "r.npz", np.full((0, 2), -1)))
    command = [PROGRAM, "demo", "--ranks", "2", "--hidden", "32", "--experts", "4", "--routing", path]
    with subprocess.Popen(
        [*command, "--iterations", "1000000"],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + 60
        while len(children.read_text().split()) < 2:
            assert time.monotonic() < deadline, "no ranks"
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (130, "", "uccl-ep demo: interrupted\n")


@pytest.mark.parametrize("heap", ["host", "device"])
def test_kernels_post(heap: str, tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    done = demo("--accel", "cpu", "--heap", heap, "--json", str(path))
    assert done.returncode == 0, done.stderr
    for word in (f"heaps in {heap} memory", "posting (kernel)", "results: exact"):
        assert word in done.stdout
    document = json.loads(path.read_text())
    assert document["accelerator"]["kind"] == "cpu"
    assert document["accelerator"]["heap"] == heap
    assert 0 < document["seconds"]["dispatch_post"] <= document["seconds"]["dispatch"]


@pytest.mark.parametrize("kernels", [[], ["--accel", "cpu", "--heap", "device"]], ids=["host", "kernels"])
def test_wrong_results_are_exit_code_1(kernels: list[str], tmp_path: Path) -> None:
    """A backend that loses a byte: the demo must notice, whatever else does not."""
    sabotage = tmp_path / "sitecustomize.py"
    sabotage.write_text(
        "import sys\n"
        "if any('uccl_ep.demo.worker' in word for word in sys.orig_argv):\n"
        "    from uccl_ep.demo import exchange\n"
        "    real = exchange.Exchange.experts\n"
        "    def broken(self):\n"
        "        real(self)\n"
        "        rows = self._results.load(self._parity)\n"
        "        rows[0, 0, 3] ^= 1\n"
        "        self._results.store(self._parity, rows)\n"
        "    exchange.Exchange.experts = broken\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [PROGRAM, "demo", "--ranks", "2", "--hidden", "32", "--experts", "4", "--topk", "2", "--iterations", "1",
         *kernels],
        capture_output=True, text=True, check=False, timeout=120, env=environment,
    )  # fmt: skip
    assert done.returncode == 1
    assert "results: WRONG" in done.stdout
    assert "values in 1 of 128 tokens differ" in done.stdout
