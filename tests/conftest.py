# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: what a skip means in CI, and where things are."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

# A machine with a GPU may have no more than pytest; the tests that need hypothesis say so themselves.
with contextlib.suppress(ImportError):
    import hypothesis

    # A busy machine is no failure; a failure prints what replays it.
    hypothesis.settings.register_profile("uccl_ep", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("uccl_ep")

# A shell that starts the tests in the background has them ignore what tests send to each other.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def _elsewhere() -> Generator[None, None, None]:
    """What is tested is what is installed: processes that tests start must not import the source tree instead, which
    Python would find in the current folder."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        yield
        os.chdir(here)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A lane that is left out on a person's machine is missing in CI: there its skip is a failure."""
    report = yield
    if report.skipped and item.get_closest_marker("required_in_ci") and os.environ.get("CI") == "true":
        report.outcome = "failed"
        report.longrepr = f"must run in CI, but was skipped: {call.excinfo.value if call.excinfo else '?'}"
    return report


@pytest.fixture(scope="session")
def fake_libibverbs(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libibverbs made of software (tests/native/fake_ibverbs). Built here, since it is part of no installation."""
    from uccl_ep import paths

    if not (paths.library_dir() / "libuccl_ep_backend_connectx.so").is_file():
        pytest.skip("this installation was built without libibverbs' headers")
    target = tmp_path_factory.mktemp("fake") / "libibverbs.so.1"
    sources = sorted(map(str, (checkout / "tests/native/fake_ibverbs").glob("*.c")))
    efa = str(checkout / "tests/native/fake_ibverbs/libefa/libefa.c")
    for library, files in ((target, sources), (target.with_name("libefa.so.1"), [efa])):
        command = ["cc", "-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", *files, "-ldl", "-o", str(library)]
        subprocess.run(command, check=True)
    return target


@pytest.fixture(scope="session")
def checkout() -> Path:
    return Path(__file__).resolve().parents[1]


Conformance = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def conformance(tmp_path: Path) -> Conformance:
    """`uccl-ep conformance` with these arguments: its status, its report ({}: it wrote none) and what it said."""

    def run(*arguments: str, timeout: float = 900.0) -> tuple[int, dict[str, Any], str]:
        report = tmp_path / "report.json"
        report.unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "uccl_ep", "conformance", "--json", str(report), *arguments],
            cwd=tmp_path,  # not the checkout: what is installed is what is tested
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return done.returncode, json.loads(report.read_text()) if report.exists() else {}, done.stdout + done.stderr

    return run
