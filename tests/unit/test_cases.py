# SPDX-License-Identifier: Apache-2.0
"""docs/cases.md: every row says what shows it, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from uccl_ep.conformance import registry

ROOT = Path(__file__).resolve().parents[2]
GROUPS = {"A": 15, "B": 11, "D": 11, "E": 15, "K": 19}
ROWS = re.findall(r"^\| ([A-Z]\d+) \| (.*?) \| (.*?) \| (.*) \|$", (ROOT / "docs/cases.md").read_text(), re.M)


def test_every_row_of_the_groups_is_there_once() -> None:
    assert [row[0] for row in ROWS] == [f"{group}{i}" for group, last in GROUPS.items() for i in range(1, last + 1, 2)]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_what_a_row_names_exists(row: tuple[str, str, str, str]) -> None:
    _, source, asks, shown = row
    assert re.fullmatch(r"([\w-]+/[\w-]+(#\d+(, )?)+( \(review\))?(; )?)+", source), source
    assert asks
    names = re.findall(r"`((?:[a-z]+\d\.|tests/)\S+?)`", shown)
    assert names or "not here: needs" in shown, shown
    cases = {case.id for case in registry.load()}
    for name in names:
        path, separator, function = name.partition("::")
        if not separator:
            assert name in cases, f"no case {name}"
            continue
        definition = rf"^(def|static void|int) {re.escape(function)}\("
        assert re.search(definition, (ROOT / path).read_text(), re.M), f"{path} has no {function}"
