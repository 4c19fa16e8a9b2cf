# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from uccl_ep import _native, errors
from uccl_ep.errors import ErrorRecord


def statuses() -> dict[str, int]:
    names = _native.enum_names("uccl_ep_status", "UCCL_EP_")
    # E_AGAIN is between a backend and the core: a caller never sees it.
    return {name: value for value, name in names.items() if value < 0 and name != "E_AGAIN"}


@pytest.mark.parametrize("name", statuses())
def test_every_status_has_an_exception_of_its_own_kind(name: str) -> None:
    error = errors.from_record(ErrorRecord(statuses()[name], text="what happened"))
    assert type(error) is not errors.UcclEpError
    assert error.name == name
    assert error.advice
    assert str(error).startswith(f"{name}: what happened")


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("E_RANGE", ValueError),
        ("E_DEADLINE", TimeoutError),
        ("E_PEER_LOST", ConnectionError),
        ("E_NO_MEMORY", MemoryError),
    ],
)
def test_usual_handlers_catch_them_too(name: str, builtin: type[Exception]) -> None:
    assert isinstance(errors.from_record(ErrorRecord(statuses()[name])), builtin)


def test_a_message_says_where() -> None:
    record = ErrorRecord(
        _native.status_value("E_NIC"), rank=0, peer=3, channel=1, op="put", ticket=17, clause="ERR-2", nic="nic0",
        vendor_code=12, text="retry exceeded",
    )  # fmt: skip
    assert str(errors.from_record(record)) == (
        "E_NIC: retry exceeded [rank 0, peer 3, channel 1, ticket 17, put; ERR-2; NIC nic0 code 12]"
    )


def test_without_a_text_the_advice_stands_in() -> None:
    error = errors.PeerLost(ErrorRecord(_native.status_value("E_PEER_LOST")))
    assert error.advice in str(error)


def test_they_survive_the_way_between_processes() -> None:
    error = errors.PeerLost("gone", rank=1, peer=2)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 (our own bytes)
    assert type(again) is errors.PeerLost
    assert again.record == error.record
    assert str(again) == str(error)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = set(re.findall(r"^ \+-- (\w+)", errors.__doc__ or "", re.M))
    assert drawn == {kind.__name__ for kind in errors.UcclEpError.__subclasses__()}


def test_status_texts_come_from_the_header(checkout: Path) -> None:
    header = (checkout / "include/uccl_ep/status.h").read_text()
    for name, text in re.findall(r'X\((\w+), -?\d+, "(.*?)"\)', header):
        assert _native.status_text(_native.status_value(name)) == text


def test_nearest() -> None:
    assert errors.nearest("conectx", ["connectx", "efa"]) == "known: connectx, efa; did you mean 'connectx'?"
    assert errors.nearest("zzz", ["efa"]) == "known: efa"
    assert errors.nearest("x", []) == "known: none"
