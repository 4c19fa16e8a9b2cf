# SPDX-License-Identifier: Apache-2.0
"""The shortest of lab_pairs.py: one of each vendor's NICs, and one that measures. Both sides check what arrives, but
for ib_write_bw, which looks at completions."""

from __future__ import annotations

import pytest

from uccl_ep import paths
from uccl_ep.lab import root

from . import lab_pairs
from .lab_pairs import PERFTEST, PINGPONG, POLLING, PORT
from .test_lab import libraries

__all__ = ["libraries"]
pytestmark = [
    pytest.mark.required_in_ci,
    pytest.mark.skipif(
        not (paths.library_dir() / "libuccl_ep_lab.so").is_file(), reason="built without the kernel's headers"
    ),
]


@pytest.mark.parametrize(
    ("nic", "program", "words"),
    [
        ("connectx", "ibv_rc_pingpong", ("-n", "20", *PINGPONG)),
        ("thor", "ibv_rc_pingpong", ("-n", "20", *PINGPONG)),
        ("pollara", "ibv_rc_pingpong", ("-n", "20", *POLLING)),
        ("efa", "fi_pingpong", ("-p", "efa", "-e", "rdm", "-c", "-I", "10", "-S", "4096", "-B", PORT)),
        ("connectx", "ib_write_bw", ("-n", "20", "-s", "4096", *PERFTEST)),
    ],
)
def test_two_processes_meet(libraries: root.Libraries, nic: str, program: str, words: tuple[str, ...]) -> None:
    lab_pairs.test_two_processes_meet(libraries, nic, "root", program, words)
