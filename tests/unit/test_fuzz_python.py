# SPDX-License-Identifier: Apache-2.0
"""What comes from outside and is read by Python: frames of the bootstrap, waivers, reports. Any bytes are read, or
refused by an error of ours; and any words that a run may hold are written so that others can read them."""

from __future__ import annotations

import datetime
import json
import os
import selectors
import socket
import struct
import threading
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from uccl_ep import _local_group
from uccl_ep.bootstrap import LocalBootstrap, LocalGroup
from uccl_ep.cli.common import json_text
from uccl_ep.conformance import junit, scorecard, waivers
from uccl_ep.conformance.errors import SuiteError
from uccl_ep.conformance.results import CaseResult, SuiteResult
from uccl_ep.errors import BootstrapError, DeadlineExceeded

U64 = st.integers(0, 2**64 - 1)
SMALL = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)

# ------------------------------------------------------------------------------------------------- bootstrap frames

KINDS = st.sampled_from([0, 1, 2, 3, 2**32 - 1])
SEQUENCES = st.one_of(st.integers(0, 3), st.just(2**64 - 1), U64)
LENGTHS = st.one_of(st.integers(0, 40), st.just(_local_group.MAX_PART_BYTES + 1), U64)
REQUESTS = st.builds(
    lambda kind, process, sequence, timeout, length, rest: (
        _local_group._REQUEST.pack(kind, process, sequence, timeout, length) + rest
    ),
    KINDS, st.integers(0, 2**32 - 1), SEQUENCES, U64, LENGTHS, st.binary(max_size=40),
)  # fmt: skip
REPLIES = st.builds(
    lambda outcome, culprit, sequence, length, rest: (
        _local_group._REPLY.pack(outcome, culprit, sequence, len(rest) if length is None else length) + rest
    ),
    st.integers(0, 4), st.integers(0, 2**32 - 1), SEQUENCES, st.one_of(st.none(), LENGTHS),
    st.one_of(st.binary(max_size=40), st.lists(U64, max_size=4).map(lambda v: struct.pack(f"<{len(v)}Q", *v))),
)  # fmt: skip


class Still(LocalGroup):
    """Without its thread: the test takes the turns, so nothing depends on when the thread comes to run."""

    def _start(self) -> None:
        pass


@settings(max_examples=300)
@given(st.lists(st.one_of(st.binary(max_size=80), REQUESTS), max_size=6), st.integers(1, 3))
def test_the_coordinator_takes_any_bytes_of_a_rank(chunks: list[bytes], size: int) -> None:
    with Still(size) as group:
        member = group._members[0]
        assert member.theirs is not None
        end = member.theirs.dup()
        try:
            for chunk in chunks:
                if chunk and not member.gone:
                    end.sendall(chunk)
                    group._turn(member, selectors.EVENT_READ)
            # One that spoke nonsense is gone, and the collectives of the others fail instead of waiting for it.
            assert len(member.received) <= _local_group._REQUEST.size + _local_group.MAX_PART_BYTES
            for other in group._members[1:]:
                assert not other.gone
        finally:
            end.close()


@settings(max_examples=300)
@given(st.lists(st.one_of(st.binary(max_size=80), REPLIES), max_size=4), st.integers(1, 3), st.integers(1, 3))
def test_a_rank_takes_any_bytes_of_the_coordinator(chunks: list[bytes], size: int, calls: int) -> None:
    ours, theirs = socket.socketpair()
    with LocalBootstrap(ours, 0, size) as end:
        theirs.sendall(b"".join(chunks))
        theirs.shutdown(socket.SHUT_WR)  # what is missing never comes
        try:
            for _ in range(calls):
                try:
                    parts = end.allgather(b"mine", timeout=5)
                except (BootstrapError, DeadlineExceeded):
                    continue
                assert len(parts) == size
                assert all(isinstance(part, bytes) for part in parts)
        finally:
            theirs.close()


def test_after_nonsense_of_one_rank_the_others_are_told() -> None:
    with LocalGroup(2) as group:
        member = group._members[0]
        assert member.theirs is not None
        end = member.theirs.dup()
        other = group.endpoint(1)
        told: list[BaseException] = []

        def wait() -> None:
            try:
                other.barrier(30)
            except BaseException as error:
                told.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        end.sendall(os.urandom(_local_group._REQUEST.size))
        thread.join(60)
        end.close()
        assert len(told) == 1
        assert isinstance(told[0], BootstrapError)


# --------------------------------------------------------------------------------------------------- waivers, reports

