# SPDX-License-Identifier: Apache-2.0
"""The suite in the lane `provider`: ranks with the vendors' own libraries on the lab's NICs. A few cases of each; the
whole is a night's (tools/nightly.sh)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from uccl_ep import paths
from uccl_ep.lab import Missing, root

if TYPE_CHECKING:
    from conftest import Conformance

pytestmark = [
    pytest.mark.required_in_ci,
    pytest.mark.skipif(
        not (paths.library_dir() / "libuccl_ep_lab.so").is_file(), reason="built without the kernel's headers"
    ),
]
# Pieces, lists, immediates or atomics to one word, several queues of a rank, a rank to itself, two ranks on one NIC.
CASES = [
    word
    for case in ("put1.cut_in_pieces", "put6.among_others", "sig1.back_to_back_in_ones", "sig4.two_proxies")
    for word in ("--case", case)
]


@pytest.mark.parametrize(
    ("backend", "which", "options", "said"),
    [
        ("connectx", "machine", (), ("libmlx5", "cx7", "connectx")),
        (
            "connectx", "root", ("--profile", "connectx-ro", "--backend-options", "relaxed=1"),
            ("libmlx5", "cx7", "connectx-ro"),
        ),
        ("thor", "root", (), ("libbnxt_re", "thor2", "thor2")),
        ("thor", "machine", (), ("libbnxt_re", "thor2", "thor2")),  # Debian 12's does not add
        ("pollara", "root", (), ("libionic", "pollara", "pollara")),
        ("efa", "root", (), ("libefa", "efa2", "efa")),
        ("efa", "root", ("--variant", "efa3", "--knobs", "max_wr=64"), ("libefa", "efa3", "efa3")),
    ],
)  # fmt: skip
def test_the_suite(
    backend: str, which: str, options: tuple[str, ...], said: tuple[str, str, str], conformance: Conformance
) -> None:
    try:
        libraries = root.setup()
        # Where the machine's own are new enough, there are no others.
        which = "machine" if libraries.root is None else which
        root.choose(backend, which)
    except Missing as missing:
        pytest.skip(str(missing))
    words = ("--backend", backend, "--lane", "provider", "--libraries", which, "--ranks", "2", "--time-scale", "5")
    status, report, output = conformance(*words, *options, *CASES)
    assert status == 0, output[-6000:]
    assert report["summary"]["pass"] >= 4
    assert not report["not_in_lane"]
    lab = report["lab"]
    assert (lab["library"], lab["variant"], report["profile"]) == said
    assert (lab["libraries"] == "fetched") == (which == "root")
