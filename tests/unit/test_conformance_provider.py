# SPDX-License-Identifier: Apache-2.0
"""The lane `provider` from outside: what is refused, what a report says, and a process that is lost or hangs. The suite
in the lane: tests/system/test_lab_provider.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from uccl_ep import paths
from uccl_ep.conformance import lanes, provider, remote, runner
from uccl_ep.conformance.errors import SuiteError
from uccl_ep.conformance.runner import Options
from uccl_ep.lab import inside, nics, root

pytestmark = pytest.mark.skipif(
    not (paths.library_dir() / "libuccl_ep_lab.so").is_file(), reason="built without the kernel's headers"
)
OPTIONS = Options(backend="connectx", lane="provider", seed=3, ranks=2)
ALL = frozenset(root.PROVIDERS.values())


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with new libraries, and a cache of its own."""
    monkeypatch.setenv("UCCL_EP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(root, "machines", lambda: root.Libraries(root.NEEDED, ALL))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (replace(OPTIONS, backend="shm"), "'shm' drives no NIC there; give --backend connectx, efa, thor, pollara"),
        (replace(OPTIONS, libraries="mine"), "--libraries 'mine': valid: auto, machine, root"),
        (replace(OPTIONS, profile="cx9"), "profile=cx9: connectx"),
        (replace(OPTIONS, variant="cx3"), "variant=cx3: cx7"),
        (replace(OPTIONS, knobs="max_sgl=2"), "max_sgl"),
        (replace(OPTIONS, knobs="max_sge=many"), "max_sge"),
        (replace(OPTIONS, libraries="root"), "run `uccl-ep lab setup`"),
        (Options(lane="shm", knobs="max_wr=64"), "--knobs max_wr=64: .*add --lane provider"),
        (Options(lane="shm", libraries="root"), "add --lane provider"),
        (Options(lane="shm", variant="cx6"), "add --lane provider"),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(options: Options, said: str) -> None:
    with pytest.raises(SuiteError, match=said):
        runner.check(options)


def test_a_model_that_is_not_built_in_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    only = [variant for variant in nics.variants() if variant.nic == "connectx"]
    monkeypatch.setattr(nics, "variants", lambda: only)
    with pytest.raises(SuiteError, match="the lab has no model of the NIC 'pollara'; there are: connectx"):
        runner.check(replace(OPTIONS, backend="pollara"))


def test_nics_are_two_on_a_fabric_of_the_runs_own() -> None:
    options = replace(OPTIONS, variant="cx6", profile="connectx-ro", knobs="max_wr=64,rnr=fail")
    one, other = provider.lab_of(options), provider.lab_of(options)
    words = dict(word.split("=") for word in one.spec.split(","))
    fabric = words.pop("fabric")
    assert words == {
        "nic": "connectx", "count": "2", "variant": "cx6", "profile": "connectx-ro", "seed": "3", "max_wr": "64",
        "rnr": "fail",
    }  # fmt: skip
    assert fabric not in other.spec
    assert provider.facts(one) == {
        "nic": "connectx", "variant": "cx6", "firmware": one.nics[0].firmware, "devices": ["mlx5_0", "mlx5_1"],
        "library": "libmlx5", "rdma_core": root.NEEDED, "libraries": "the machine's",
    }  # fmt: skip
    assert provider.labels(one) == ["libmlx5 of rdma-core 61 (the machine's)", "virtual NIC connectx cx6"]


def test_the_command_that_repeats_a_run_has_all_that_chose_it() -> None:
    options = replace(
        OPTIONS, variant="cx6", profile="connectx-ro", knobs="max_wr=64", libraries="machine", library=Path("/x.so")
    )
    words = runner.replay(options)
    for part in (
        "--library /x.so", "--backend connectx", "--lane provider", "--variant cx6", "--profile connectx-ro",
        "--knobs max_wr=64", "--libraries machine", "--ranks 2",
    ):  # fmt: skip
        assert part in words


def test_options_arrive_as_they_were_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    options = replace(OPTIONS, library=Path("x.so"), cases=["a", "b"], devices=["mlx5_0"], clauses=[])
    assert remote.options_told(remote.told_options(options)) == replace(options, library=tmp_path / "x.so")


# ------------------------------------------------------------------------------------------------------ another process


@pytest.fixture
def instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A shell script runs in the suite's place: $3 is the descriptor of lines, $4 who its parent should be."""

    def run(script: str) -> None:
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nsay() {{ echo "$1" > /dev/fd/$lines; }}\nlines=$3 parent=$4\n{script}\n')
        python.chmod(0o755)
        monkeypatch.setattr(root.Libraries, "python", lambda self: python)

    return run


def test_a_process_that_dies_is_an_internal_error_with_its_last_words(instead: Callable[[str], None]) -> None:
    instead("cat > /dev/null; echo no such luck >&2; exit 3")
    result = runner.run_suite(OPTIONS)
    (case,) = result.cases
    assert (case.id, case.status) == ("provider.process", "internal_error")
    assert case.message == "the suite's process ended with 3 and no report"
    assert case.detail["output"] == "no such luck"
    assert (result.profile, result.seed, result.lab and result.lab["variant"]) == ("connectx", 3, "cx7")
    assert result.cannot_prove == lanes.LANES["provider"].cannot_prove
    json.loads(result.json_text())


def test_a_process_that_hears_nothing_is_an_internal_error(instead: Callable[[str], None]) -> None:
    instead("exec 0<&-; exit 7")
    options = replace(OPTIONS, cases=["x" * (1 << 18)])  # more than a pipe holds
    assert runner.run_suite(options).cases[0].message == "the suite's process ended with 7 and no report"


def test_a_process_that_is_silent_is_ended(instead: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "_SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(provider, "_END_SECONDS", 0.1)
    instead("cat > /dev/null; echo $$ >&2; exec sleep 1000")
    (case,) = runner.run_suite(OPTIONS).cases
    assert case.message == "the suite's process was silent for 0.2 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int(case.detail["output"]), 0)


def test_what_the_process_refuses_the_caller_refuses(instead: Callable[[str], None]) -> None:
    instead("""cat > /dev/null; say '{"error": "no case is selected"}'""")
    with pytest.raises(SuiteError, match="no case is selected"):
        runner.run_suite(OPTIONS)


def test_a_report_is_given_as_it_came(instead: Callable[[str], None], tmp_path: Path) -> None:
    own = runner.run_suite(Options(backend="shm", ranks=2, seed=5, cases=("sig1.add_of_zero",)))
    (tmp_path / "report").write_text(json.dumps({"report": own.as_dict()}))
    instead(f'cat > /dev/null; say "$(cat {tmp_path}/report)"')
    result = runner.run_suite(replace(OPTIONS, knobs="max_wr=64"))
    assert [(case.id, case.status) for case in result.cases] == [("sig1.add_of_zero", "pass")]
    assert (result.knobs, result.profile) == ("max_wr=64", "connectx")
    assert "--lane provider" in result.replay_of(result.cases[0])


def test_the_suites_process_ends_at_once_for_another_parent() -> None:
    reader, writer = os.pipe()
    try:
        words = [sys.executable, "-m", provider.__name__, str(writer), "1"]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, pass_fds=(writer,), cwd="/", check=False, timeout=100)
        assert done.returncode == 70
    finally:
        os.close(reader)
        os.close(writer)


def test_outside_the_lab_nothing_is_the_nics() -> None:
    assert inside.held() == (0, frozenset())