SCALARS = st.one_of(
    st.booleans(), st.integers(-5, 5), st.floats(), st.text(max_size=8), st.dates(), st.datetimes(), st.times(),
    st.sampled_from(["put1.*", "2027-01-31", "soon", ""]),
)  # fmt: skip
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=4)
KEYS = st.sampled_from([*waivers._FIELDS, "waiver", "other"])


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return json.dumps(value) if isinstance(value, str) else str(value)


def tables(entries: list[dict[str, Any]]) -> str:
    return "".join("[[waiver]]\n" + "".join(f"{k} = {toml(v)}\n" for k, v in e.items()) for e in entries)


TABLES = st.lists(st.dictionaries(KEYS, VALUES, max_size=6), max_size=3).map(tables)
WHOLE = st.fixed_dictionaries(dict.fromkeys(waivers._FIELDS, VALUES)).map(lambda entry: tables([entry]))
TEXTS = st.one_of(
    st.binary(max_size=200), TABLES.map(str.encode), WHOLE.map(str.encode),
    VALUES.map(lambda v: f"waiver = {toml(v)}\n".encode()),
)  # fmt: skip


@SMALL
@given(TEXTS)
@example(b"waiver = " + b"[" * 3000)
@example(b"a" + b".a" * 3000 + b" = 1")
def test_a_waivers_file_is_read_or_refused(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "waivers.toml"
    file.write_bytes(text)
    try:
        known = waivers.read(file)
    except SuiteError:
        return
    for waiver in known:
        assert type(waiver.expiry) is datetime.date
        assert all(isinstance(v, str) and v for v in (waiver.case, waiver.owner, waiver.reason, waiver.link))
        waiver.covers("put1.sizes")
        json.dumps(waiver.as_dict())


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(["name", "clause", "killed"]), st.text(max_size=4)), inner),
    ),
    max_leaves=12,
)
MUTANTS = st.fixed_dictionaries({"schema": st.just("uccl_ep.mutants/1"), "score": JSON, "mutants": JSON})


@SMALL
@given(st.one_of(st.binary(max_size=100), JSON.map(lambda v: json.dumps(v).encode()),
                 MUTANTS.map(lambda v: json.dumps(v).encode())))  # fmt: skip
@example(b"[" * 100_000)
@example(b'{"schema": "uccl_ep.mutants/1", "score": NaN, "mutants": []}')
@example(b'{"schema": "uccl_ep.mutants/1", "score": 1e999, "mutants": []}')
def test_a_report_of_mutants_is_read_or_refused(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "mutants.json"
    file.write_bytes(text)
    try:
        report = scorecard.read_mutants(file)
    except SuiteError:
        return
    assert 0 <= report["score"] <= 1
    assert report["killed"] + len(report["survivors"]) == report["total"]


@SMALL
@given(JSON)
def test_what_commands_print_as_json_is_json(value: Any) -> None:
    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    read = json.loads(json_text("uccl_ep.test/1", value=value), parse_constant=refuse)
    assert read["schema"] == "uccl_ep.test/1"


# Any characters that a process may print, lone surrogates of undecodable bytes among them.
WORDS = st.text(st.characters(exclude_categories=()), max_size=30)
DETAILS = st.dictionaries(
    st.sampled_from(["message", "at", "rank", "died_of", "output", "trace", "stacks"]), st.one_of(WORDS, st.integers())
)


STATUSES = ["pass", "fail", "crash", "timeout", "internal_error"]


@SMALL
@given(st.lists(st.tuples(st.sampled_from(STATUSES), DETAILS), max_size=3), WORDS)
def test_reports_of_any_words_can_be_read(
    tmp_path: Path, outcomes: list[tuple[str, dict[str, Any]]], reason: str
) -> None:
    result = SuiteResult(
        backend={"name": "x", "version": "1", "abi": "1.1", "library": "x.so",
                 "device": {"name": reason, "vendor": "", "model": "", "firmware": ""}},
        lane="shm", profile=None, provider=None, capabilities={"flags": {}}, strategy="auto", strategy_reason=reason,
        seed=1, level="core", ranks=2, partial=True, cannot_prove=[reason],
        environment={"started": "2026-01-01", "host": reason}, replay="uccl-ep conformance", notes=[reason],
    )  # fmt: skip
    for i, (status, detail) in enumerate(outcomes):
        detail = {"message": "", **detail}
        result.cases.append(CaseResult(f"put1.x{i}", reason, ("PUT-1",), "core", status, 0.1, detail, 2))
    json.loads(result.json_text())
    junit.write(result, tmp_path / "junit.xml")
    assert len(list(ET.parse(tmp_path / "junit.xml").iter("testcase"))) == len(outcomes)
