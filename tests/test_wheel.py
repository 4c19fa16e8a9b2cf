# SPDX-License-Identifier: Apache-2.0
"""What a user gets: the wheel alone, in a fresh environment, outside the checkout. And a developer: editable."""

from __future__ import annotations

import email
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.required_in_ci

CHECKOUT = Path(__file__).resolve().parents[1]


def wheel() -> Path:
    built = list((CHECKOUT / "dist").glob("uccl_ep-*.whl"))
    if len(built) != 1:
        pytest.skip("no wheel in dist: make build")
    return built[0]


def output(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        pytest.fail(
            f"{command} ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}", pytrace=False
        )
    return done.stdout


def environment(folder: Path, requirement: Sequence[str]) -> Path:
    """A virtual environment of its own; its bin."""
    output(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    output(
        sys.executable, "-m", "pip", "-q", "--python", folder / "bin/python", "install", *requirement, cwd=folder.parent
    )
    return folder / "bin"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("fresh") / "venv", [str(wheel())])


def test_contents() -> None:
    names = set(zipfile.ZipFile(wheel()).namelist())
    metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
    info = metadata.removesuffix("METADATA")
    headers = {path.name for path in (CHECKOUT / "include/uccl_ep").glob("*.h")}
    assert {f"uccl_ep/include/uccl_ep/{name}" for name in headers} <= names
    assert {f"{info}licenses/LICENSE", f"{info}licenses/NOTICE", "uccl_ep/py.typed"} <= names  # J11
    assert {"uccl_ep/_core.abi3.so", "uccl_ep/lib/libuccl_ep.so.0", "uccl_ep/lib/mutation/libuccl_ep.so.0"} <= names
    assert {f"uccl_ep/lib/libuccl_ep_backend_{name}.so" for name in ("shm", "sim")} <= names
    assert {f"uccl_ep/lib/libuccl_ep_{name}.so" for name in ("cuda", "hip", "emulation", "emulation_device")} <= names
    kernels = list((CHECKOUT / "csrc/device").glob("*.cu"))
    assert {f"uccl_ep/kernels/{path.name}" for path in kernels} <= names
    assert {f"uccl_ep/lib/kernels/{path.stem}.so" for path in kernels} <= names
    cases = {path.name for path in (CHECKOUT / "tests/conformance").glob("*.py")}
    assert {f"uccl_ep/conformance/cases/{name}" for name in cases} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests/")]


def test_metadata() -> None:
    """J7: what is needed at run time is declared."""
    archive = zipfile.ZipFile(wheel())
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(name))
    required = {
        value.split(">")[0].split(";")[0].strip()
        for value in metadata.get_all("Requires-Dist", [])
        if "extra" not in value
    }
    assert required == {"cffi", "numpy", "platformdirs", "typer", "rich", "jinja2", "tomli"}
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"


def test_no_path_of_the_build_machine_is_in_it() -> None:
    archive = zipfile.ZipFile(wheel())
    guilty = [name for name in archive.namelist() if str(CHECKOUT).encode() in archive.read(name)]
    assert not guilty


def test_it_works_from_an_empty_folder(fresh: Path, tmp_path: Path) -> None:
    """J1, J3."""
    listed = json.loads(output(fresh / "uccl-ep", "backends", "--json", cwd=tmp_path))
    names = ("connectx", "efa", "pollara", "shm", "sim", "thor")
    assert sorted((one["name"], one["problem"]) for one in listed["backends"]) == [(name, "") for name in names]
    headers = Path(output(fresh / "python", "-m", "uccl_ep", "--include-dir", cwd=tmp_path).strip())
    assert (headers / "uccl_ep/backend.h").is_file()
    code = """
from uccl_ep import Communicator, SingleProcess
with Communicator(SingleProcess(), heap_bytes=4096) as comm:
    comm.channel(0).signal(0, 0).wait()
    print(comm.read_signal(0))
"""
    assert output(fresh / "python", "-c", code, cwd=tmp_path) == "1\n"


def test_the_suite_is_in_it(fresh: Path, tmp_path: Path) -> None:
    report = output(fresh / "uccl-ep", "conformance", "--ranks", "2", "--clause", "PUT-1", "--json", "-", cwd=tmp_path)
    assert json.loads(report)["schema"] == "uccl_ep.conformance/1"
    arguments = ("--backend", "sim", "--profile", "efa", "--ranks", "2", "--case", "sig2.*", "--json", "-")
    assert json.loads(output(fresh / "uccl-ep", "conformance", *arguments, cwd=tmp_path))["profile"] == "efa"
    assert json.loads(
        output(fresh / "uccl-ep", "explore", "--seeds", "5", "--profile", "cxi", "--json", "-", cwd=tmp_path)
    )


def test_an_editable_install_takes_what_was_rebuilt(tmp_path: Path) -> None:
    """J9: change a constant, build again as documented, import from somewhere else."""
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("build", "dist", ".venv", ".git", ".*_cache", "__pycache__", ".hypothesis")
    shutil.copytree(CHECKOUT, source, ignore=ignored)
    program = environment(tmp_path / "venv", ["-e", str(source)])
    question = "from uccl_ep import _native; print(_native.text(_native.lib.uccl_ep_version()))"
    before = output(program / "python", "-c", question, cwd=tmp_path).strip()
    header = source / "include/uccl_ep/uccl_ep.h"
    text = header.read_text()
    changed = text.replace("#define UCCL_EP_VERSION_PATCH 0", "#define UCCL_EP_VERSION_PATCH 7")
    assert changed != text
    header.write_text(changed)
    output(sys.executable, "-m", "pip", "-q", "--python", program / "python", "install", "-e", source, cwd=tmp_path)
    after = output(program / "python", "-c", question, cwd=tmp_path).strip()
    assert (before, after) == (before, before.rsplit(".", 1)[0] + ".7")
    assert before != after
