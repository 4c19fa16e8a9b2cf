# SPDX-License-Identifier: Apache-2.0
"""The bytes that tests/native/test_lab_golden.c reads are those that the libraries of this machine write."""

from __future__ import annotations

from pathlib import Path

import pytest

from uccl_ep import paths
from uccl_ep.lab import Missing, root

from .golden import ALL, Golden, build, dump
from .outside import needs_compiler

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(
        not (paths.library_dir() / "libuccl_ep_lab.so").is_file(), reason="built without the kernel's headers"
    ),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        root.setup()
        return build(tmp_path_factory.mktemp("golden"))
    except Missing as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("golden", ALL, ids=lambda golden: golden.name)
def test_a_library_writes_what_was_kept(program: Path, golden: Golden) -> None:
    try:
        fresh = dump(golden, program)
    except Missing as missing:
        pytest.skip(str(missing))
    kept = golden.file.read_text().splitlines()
    for number, (new, old) in enumerate(zip(fresh.splitlines(), kept, strict=True), 1):
        assert new == old, f"{golden.file.name}, line {number}: python tests/system/golden.py makes it anew"
