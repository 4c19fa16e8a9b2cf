# SPDX-License-Identifier: Apache-2.0
"""The cache of compiled kernels."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from uccl_ep.accel import Cache, _cache, _sources
from uccl_ep.errors import CommandError, CompileError

SOURCE = "a kernel"


class Counting:
    """A compiler that counts."""

    kind = "test"

    def __init__(self, version: str = "1") -> None:
        self.calls, self._version = 0, version

    def version(self) -> str:
        return self._version

    def compile(
        self, source: str, name: str, architecture: str, options: Sequence[str], headers: Mapping[str, str]
    ) -> bytes:
        if "error" in source:
            raise CompileError("an error")
        self.calls += 1
        return f"{self._version} {architecture} {options} {source}".encode() * 100


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "kernels")


def compiled(compiler: Counting, cache: Cache | None, **changed: object) -> bytes:
    given = {"source": SOURCE, "name": "k.cu", "architecture": "sm_90", "options": (), "headers": {"mine.h": "1"}}
    return _sources.compile_cached(compiler, cache=cache, **(given | changed))  # type: ignore[arg-type]


def entries(cache: Cache) -> list[Path]:
    return sorted(cache.folder.iterdir())


def test_the_second_time_it_is_there(cache: Cache) -> None:
    compiler = Counting()
    assert compiled(compiler, cache) == compiled(compiler, cache)
    assert compiler.calls == 1
    assert cache.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "changed",
    [
        {"source": "another kernel"},
        {"name": "l.cu"},
        {"architecture": "sm_80"},
        {"options": ("-DX",)},
        {"options": ("-DX", "-DY")},
        {"headers": {"mine.h": "2"}},
        {"headers": {"yours.h": "1"}},
        {"headers": {}},
    ],
)
def test_whatever_changes_it_is_compiled_again(cache: Cache, changed: dict[str, object]) -> None:
    compiler = Counting()
    compiled(compiler, cache)
    compiled(compiler, cache, **changed)
    compiled(compiler, cache, **changed)
    assert compiler.calls == 2
    assert compiled(compiler, cache) != b""
    assert compiler.calls == 2


def test_a_header_of_ours_changes_it(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Counting()
    compiled(compiler, cache)
    changed = {**_sources.own_headers(), "uccl_ep/ring.h": "other"}
    monkeypatch.setattr(_sources, "own_headers", lambda: changed)
    compiled(compiler, cache)
    assert compiler.calls == 2


def test_another_compiler_does_not_take_it(cache: Cache) -> None:
    first, second = Counting("1"), Counting("2")
    assert compiled(first, cache) != compiled(second, cache)
    assert second.calls == 1


def test_what_we_do_with_the_compiler_changes_it(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of uccl_ep that has other flags does not take what an older one made."""
    first, second = Counting(), Counting()
    compiled(first, cache)
    monkeypatch.setattr(_sources, "_how", lambda module: b"other flags")
    compiled(second, cache)
    assert second.calls == 1


def test_what_does_not_compile_is_not_kept(cache: Cache) -> None:
    for _ in range(2):
        with pytest.raises(CompileError):
            compiled(Counting(), cache, source="error")
    assert not cache.folder.exists() or not entries(cache)


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "other magic", "longer"])
def test_a_damaged_entry_is_compiled_again(cache: Cache, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    compiler = Counting()
    whole = compiled(compiler, cache)
    (entry,) = entries(cache)
    data = bytearray(entry.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 1
    changed = {"cut": data[:-40], "empty": b"", "flipped": data, "other magic": data[:-1] + b"2", "longer": data + b"x"}
    entry.write_bytes(changed[damage])
    with caplog.at_level(logging.WARNING, "uccl_ep.accel"):
        assert compiled(compiler, cache) == whole
    assert "damaged" in caplog.text
    assert compiler.calls == 2
    assert compiled(compiler, cache) == whole
    assert compiler.calls == 2


def test_what_is_used_stays_and_the_rest_goes(cache: Cache) -> None:
    compiler = Counting()
    sizes = []
    for number in range(4):
        compiled(compiler, cache, source=f"kernel {number}")
        sizes.append(sum(path.stat().st_size for path in entries(cache)))
        for path in entries(cache):  # apart in time without waiting
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**9))
    cache.limit = sizes[2]
    compiled(compiler, cache, source="kernel 0")  # a hit: now it is the youngest
    assert compiler.calls == 4
    compiled(compiler, cache, source="kernel 4")
    assert sum(path.stat().st_size for path in entries(cache)) <= cache.limit
    compiled(compiler, cache, source="kernel 0")
    compiled(compiler, cache, source="kernel 4")
    assert compiler.calls == 5
    compiled(compiler, cache, source="kernel 1")
    assert compiler.calls == 6


