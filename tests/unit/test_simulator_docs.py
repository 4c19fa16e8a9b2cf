# SPDX-License-Identifier: Apache-2.0
"""docs/simulator.md says what the library does: every profile, knob, value and fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from uccl_ep import simulator
from uccl_ep.simulator import _native

TEXT = (Path(__file__).resolve().parents[2] / "docs/simulator.md").read_text()


def table(header: str) -> dict[str, list[str]]:
    """The rows of the table that begins with this header, by their first cell."""
    assert header in TEXT, f"no table with the header {header}"
    rows = {}
    for line in TEXT.split(header, 1)[1].splitlines()[2:]:
        if not line.startswith("|"):
            break
        first, *rest = (cell.strip() for cell in line.strip("|").split("|"))
        rows[first.strip("`")] = rest
    return rows


def lines(profile: str) -> dict[str, tuple[str, str]]:
    """Knob: its value and what the library says of it."""
    found = re.findall(r"^(\w+)=(\S+)  (.*)$", simulator.knobs(profile), re.M)
    return {name: (value, text) for name, value, text in found}


def faults() -> dict[str, tuple[str, str]]:
    ffi, table_of_sim, _library = _native.load()
    found: dict[str, tuple[str, str]] = {}
    name, keys, text = ffi.new("char **"), ffi.new("char **"), ffi.new("char **")
    while table_of_sim.fault(len(found), name, keys, text):
        found[_native.text_of(name[0])] = (_native.text_of(keys[0]), _native.text_of(text[0]))
    return found


def test_every_profile_is_described() -> None:
    assert {name: [text] for name, text in simulator.profiles().items()} == table("| profile | what it is |")


@pytest.mark.parametrize("profile", simulator.profiles())
def test_every_value_of_a_profile_is_the_documented_one(profile: str) -> None:
    profiles = list(simulator.profiles())
    documented = table("| knob | " + " | ".join(profiles) + " |")
    actual = lines(profile)
    column = profiles.index(profile)
    assert {name: values[column] for name, values in documented.items()} == {
        name: value for name, (value, text) in actual.items() if "WORLD" not in text and "NOT a NIC" not in text
    }


def test_every_knob_has_its_meaning() -> None:
    knobs = lines("efa")
    meanings = table("| knob | values | meaning |")
    of_world = table("| knob | values | default | meaning |")
    assert meanings.keys() | of_world.keys() == knobs.keys()
    for name, (values, meaning) in meanings.items():
        shown = f"({values.replace(', ', '|')}) {meaning}"
        assert knobs[name][1].replace("NOT a NIC", "not a NIC") == shown, name
    for name, (_values, default, meaning) in of_world.items():
        assert knobs[name][0] == default, name
        assert knobs[name][1].endswith(meaning), name


def test_every_fault_is_described() -> None:
    assert {name: list(row) for name, row in faults().items()} == table("| fault | keys | what happens |")
