# SPDX-License-Identifier: Apache-2.0
"""Virtual NICs under a virtual clock: all ranks in this process. For tests; see uccl_ep.simulator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .. import paths
from ..doctor import Check

SUMMARY = "virtual NICs with the orderings and the faults of real ones; all ranks in one process (uccl_ep.simulator)"


def library() -> Path:
    return paths.library_dir() / "libuccl_ep_backend_sim.so"


def doctor() -> Iterator[Check]:
    # Needs nothing of the machine: what can be wrong is the installation.
    from ..simulator import profiles

    names = ", ".join(profiles())
    yield Check("sim: profiles", "ok", f"{names}: try `uccl-ep conformance --backend sim --profile all`")
