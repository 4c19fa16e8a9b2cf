# SPDX-License-Identifier: Apache-2.0
"""A backend of somebody else's, built and proved with nothing but the installed package."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import pytest

from uccl_ep.errors import BootstrapError

from .outside import COMMAND, EXAMPLE, build, needs_compiler, run
from .ranks import Footprint, Member, Ranks
from .traffic import Exchange, make

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def minimal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("author")
    shutil.copy(EXAMPLE / "minimal.c", folder)
    return build(folder, folder / "minimal.c", "libminimal.so")


def test_it_conforms(minimal: Path) -> None:
    """The suite passes whole: nothing fails, nothing is left out."""
    folder = minimal.parent
    assert sorted(path.name for path in folder.iterdir()) == ["libminimal.so", "minimal.c"]
    arguments = ["--library", "./libminimal.so", "--level", "core", "--json", "report.json"]
    began = time.monotonic()
    done = run(folder, COMMAND, "conformance", *arguments, seconds=280)
    print(f"\n{done.stdout[-300:]}\n{time.monotonic() - began:.1f} s")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "report.json").read_text())
    outcomes = {case["id"]: case["status"] for case in report["cases"]}
    assert len(outcomes) >= 45
    assert report["level"] == "core"
    assert report["strategy"] == "sender_hold"
    assert set(outcomes.values()) == {"pass"}, {name: how for name, how in outcomes.items() if how != "pass"}


def test_it_is_used_like_the_embedded_one(minimal: Path) -> None:
    def program(member: Member) -> None:
        before = Footprint()
        comm = make(member.bootstrap, backend=minimal, channels=2, proxies=2)
        assert comm.info.backend == "minimal"
        assert comm.info.strategy == "sender_hold", "the core makes the order that this NIC does not promise"
        assert comm.info.device.caps.names == ["atomic_add64", "atomic_coherent", "own_memory"]
        exchange = Exchange(member, comm)
        for _ in range(30):
            exchange.round()
        exchange.check_guards()
        comm.quiet()
        comm.barrier()
        comm.close()
        assert not before.leaks(), before.leaks()

    with Ranks(3, program) as ranks:
        ranks.join_well()
    seen = run(minimal.parent, COMMAND, "devices", "--backend", "./libminimal.so", "--json")
    assert seen.returncode == 0, seen.stderr
    (device,) = json.loads(seen.stdout)["devices"]
    assert device["name"] == "minimal0"


def test_ranks_with_different_backends_are_refused(minimal: Path) -> None:
    """L9: on all ranks, and each is told both names."""

    def program(member: Member) -> None:
        before = Footprint()
        with pytest.raises(BootstrapError) as refused:
            make(member.bootstrap, backend=minimal if member.rank == 1 else "shm")
        text = refused.value.record.text
        assert "minimal" in text
        assert "shm" in text
        assert "rank 1" in text
        assert "all ranks must agree" in text
        assert not before.leaks(), before.leaks()

    with Ranks(3, program) as ranks:
        ranks.join_well()


def test_the_readme_says_what_this_test_does() -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    install, compile_it, prove_it = block.splitlines()
    assert install.startswith("pip install PATH/TO/uccl_ep")
    assert compile_it == 'cc -O2 -shared -fPIC -I"$(python -m uccl_ep --include-dir)" minimal.c -o libminimal.so'
    assert prove_it == "uccl-ep conformance --library ./libminimal.so --level core"
