# SPDX-License-Identifier: Apache-2.0
"""What importing costs and drags in (J5, J7, L7)."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest


def python(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


def test_importing_is_cheap_and_loads_nothing_heavy(tmp_path: Path) -> None:
    code = """
import sys
import uccl_ep
print(*[name for name in ("numpy", "torch", "mpi4py", "typer", "rich", "uccl_ep._core") if name in sys.modules])
"""
    # Processor time: how busy the machine is does not matter.
    best = 9.0
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = python(code, cwd=tmp_path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0
        assert done.stderr == ""
        assert done.stdout.strip() == ""
    assert best < 0.3


def test_the_communicator_needs_no_torch_and_no_mpi(tmp_path: Path) -> None:
    done = python(
        "import sys; from uccl_ep import Communicator; print('torch' in sys.modules, 'mpi4py' in sys.modules)",
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["False", "False"], "")


def test_a_missing_cffi_is_named(tmp_path: Path) -> None:
    done = python("import sys; sys.modules['_cffi_backend'] = None; import uccl_ep.errors", cwd=tmp_path)
    assert done.returncode == 1
    assert "pip install cffi" in done.stderr


def test_every_public_name_resolves() -> None:
    import uccl_ep

    for name in uccl_ep.__all__:
        assert getattr(uccl_ep, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = uccl_ep.nonsense  # type: ignore[attr-defined]


def test_version_is_that_of_the_library() -> None:
    import uccl_ep
    from uccl_ep import _native

    assert uccl_ep.__version__ == _native.text(_native.lib.uccl_ep_version())


@pytest.mark.parametrize("question", ["--include-dir", "--library-dir"])
def test_a_build_system_gets_a_path(question: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "uccl_ep", question], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    folder = Path(done.stdout.strip())
    assert (folder / ("uccl_ep/backend.h" if question == "--include-dir" else "libuccl_ep.so.0")).is_file()


def test_an_embedder_links_against_the_installed_library(tmp_path: Path) -> None:
    from uccl_ep import paths

    source = tmp_path / "embedder.c"
    source.write_text("#include <stdio.h>\n#include <uccl_ep/uccl_ep.h>\nint main(void) { puts(uccl_ep_version()); }\n")
    library = paths.library_dir()
    link = [f"-L{library}", "-luccl_ep", f"-Wl,-rpath,{library}"]
    subprocess.run(["cc", f"-I{paths.include_dir()}", str(source), *link, "-o", "embedder"], check=True, cwd=tmp_path)
    import uccl_ep

    assert (
        subprocess.run(["./embedder"], capture_output=True, text=True, check=True, cwd=tmp_path).stdout.strip()
        == uccl_ep.__version__
    )
