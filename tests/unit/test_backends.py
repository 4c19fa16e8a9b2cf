# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from uccl_ep import backends, errors, paths
from uccl_ep._native import lib


def build_library(folder: Path, code: str, name: str = "library.so") -> Path:
    source = folder / "library.c"
    source.write_text("#include <stdlib.h>\n#include <uccl_ep/backend.h>\n" + code)
    out = folder / name
    subprocess.run(["cc", "-shared", "-fPIC", f"-I{paths.include_dir()}", str(source), "-o", str(out)], check=True)
    return out


def test_shm_is_found_by_name_and_by_path() -> None:
    named = backends.find("shm")
    assert named.library == paths.library_dir() / "libuccl_ep_backend_shm.so"
    assert named.summary
    for spec in (named.library, str(named.library)):
        assert backends.find(spec).library == named.library


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(errors.NotABackend, match=r"known: .*shm.*did you mean 'shm'\?"):
        backends.find("shn")


def test_a_path_that_is_not_there_is_named() -> None:
    with pytest.raises(errors.NotABackend, match=r"no such file: /nonexistent\.so"):
        backends.find("/nonexistent.so")


def test_a_broken_package_of_a_backend_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken", "no_such_module_at_all", backends.GROUP)
    monkeypatch.setattr(backends, "_registered", lambda: {"broken": broken})
    with pytest.raises(errors.NotABackend, match="cannot be loaded"):
        backends.find("broken")


@pytest.mark.parametrize("probe", [backends.probe, backends.probe_apart])
def test_shm_tells_who_it_is(probe: object) -> None:
    found = probe(backends.find("shm").library)  # type: ignore[operator]
    assert found.name == "shm"
    assert found.version
    assert [device.unusable for device in found.devices] == [""]
    assert "atomic_add64" in found.devices[0].caps.names
    assert found.devices[0].caps.completion == "visible"


def test_a_library_without_the_entry_is_no_backend(tmp_path: Path) -> None:
    library = build_library(tmp_path, "int nothing;")
    for probe in (backends.probe, backends.probe_apart):
        with pytest.raises(errors.NotABackend):
            probe(library)


def test_a_file_that_is_no_library_is_no_backend(tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("hello")
    with pytest.raises(errors.NotABackend):
        backends.probe(text)


_ABI = divmod(lib.uccl_ep_backend_abi(), 1 << 16)


@pytest.mark.parametrize(
    ("major", "minor"),
    [("UCCL_EP_BACKEND_ABI_MAJOR + 1", "0"), ("UCCL_EP_BACKEND_ABI_MAJOR", "UCCL_EP_BACKEND_ABI_MINOR + 1")],
)
def test_another_interface_version_is_refused_naming_both(major: str, minor: str, tmp_path: Path) -> None:
    """ABI-1."""
    library = build_library(
        tmp_path,
        f"""static const uccl_ep_backend table = {{.size = sizeof table, .abi_major = {major}, .abi_minor = {minor},
            .name = "new", .version = "1"}};
        const uccl_ep_backend *uccl_ep_backend_entry(void) {{ return &table; }}""",
    )
    with pytest.raises(errors.AbiMismatch, match=f"this library has {_ABI[0]}.{_ABI[1]}:"):
        backends.probe(library)


@pytest.mark.parametrize(("code", "how"), [("exit(3);", "ended with 3"), ("abort();", "killed by signal 6")])
def test_a_library_that_ends_the_process_is_reported(code: str, how: str, tmp_path: Path) -> None:
    library = build_library(tmp_path, f"__attribute__((constructor)) static void loaded(void) {{ {code} }}")
    with pytest.raises(errors.BackendFault, match=how):
        backends.probe_apart(library)
