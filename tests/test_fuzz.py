# SPDX-License-Identifier: Apache-2.0
"""Each fuzz target: the inputs of its corpus, then a fixed number of new ones from one seed. tools/fuzz.sh runs longer.

Where there is no libFuzzer, replay.c runs inputs, and random ones: shown here with another compiler on some targets.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
CORPUS = CHECKOUT / "tests/fuzz/corpus"
TARGETS = sorted(path.name for path in CORPUS.iterdir())
SEED = 1
# Pure functions are quick; others make and end a communicator each time.
QUICK = {"command", "mailbox", "cpus", "exchange"}
RUNS = {True: 100_000, False: 600}
# Enough to see that replay.c does its work.
REPLAYED = ("command", "inbox")


def run(*command: str | Path, timeout: float = 600, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
        check=False, errors="replace", stdin=subprocess.DEVNULL, env={**os.environ, **environment},
    )  # fmt: skip


@functools.cache
def build(compiler: str, *targets: str) -> tuple[Path, bool]:
    """The folder of the programs (all, if no target is named), and whether they are libFuzzer's."""
    folder = CHECKOUT / "build/fuzz-tests" / compiler
    configured = run(
        "cmake", "-S", CHECKOUT, "-B", folder, f"-DCMAKE_C_COMPILER={compiler}", "-DUCCL_EP_FUZZ=ON",
        "-DUCCL_EP_SANITIZE=address;undefined", "-DUCCL_EP_WERROR=ON",
    )  # fmt: skip
    assert configured.returncode == 0, configured.stdout[-4000:]
    jobs = str(len(os.sched_getaffinity(0)))
    wanted = [f"fuzz_{target}" for target in targets] or ["fuzz_targets"]
    built = run("cmake", "--build", folder, "--target", *wanted, "-j", jobs)
    assert built.returncode == 0, built.stdout[-8000:]
    libfuzzer = "UCCL_EP_LIBFUZZER:INTERNAL=1" in (folder / "CMakeCache.txt").read_text()
    return folder / "fuzz", libfuzzer


def fuzz(built: tuple[Path, bool], target: str, scratch: Path, runs: int) -> None:
    programs, libfuzzer = built
    options = [f"-runs={runs}", f"-seed={SEED}"]
    if libfuzzer:
        # What is new goes to the first folder. -runs counts the inputs of the corpus, too.
        known = len(list((CORPUS / target).iterdir()))
        options = [f"-runs={runs + known}", f"-seed={SEED}", f"-artifact_prefix={scratch}/", "-max_len=512",
                   "-len_control=10", "-timeout=60", scratch / "new"]  # fmt: skip
        (scratch / "new").mkdir()
    done = run(programs / f"fuzz_{target}", *options, CORPUS / target, ASAN_OPTIONS="abort_on_error=1")
    if done.returncode:
        inputs = [path.read_bytes().hex() for path in scratch.iterdir() if path.is_file()]
        pytest.fail(
            f"fuzz_{target} {' '.join(map(str, options))}: input {inputs}\n{done.stdout[-6000:]}", pytrace=False
        )
    if not libfuzzer:
        assert f"{len(list((CORPUS / target).iterdir()))} inputs replayed" in done.stdout


@pytest.mark.required_in_ci
def test_every_target_has_a_corpus() -> None:
    if not shutil.which("cmake") or not shutil.which("clang"):
        pytest.skip("clang or cmake is not installed")
    programs, _ = build("clang")
    assert sorted(path.name.removeprefix("fuzz_") for path in programs.iterdir()) == TARGETS
    assert all(any((CORPUS / target).iterdir()) for target in TARGETS)


@pytest.mark.required_in_ci
@pytest.mark.parametrize("target", TARGETS)
def test_fuzz(target: str, tmp_path: Path) -> None:
    if not shutil.which("cmake") or not shutil.which("clang"):
        pytest.skip("clang or cmake is not installed")
    built = build("clang")
    if not built[1]:
        pytest.skip("clang's libFuzzer is not installed (Debian: libclang-rt-dev)")
    fuzz(built, target, tmp_path, RUNS[target in QUICK])


@pytest.mark.parametrize("target", REPLAYED)
def test_corpus_without_libfuzzer(target: str, tmp_path: Path) -> None:
    """By replay.c, so that it works where it is needed."""
    if not shutil.which("cmake") or not shutil.which("cc"):
        pytest.skip("a compiler or cmake is not installed")
    fuzz(build("cc", *REPLAYED), target, tmp_path, 50)
