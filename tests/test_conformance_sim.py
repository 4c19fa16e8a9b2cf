# SPDX-License-Identifier: Apache-2.0
"""The suite on virtual NICs: every profile, the same run again, the table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Conformance

SIM = ("--backend", "sim")
PROFILES = ("connectx", "connectx-ro", "efa", "efa3", "thor2", "pollara", "pollara-noatomic", "cxi", "strawman-min")
# docs/conformance.md and the profile's own table: what each is expected to be driven by.
STRATEGY = {
    "connectx": "ordered_atomic",
    "connectx-ro": "sequenced_immediate",
    "efa": "sequenced_immediate",
    "efa3": "sequenced_immediate",
    "thor2": "ordered_atomic",
    "pollara": "sequenced_immediate",
    "pollara-noatomic": "sequenced_immediate",
    "cxi": "sender_hold",
    "strawman-min": "sender_hold_mailbox",
}


@pytest.mark.required_in_ci
def test_all_profiles(conformance: Conformance) -> None:
    status, report, said = conformance(*SIM, "--profile", "all", "--ranks", "2", "--seed", "1")
    assert status == 0, said[-6000:]
    assert report["schema"] == "uccl_ep.conformance-profiles/1"
    runs = report["profiles"]
    assert [one["profile"] for one in runs] == list(PROFILES)
    for one in runs:
        assert one["strategy"] == STRATEGY[one["profile"]], one["strategy_reason"]
        assert one["verdict"] == "conforms at level core", said[-6000:]
        for case in one["cases"]:
            assert case["status"] in ("pass", "not_supported"), (one["profile"], case)
            assert case["status"] != "pass" or len(case["hash"]) == 16, case
        told = one["histories"]
        assert told["remarks"] == [], (one["profile"], told)
        assert told["judged"] > 5 * sum(told["not_judged"].values()), (one["profile"], told)
        assert min(told["words"], told["signals"]) > 1000
    assert all(name in said for name in PROFILES)


@pytest.mark.required_in_ci
def test_heaps_that_are_staged(conformance: Conformance, tmp_path: Path) -> None:
    """No virtual NIC reaches the memory of a GPU. All cases of all profiles so are a night's (tools/nightly.sh)."""
    chosen = [
        word for glob in ("put1.*", "put3.*", "sig2.*", "qui0.*", "qui5.*", "err6.*") for word in ("--case", glob)
    ]
    status, report, said = conformance(
        *SIM, "--profile", "all", "--heap", "device", "--ranks", "2", "--seed", "1", *chosen, timeout=400
    )
    assert status == 0, said[-6000:]
    assert [one["profile"] for one in report["profiles"]] == list(PROFILES)
    for one in report["profiles"]:
        numbers = STRATEGY[one["profile"]] != "sender_hold_mailbox" and one["profile"] != "cxi"
        assert one["strategy"] == ("sequenced_immediate" if numbers else "sender_hold_mailbox")
        assert one["heap"].startswith(f"emulated memory, staged through host memory: {one['profile']}")
        assert {case["status"] for case in one["cases"]} == {"pass"}, said[-6000:]
        assert len(one["cases"]) >= 20
        assert one["histories"]["remarks"] == []
    page = tmp_path / "card.html"
    only = ("--profile", "efa", "--heap", "device", "--case", "sig1.exact_sum", "--html", str(page))
    status, report, said = conformance(*SIM, *only)
    assert status == 0, said[-6000:]
    assert report["heap"] in page.read_text()
    assert "staged through host memory" in said
    status, report, said = conformance(*SIM, *only, "--staging", "off")
    assert (status, report) == (2, {})
    assert "staging is off" in said


@pytest.mark.required_in_ci
@pytest.mark.parametrize("profile", ["efa", "cxi", "strawman-min"])
def test_the_same_seed_is_the_same_run(profile: str, conformance: Conformance) -> None:
    """Bit for bit: every event, choice and virtual nanosecond is in the hash."""
    arguments = ("--profile", profile, "--case", "sig2.*", "--case", "err5.*", "--case", "thr1.*", "--case", "err3.*")
    hashes = []
    for seed in ("7", "7", "8"):
        status, report, said = conformance(*SIM, *arguments, "--seed", seed)
        assert status == 0, said[-6000:]
        hashes.append({case["id"]: case["hash"] for case in report["cases"] if case["status"] == "pass"})
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) > 10
    assert not set(hashes[0].items()) & set(hashes[2].items())


def test_what_cannot_be_run_is_refused(conformance: Conformance) -> None:
    for arguments, text in (
        ((), "--profile"),
        (("--profile", "efa33"), "did you mean 'efa3'"),
        (("--profile", "efa", "--backend-options", "no_such=1"), "no_such"),
        (("--profile", "all", "--html", "x.html"), "--html is for one profile"),
        (("--profile", "efa", "--lane", "shm"), "go together"),
        (("--profile", "efa", "--heap", "device", "--staging", "maybe"), "--staging 'maybe'"),
        (("--profile", "efa", "--staging", "on"), "add --heap device"),
        (("--profile", "efa", "--heap", "moon"), "--heap 'moon'"),
    ):
        status, report, said = conformance(*SIM, *arguments)
        assert (status, report) == (2, {})
        assert text in said
        assert "Traceback" not in said


def test_knobs_are_on_the_scorecard(conformance: Conformance, tmp_path: Path) -> None:
    page = tmp_path / "card.html"
    arguments = ("--profile", "efa", "--backend-options", "visible_delay=0,dup_write=10", "--case", "sig1.exact_sum")
    status, report, said = conformance(*SIM, *arguments, "--html", str(page))
    assert status == 0, said[-6000:]
    assert report["knobs"] == "visible_delay=0,dup_write=10"
    assert "visible_delay=0,dup_write=10" in page.read_text()
