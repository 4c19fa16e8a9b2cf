# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: what a skip means in CI, and where things are."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest


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
def checkout() -> Path:
    return Path(__file__).resolve().parents[1]
