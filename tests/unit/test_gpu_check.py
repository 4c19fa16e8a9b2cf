# SPDX-License-Identifier: Apache-2.0
"""tools/gpu_check.sh, where there is no GPU: it runs, and what it reads of reports is a verdict."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def summary() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_summary", CHECKOUT / "tools/gpu_summary.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def suite(*statuses: str) -> dict[str, Any]:
    return {
        "summary": {status: statuses.count(status) for status in set(statuses)},
        "cases": [{"status": status} for status in statuses],
        "accelerator": {"kind": "cuda"},
    }


GOOD: dict[str, Any] = {
    "suite-host": suite("pass", "pass"),
    "suite-device": suite("pass", "not_supported"),
    "pushes": {"gpu": {"soak": [{"commands": 6 * 10**8}, {"commands": 4 * 10**8}]}},
    "demo-host": {"results": "exact"},
    "demo-device": {"results": "exact"},
    "budgets": {"gpu": {"budgets": [{"what": "batches of 8", "ratio": 7.0, "must": 6.0, "aim": 8.0, "met": True}]}},
    "errors": {"cases": [{"what": "no GPU is refused", "ok": True, "said": "NoDevice: ..."}]},
    "memcheck": {},
}


def leave(folder: Path, reports: dict[str, Any]) -> None:
    for name, report in reports.items():
        (folder / f"{name}.json").write_text(json.dumps(report))
        (folder / f"{name}.end").write_text("0 5 60\n")
        (folder / f"{name}.txt").write_text("========= ERROR SUMMARY: 0 errors\n")
    (folder / "tests.end").write_text("0 5 60\n")
    (folder / "tests.xml").write_text(
        '<testsuites><testsuite tests="9" failures="0" errors="0" skipped="1"/></testsuites>'
    )


def test_all_of_it_passes(summary: ModuleType, tmp_path: Path) -> None:
    leave(tmp_path, GOOD)
    assert summary.main([str(tmp_path), "cuda"]) == 0
    lines = json.loads((tmp_path / "summary.json").read_text())["lines"]
    assert {line["verdict"] for line in lines} == {"pass"}
    assert len(lines) == 9
    # The same on the emulation proves nothing of a GPU, nor does what was shortened.
    assert summary.main([str(tmp_path), "cpu"]) == 3
    assert summary.main([str(tmp_path), "cuda", "1"]) == 3


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"suite-device": suite("pass", "fail")}, 1),
        ({"suite-host": suite()}, 1),
        ({"pushes": {"gpu": {"soak": [{"commands": 10**8}]}}}, 3),
        ({"demo-device": {"results": "wrong"}}, 1),
        ({"budgets": {"gpu": {}}}, 3),
        ({"budgets": {"gpu": {"budgets": [{"what": "x", "ratio": 1.0, "must": 6.0, "aim": None, "met": False}]}}}, 1),
        ({"errors": {"cases": [{"what": "no GPU is refused", "ok": False, "said": "nothing was refused"}]}}, 1),
    ],
)
def test_what_does_not_hold(summary: ModuleType, tmp_path: Path, changes: dict[str, Any], status: int) -> None:
    leave(tmp_path, {**GOOD, **changes})
    assert summary.main([str(tmp_path), "cuda"]) == status


@pytest.mark.parametrize(
    ("name", "end", "status"), [("suite-host", "124 60 60", 1), ("memcheck", "97 5 60", 1), ("pushes", None, 3)]
)
def test_how_parts_end(summary: ModuleType, tmp_path: Path, name: str, end: str | None, status: int) -> None:
    leave(tmp_path, GOOD)
    (tmp_path / f"{name}.end").unlink() if end is None else (tmp_path / f"{name}.end").write_text(end)
    assert summary.main([str(tmp_path), "cuda"]) == status


def test_the_script_runs_without_a_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", str(CHECKOUT / "tools/gpu_check.sh"), "--accel", "cpu", "--short", "--part", "errors",
         "--part", "demo-device",
         "--out", str(tmp_path / "out")],
        capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 3, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    assert "a GPU that there is not is refused: passed on the emulation; NoDevice" in done.stdout
    assert "heaps in device memory: results exact" in done.stdout
