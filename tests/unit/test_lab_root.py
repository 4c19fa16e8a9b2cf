# SPDX-License-Identifier: Apache-2.0
"""Where the vendors' libraries come from, with a mirror made of files: what is fetched, verified, kept and refused."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from uccl_ep._fetched import Missing
from uccl_ep.lab import root

pytestmark = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("apt-get", "apt-cache", "dpkg-deb")), reason="no apt: it is Debian's"
)
LIB = "usr/lib/x86_64-linux-gnu"
LOADER = "#!/bin/sh\necho loaded\n"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Mirror:
    """A suite of packages, each a few bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, dict[str, str]] = {
            "libc6": {f"{LIB}/ld-linux-x86-64.so.2": LOADER, f"{LIB}/libc.so.6": "libc"},
            "libibverbs1": {f"{LIB}/libibverbs.so.1.14.65.0": "verbs"},
            "ibverbs-providers": {f"{LIB}/libibverbs/lib{name}-rdmav65.so": name for name in root.PROVIDERS.values()},
            "ibverbs-utils": {"usr/bin/ibv_devices": "devices"},
            "perftest": {"usr/bin/ib_write_bw": "bandwidth", "usr/bin/unwanted": "no"},
            "libfabric1": {f"{LIB}/libfabric.so.1": "fabric"},
            "libfabric-bin": {"usr/bin/fi_info": "info"},
        }

    def publish(self, suite: str, release: str = "65.0-1", without: str = "") -> list[Path]:
        packages, made = "", []
        pool = self.folder / "pool" / suite
        pool.mkdir(parents=True)
        architecture = subprocess.check_output(["dpkg", "--print-architecture"], text=True).strip()
        for name, files in self.files.items():
            if name == without:
                continue
            tree = self.folder / "tree" / name
            shutil.rmtree(tree, ignore_errors=True)
            for path, content in files.items():
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                (tree / path).write_text(content)
                (tree / path).chmod(0o755)
            if name == "libibverbs1":
                (tree / LIB / "libibverbs.so.1").symlink_to("libibverbs.so.1.14.65.0")
            control = f"Package: {name}\nVersion: {release}\nArchitecture: {architecture}\n"
            control += "Maintainer: nobody <n@example.org>\nDescription: x\n"
            (tree / "DEBIAN").mkdir()
            (tree / "DEBIAN/control").write_text(control)
            file = pool / f"{name}.deb"
            subprocess.run(
                ["dpkg-deb", "-Znone", "--root-owner-group", "-b", str(tree), str(file)],
                check=True,
                capture_output=True,
            )
            data = file.read_bytes()
            packages += f"{control}Filename: pool/{suite}/{name}.deb\nSize: {len(data)}\nSHA256: {sha256(data)}\n\n"
            made.append(file)
        index = self.folder / "dists" / suite / "main" / f"binary-{architecture}"
        index.mkdir(parents=True)
        (index / "Packages").write_text(packages)
        self.release(suite)
        return made

    def release(self, suite: str) -> None:
        folder = self.folder / "dists" / suite
        index = next(folder.glob("main/*/Packages"))
        data = index.read_bytes()
        (folder / "Release").write_text(
            f"Origin: Debian\nSuite: {suite}\nCodename: {suite}\nComponents: main\n"
            f"Architectures: {index.parent.name[7:]}\nDate: Tue, 01 Dec 2026 00:00:00 UTC\n"
            f"SHA256:\n {sha256(data)} {len(data)} {index.relative_to(folder)}\n"
        )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    """Of a machine that takes unsigned packages from there, and has no libraries of its own."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    (tmp_path / "sources").write_text(f"deb file:{folder} stable main\ndeb file:{folder} stable-updates main\n")
    conf = tmp_path / "apt.conf"
    conf.write_text(
        f'Dir::Etc::SourceList "{tmp_path}/sources";\nDir::Etc::SourceParts "/dev/null";\n'
        'Acquire::AllowInsecureRepositories "1";\nAPT::Get::AllowUnauthenticated "1";\n'
        f'APT::Update::Post-Invoke {{ "touch {tmp_path}/hook" }};\n'
    )
    monkeypatch.setenv("APT_CONFIG", str(conf))
    monkeypatch.setattr(root, "machines", lambda: None)
    yield Mirror(folder)
    assert not (tmp_path / "hook").exists(), "a hook of the machine's apt has run"


def test_libraries_are_fetched_once(mirror: Mirror, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror.publish("testing")
    found = root.setup(cache)
    assert found.release == 65
    assert found.providers == frozenset(root.PROVIDERS.values())
    assert found.root is not None
    assert sorted(path.name for path in (found.root / "bin").iterdir()) == ["fi_info", "ib_write_bw", "ibv_devices"]
    said = subprocess.run([str(found.root / "bin/ibv_devices")], capture_output=True, text=True, check=True)
    assert said.stdout == "loaded\n"
    for path in cache.rglob("*"):
        assert path.is_symlink() or path.is_dir() or str(mirror.folder) not in path.read_text(), (
            "the mirror's name is kept"
        )
    assert {path.name for path in cache.iterdir()} == {"lock", found.root.name}

    monkeypatch.setenv("PATH", str(cache))  # nothing could be fetched now
    assert root.setup(cache) == found
    assert root.kept(cache) == found


def test_what_was_damaged_is_fetched_again(mirror: Mirror, cache: Path) -> None:
    mirror.publish("testing")
    found = root.setup(cache)
    assert found.root is not None
    library = found.root / "lib/libibverbs/libmlx5-rdmav65.so"
    library.write_text("5xlm")
    assert root.kept(cache) == found
    assert root.kept(cache, thorough=True) is None
    assert root.setup(cache) == found
    assert library.read_text() == "mlx5"
    library.unlink()
    assert root.kept(cache) is None


def test_a_second_suite_is_tried_where_the_first_is_too_old(mirror: Mirror, cache: Path) -> None:
    mirror.publish("testing", "60.9-1")
    mirror.publish("unstable", "61.0-1")
    assert root.setup(cache).root is not None


@pytest.mark.parametrize(
    "kind", ["old", "checksum", "missing package", "no suite", "no provider", "broken loader", "truncated"]
)
def test_what_cannot_be_used_is_refused(mirror: Mirror, cache: Path, kind: str) -> None:
    said = {
        "old": r"its rdma-core is 44, and 61 is needed",
        "checksum": r"Hash Sum mismatch|unexpected size",
        "missing package": r"Unable to locate package libfabric1",
        "no suite": r"testing: .*unstable: ",
        "no provider": r"no libibverbs with providers ionic",
        "broken loader": r"does not run here: no such C library",
        "truncated": r"dpkg-deb",
    }[kind]
    if kind == "broken loader":
        mirror.files["libc6"][f"{LIB}/ld-linux-x86-64.so.2"] = "#!/bin/sh\necho no such C library >&2; exit 1\n"
    if kind == "no provider":
        del mirror.files["ibverbs-providers"][f"{LIB}/libibverbs/libionic-rdmav65.so"]
    if kind != "no suite":
        made = mirror.publish(
            "testing", "44.0-2" if kind == "old" else "65.0-1", "libfabric1" if kind == "missing package" else ""
        )
        if kind == "checksum":
            made[1].write_bytes(made[1].read_bytes()[:-1] + b"!")
        if kind == "truncated":
            index = next(mirror.folder.glob("dists/testing/main/*/Packages"))
            old, new = made[1].read_bytes(), made[1].read_bytes()[:200]
            made[1].write_bytes(new)
            text = index.read_text().replace(f"{len(old)}\nSHA256: {sha256(old)}", f"{len(new)}\nSHA256: {sha256(new)}")
            index.write_text(text)
            mirror.release("testing")
    with pytest.raises(Missing, match=said) as caught:
        root.setup(cache)
    assert str(mirror.folder) not in str(caught.value)
    assert {path.name for path in cache.iterdir()} == {"lock"}, "something half done is left"


def test_a_setup_that_was_killed_leaves_nothing_that_counts(mirror: Mirror, cache: Path) -> None:
    mirror.publish("testing")
    half = cache / "partial-dead/made/lib"
    half.mkdir(parents=True)
    (cache / "root-0099-dead").mkdir()
    (cache / "root-0099-dead/files.json").write_text('{"lib/libibverbs.so.1": [5, ""]}')
    found = root.setup(cache)
    assert found.release == 65
    assert found.root is not None
    assert {path.name for path in cache.iterdir()} == {"lock", found.root.name}


def test_no_apt(mirror: Mirror, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(Missing, match=r"no apt-get.*Install rdma-core >= 61"):
        root.setup(cache)


# -------------------------------------------------------------------------------------------------------- the choice


def libraries(release: int, *providers: str, where: Path | None = None) -> root.Libraries:
    return root.Libraries(release, frozenset(providers), where)


ALL = tuple(root.PROVIDERS.values())


@pytest.mark.parametrize(
    ("own", "fetched", "nic", "which", "taken"),
    [
        (61, 65, "efa", "auto", "own"),
        (44, 65, "connectx", "auto", "fetched"),
        (44, None, "connectx", "auto", "own"),
        (44, None, "efa", "auto", "efa: the machine's rdma-core is 44, and efa needs 61: run `uccl-ep lab setup`"),
        (44, 65, "thor", "machine", "own"),
        (44, 65, "pollara", "machine", "pollara needs 61: install rdma-core"),
        (65, 66, "thor", "root", "fetched"),
        (65, None, "thor", "root", "there is no libibverbs with providers: run `uccl-ep lab setup`"),
        (None, None, "thor", "auto", "there is no libibverbs with providers: run `uccl-ep lab setup`"),
        (43, None, "connectx", "auto", "connectx needs 44"),
    ],
)  # fmt: skip
def test_which_libraries_are_taken(
    own: int | None,
    fetched: int | None,
    nic: str,
    which: str,
    taken: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCCL_EP_CACHE_DIR", str(tmp_path))
    there = {
        "own": libraries(own, *ALL) if own else None,
        "fetched": libraries(fetched, *ALL, where=tmp_path) if fetched else None,
    }
    monkeypatch.setattr(root, "machines", lambda: there["own"])
    monkeypatch.setattr(root, "kept", lambda cache: there["fetched"])
    if taken in there:
        assert root.choose(nic, which) == there[taken]
    else:
        with pytest.raises(Missing) as caught:
            root.choose(nic, which)
        assert taken in str(caught.value)


def test_a_missing_provider_is_named() -> None:
    assert "no provider ionic" in libraries(65, "mlx5").serves("pollara")


def test_how_programs_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lib, folder = tmp_path / "root/lib", tmp_path / "folder"
    (tmp_path / "root/bin").mkdir(parents=True)
    lib.mkdir()
    folder.mkdir()
    (lib / "ld-linux-x86-64.so.2").touch()
    contents = {
        tmp_path / "root/bin/ibv_devinfo": b"#!/bin/sh\n",
        folder / "script": b"#!/usr/bin/env -S inner -u\n",
        folder / "inner": Path("/bin/true").resolve().read_bytes(),
        folder / "static": b"\x7fELF\x02" + bytes(59),
        folder / "ibv_devinfo": b"#!/bin/sh\n",
    }
    for path, content in contents.items():
        path.write_bytes(content)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin")
    fetched, own = libraries(65, *ALL, where=tmp_path / "root"), libraries(65, *ALL)
    start = [str(lib / "ld-linux-x86-64.so.2"), "--library-path", f"{lib}:{lib / 'libibverbs'}", "--argv0"]
    inner = str(folder / "inner")
    assert fetched.command("ibv_devinfo", ["-v"]) == [str(tmp_path / "root/bin/ibv_devinfo"), "-v"]
    assert fetched.command("script", ["1"]) == [*start, inner, inner, "-u", str(folder / "script"), "1"]
    assert own.command("inner", ["1"]) == [inner, "1"]
    with pytest.raises(Missing, match="statically linked"):
        fetched.command("static", [])
    with pytest.raises(Missing, match="no such program"):
        fetched.command("nothing", [])
    assert fetched.environment("thor") == {"RDMAV_DRIVERS": "bnxt_re"}
    assert own.environment("thor") == {}
