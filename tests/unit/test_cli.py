# SPDX-License-Identifier: Apache-2.0
"""The command line, as a person or a program types it: the real process, its exit code and both its outputs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import uccl_ep
from uccl_ep import doctor
from uccl_ep.cli.common import json_text

PROGRAM = Path(sys.executable).with_name("uccl-ep")
EVERY = [["backends"], ["devices"], ["doctor"]]


def uccl_ep_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [PROGRAM, *arguments],
        capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **environment}, encoding="utf-8",
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("arguments", EVERY)
def test_json_is_json_with_a_schema(arguments: list[str]) -> None:
    """M1, L7: one document on one stream, nothing on the other."""
    done = uccl_ep_command(*arguments, "--json")
    assert done.returncode == 0
    assert done.stderr == ""
    assert json.loads(done.stdout)["schema"] == f"uccl_ep.{arguments[0]}/1"


def test_json_has_no_nan() -> None:
    assert json.loads(json_text("s", a=float("nan"), b=[float("inf")], c=Path("/x"))) == {
        "schema": "s", "a": None, "b": [None], "c": "/x",
    }  # fmt: skip


@pytest.mark.parametrize("arguments", [*EVERY, ["--help"], ["--version"], ["devices", "--backend", "nonsense"]])
def test_an_ascii_terminal_is_enough(arguments: list[str]) -> None:
    """M5."""
    done = uccl_ep_command(*arguments, LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii", PYTHONCOERCECLOCALE="0")
    assert done.returncode == (2 if "nonsense" in arguments else 0)
    assert (done.stdout + done.stderr).isascii()
    assert done.stdout + done.stderr


def test_version() -> None:
    assert uccl_ep_command("--version").stdout == f"uccl-ep {uccl_ep.__version__}\n"


@pytest.mark.parametrize("wrong", [["devices", "--backend", "shn"], ["nonsense"], ["devices", "--nonsense"], []])
def test_a_wrong_command_line_is_exit_code_2(wrong: list[str]) -> None:
    assert uccl_ep_command(*wrong).returncode == 2


def test_a_wrong_name_lists_the_right_ones() -> None:
    """M9."""
    said = uccl_ep_command("devices", "--backend", "shn", COLUMNS="200").stderr
    assert "known: connectx, efa, pollara, shm, sim, thor" in said
    assert "did you mean 'shm'?" in said
    said = uccl_ep_command("doctr", COLUMNS="200").stderr
    assert "known: backends, " in said
    assert "did you mean 'doctor'?" in said


def test_a_backend_that_cannot_be_asked_is_a_row_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_text("not a library")
    done = uccl_ep_command("devices", "--backend", str(tmp_path / "broken.so"), "--json")
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert answer["devices"] == []
    assert "broken.so" in answer["problems"][0]["problem"]


@pytest.mark.parametrize(("effective", "level"), [("000001ffffffffff", "ok"), ("0000000000000000", "warning")])
def test_the_limit_of_locked_memory_binds_only_who_has_no_right(
    effective: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (8 << 20, 8 << 20))
    monkeypatch.setattr(doctor, "read_text", lambda path: f"Name:\tpython\nCapEff:\t{effective}\n")
    assert doctor.memory_lock().level == level


def test_doctor_needs_no_tools(tmp_path: Path) -> None:
    """F7: facts come from the kernel; with nothing on PATH the findings are the same."""
    usual = json.loads(uccl_ep_command("doctor", "--json").stdout)
    bare = json.loads(uccl_ep_command("doctor", "--json", PATH=str(tmp_path)).stdout)
    # Not what changes by the second.
    steady = [[check for check in answer["checks"] if check["name"] != "shm: memory"] for answer in (usual, bare)]
    assert steady[0] == steady[1]
    assert {check["level"] for check in steady[0]} <= {"ok", "info", "warning", "error", "unknown"}


def test_a_closed_pipe_is_no_traceback() -> None:
    done = subprocess.run(
        f"{PROGRAM} doctor --json | head -c 1", shell=True, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_help_lists_what_is_there() -> None:
    said = uccl_ep_command("--help").stdout
    for name in ("backends", "devices", "doctor"):
        assert name in said


INTERRUPTED_AT = """
import os, signal, sys
import uccl_ep.cli
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
uccl_ep.cli.main()
"""


def interrupted_at(module: str, *arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Ctrl-C in the moment in which `module` begins to load."""
    code = f"import signal; {before}\nMODULE = {module!r}\n{INTERRUPTED_AT}"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("module", ["typer", "uccl_ep.errors", "uccl_ep.cli.app", "uccl_ep.cli.inventory"])
def test_ctrl_c_while_it_loads_ends_it_quietly(module: str) -> None:
    done = interrupted_at(module, "backends")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("module", ["uccl_ep.perf.cli", "uccl_ep.perf.bench"])
def test_ctrl_c_while_a_command_loads_is_no_traceback(module: str) -> None:
    done = interrupted_at(module, "perf", "--help" if module.endswith("cli") else "proxy")
    assert done.returncode in (1, 130)
    assert "Traceback" not in done.stderr


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    done = interrupted_at("typer", "--version", before="signal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert (done.returncode, done.stdout) == (0, f"uccl-ep {uccl_ep.__version__}\n")