def test_a_kernel_above_the_limit_still_compiles(cache: Cache) -> None:
    cache.limit = 10
    compiler = Counting()
    assert compiled(compiler, cache) == compiled(compiler, cache)
    assert not entries(cache)


@pytest.mark.parametrize("open_to", [0o750, 0o707, 0o777])
def test_a_folder_that_others_can_write_is_left_aside(
    cache: Cache, open_to: int, caplog: pytest.LogCaptureFixture
) -> None:
    cache.folder.mkdir()
    cache.folder.chmod(open_to)
    compiler = Counting()
    with caplog.at_level(logging.WARNING, "uccl_ep.accel"):
        assert compiled(compiler, cache) == compiled(compiler, cache)
    assert compiler.calls == 2
    assert "of this user alone" in caplog.text
    assert not entries(cache)


def test_a_link_to_a_folder_is_left_aside(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    compiler = Counting()
    compiled(compiler, Cache(tmp_path / "link"))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_where_nothing_can_be_written_it_works_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    compiler = Counting()
    with caplog.at_level(logging.WARNING, "uccl_ep.accel"):
        compiled(compiler, Cache(tmp_path / "file" / "kernels"))
    assert "not kept" in caplog.text


def test_the_environment_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCCL_EP_CACHE_DIR", str(tmp_path))
    found = _cache.default()
    assert found is not None
    assert found.folder == tmp_path / "kernels"
    monkeypatch.setenv("UCCL_EP_CACHE_DIR", "")
    assert _cache.default() is None
    monkeypatch.delenv("UCCL_EP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    found = _cache.default()
    assert found is not None
    assert found.folder == tmp_path / "user/uccl_ep/kernels"


PROCESS = """
import sys
from pathlib import Path
from uccl_ep.accel import Cache
from uccl_ep.accel._cache import key
cache = Cache(Path(sys.argv[1]), limit=40_000)
wrong = 0
for turn in range(300):
    number = turn * int(sys.argv[2]) % 23
    name, content = key(str(number)), f"{number} ".encode() * 1000
    found = cache.get(name)
    wrong += found is not None and found != content
    if found is None:
        cache.put(name, content)
print(wrong)
"""


def test_processes_share_it(tmp_path: Path) -> None:
    """Each finds all of an entry or none, while all of them write and evict."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path / "kernels"), str(step)], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        )
        for step in (1, 5, 7, 11)
    ]  # fmt: skip
    for process in running:
        printed, said = process.communicate(timeout=120)
        assert (process.returncode, printed.strip()) == (0, "0"), said
        assert "damaged" not in said
    assert all(path.suffix == ".kernel" for path in (tmp_path / "kernels").iterdir())


@pytest.mark.parametrize("name", ["", "../k.cu", "a/b.cu", "-o", "k.cu\n"])
def test_a_name_is_a_file_name(cache: Cache, name: str) -> None:
    with pytest.raises(CommandError, match="name"):
        compiled(Counting(), cache, name=name)


@pytest.mark.parametrize("name", ["/etc/x.h", "../x.h", "a/../x.h", "uccl_ep/ring.h", ""])
def test_a_header_stays_in_its_place(cache: Cache, name: str) -> None:
    with pytest.raises(CommandError, match="header"):
        compiled(Counting(), cache, headers={name: ""})


def test_options_are_a_list(cache: Cache) -> None:
    with pytest.raises(CommandError, match="list"):
        compiled(Counting(), cache, options="-DX")
