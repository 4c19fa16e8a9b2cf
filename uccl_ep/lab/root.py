# SPDX-License-Identifier: Apache-2.0
"""Where the vendors' libraries come from: the machine's own, or those of a newer release of its distribution.

The newer ones are Debian packages, fetched and unpacked into the cache, not installed, as any user: apt gets them from
where this machine gets its packages, with lists and a cache of its own, and verifies them as it always does. Programs
use them through the loader and the C library that came with them, which are newer than the machine's, too:

    ROOT/bin/ibv_devinfo, ROOT/bin/fi_info ...: scripts that start the programs of ROOT/programs with ROOT/lib
    ROOT/lib, ROOT/lib/libibverbs: the loader, the libraries, and the providers
    ROOT/files.json: size and digest of each
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .._fetched import Missing, cache_folder, digest, locked, making, place, run

NEEDED = 61  # the release of rdma-core that has all four providers, with all that the backends use of them
PROVIDERS = {"connectx": "mlx5", "efa": "efa", "thor": "bnxt_re", "pollara": "ionic"}
# The oldest with which a provider was tried here; Pollara's came with 61.
OLDEST = {"connectx": 44, "efa": NEEDED, "thor": 44, "pollara": NEEDED}
PACKAGES = (
    "libc6", "libibverbs1", "ibverbs-providers", "ibverbs-utils", "perftest", "libfabric1", "libfabric-bin",
)  # fmt: skip
WHOSE = ("auto", "machine", "root")
SUITES = ("testing", "unstable")  # in this order: what is in the first has been tried
_REMEDY = "run `uccl-ep lab setup`"
_KEPT_PROGRAMS = ("ibv_*", "ib_*", "fi_*")
_LIBRARIES = ("/usr/lib/*", "/usr/lib64", "/usr/lib", "/lib64")
_PT_INTERP = 3


@dataclass(frozen=True)
class Libraries:
    release: int  # of rdma-core
    providers: frozenset[str]  # "mlx5" ...
    root: Path | None = None  # None: the machine's own

    def serves(self, nic: str) -> str:
        """Empty, or why these are not for that NIC."""
        where = "the machine's" if self.root is None else str(self.root)
        if PROVIDERS[nic] not in self.providers:
            return f"{where} rdma-core {self.release} has no provider {PROVIDERS[nic]}"
        if self.release < OLDEST[nic]:
            return f"{where} rdma-core is {self.release}, and {nic} needs {OLDEST[nic]}"
        return ""

    @property
    def lib(self) -> Path:
        assert self.root is not None
        return self.root / "lib"

    def environment(self, nic: str) -> dict[str, str]:
        """The configuration that names the providers lies in /etc, where these may be others or none."""
        return {"RDMAV_DRIVERS": PROVIDERS[nic]} if self.root is not None else {}

    def command(self, program: str, arguments: list[str]) -> list[str]:
        """What runs that program with these libraries. A name without a folder is looked for beside them first."""
        found = self._find(program)
        with open(found, "rb") as file:
            head = file.read(4096)
        if head.startswith(b"#!") and (self.root is None or found.parent != self.root / "bin"):
            words = head[2:].split(b"\n", 1)[0].decode(errors="replace").strip().split(None, 1)
            if words and Path(words[0]).name == "env" and len(words) > 1:
                words = shlex.split(words[1].removeprefix("-S"))
            if not words:
                raise Missing(f"{found} names no interpreter in its first line")
            return self.command(words[0], [*words[1:], str(found), *arguments])
        if head.startswith(b"\x7fELF") and not _has_loader(found):
            raise Missing(f"{found} is statically linked: its calls cannot be answered here. Link it dynamically")
        if self.root is None or not head.startswith(b"\x7fELF"):
            return [str(found), *arguments]
        return [*loader(self.lib), "--argv0", str(found), str(found), *arguments]

    def _find(self, program: str) -> Path:
        if self.root is not None and "/" not in program and (self.root / "bin" / program).is_file():
            return self.root / "bin" / program
        found = shutil.which(program)
        if found is None:
            raise Missing(f"{program}: no such program, or it may not be executed")
        return Path(found).absolute()

    def python(self) -> Path:
        """This interpreter, with these libraries in it: to be started, and found as sys.executable."""
        if self.root is None:
            return Path(sys.executable)
        prefix, real = Path(sys.prefix), Path(sys.executable).resolve()
        lines = f'#!/bin/sh\nexec {shlex.join(loader(self.lib))} --argv0 "$0" {shlex.quote(str(real))} "$@"\n'
        name = hashlib.sha256(f"{prefix}\n{lines}".encode()).hexdigest()[:16]
        folder = self.root.parent / f"python-{name}"
        if not (folder / "bin/python").is_file():
            with making(self.root.parent, "python") as partial:
                (partial / "bin").mkdir()
                (partial / "bin/python").write_text(lines)
                (partial / "bin/python").chmod(0o700)
                # The interpreter looks for pyvenv.cfg and lib beside what it was started as.
                home = f"home = {real.parent}\ninclude-system-site-packages = false\n"
                config = prefix / "pyvenv.cfg"
                (partial / "pyvenv.cfg").write_text(config.read_text() if config.is_file() else home)
                for part in ("lib", "lib64", "include"):
                    if (prefix / part).exists():
                        (partial / part).symlink_to(prefix / part)
                with suppress(OSError):  # another process was faster
                    partial.rename(folder)
        return folder / "bin/python"


def loader(lib: Path) -> list[str]:
    """The start of a command that runs a program with the libraries there."""
    found = next(iter(sorted(lib.glob("ld-linux*.so.*"))), None)
    if found is None:
        raise Missing(f"{lib} has no loader: {_REMEDY}")
    return [str(found), "--library-path", f"{lib}:{lib / 'libibverbs'}"]


def _has_loader(path: Path) -> bool:
    with open(path, "rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[4] != 2:
            return True
        table, size = int.from_bytes(head[32:40], "little"), int.from_bytes(head[54:56], "little")
        for index in range(int.from_bytes(head[56:58], "little")):
            file.seek(table + index * size)
            if int.from_bytes(file.read(4), "little") == _PT_INTERP:
                return True
    return False


# ------------------------------------------------------------------------------------------------------- what is there


def _look(folder: Path) -> Libraries | None:
    """The release is in the library's name: libibverbs.so.1.14.RELEASE.0."""
    found = re.search(r"\.so\.1\.\d+\.(\d+)\.", (folder / "libibverbs.so.1").resolve().name)
    if found is None or not (folder / "libibverbs.so.1").exists():
        return None
    names = (path.name for path in (folder / "libibverbs").glob("lib*-rdmav*.so"))
    return Libraries(int(found[1]), frozenset(name[3:].partition("-rdmav")[0] for name in names))


def machines() -> Libraries | None:
    for pattern in _LIBRARIES:
        for folder in sorted(Path("/").glob(pattern[1:])):
            libraries = _look(folder)
            if libraries is not None and libraries.providers:
                return libraries
    return None


def kept(cache: Path, thorough: bool = False) -> Libraries | None:
    """The newest that was fetched, if every file is as it was written: its size, or, thoroughly, its bytes."""
    for folder in sorted(cache.glob("root-*"), key=lambda path: path.name, reverse=True):
        try:
            files = json.loads((folder / "files.json").read_text())
            whole = bool(files) and all(
                (folder / name).stat().st_size == size and (not thorough or digest(folder / name) == value)
                for name, (size, value) in files.items()
            )
            found = _look(folder / "lib") if whole else None
        except (OSError, ValueError, TypeError, AttributeError):
            continue  # damaged: setup fetches it again, and replaces it
        if found is not None:
            return Libraries(found.release, found.providers, folder)
    return None


def cache() -> Path:
    return cache_folder("lab", "what the lab runs programs with")


def choose(nic: str, which: str = "auto") -> Libraries:
    """For that NIC. `which`: "machine" or "root", where it matters; otherwise the machine's if they are new enough,
    then fetched ones, then the machine's if they serve. Raises Missing."""
    own, fetched = machines(), None
    if which != "machine" and (which == "root" or own is None or own.release < NEEDED):
        fetched = kept(cache())
    order = {"machine": [own], "root": [fetched]}.get(
        which, [own if own and own.release >= NEEDED else None, fetched, own]
    )
    there = [libraries for libraries in order if libraries is not None]
    for libraries in there:
        if not libraries.serves(nic):
            return libraries
    why = there[-1].serves(nic) if there else "there is no libibverbs with providers"
    remedy = "install rdma-core" if which == "machine" else f"{_REMEDY}, which fetches newer libraries into the cache"
    raise Missing(f"{nic}: {why}: {remedy}")


# --------------------------------------------------------------------------------------------------------------- setup


def setup(where: Path | None = None, renew: bool = False) -> Libraries:
    """The machine's libraries if they are new enough, or some in the cache, fetched if need be. Raises Missing."""
    own = machines()
    if own is not None and own.release >= NEEDED and not any(own.serves(nic) for nic in PROVIDERS) and not renew:
        return own
    folder = cache() if where is None else where
    with locked(folder):
        found = None if renew else kept(folder, thorough=True)
        return found if found is not None else _fetch(folder)


def _fetch(cache: Path) -> Libraries:
    for tool in ("apt-get", "apt-cache", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise Missing(
                f"there is no {tool}: the lab fetches Debian's packages. Install rdma-core >= {NEEDED} instead"
            )
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=cache))
    try:
        reasons = []
        for mirror in _mirrors():
            for suite in SUITES:
                try:
                    _get(partial, mirror, suite)
                except Missing as missing:
                    reasons.append(f"{suite}: {missing}")
                    shutil.rmtree(partial / "apt", ignore_errors=True)
                    continue
                return _unpack(partial, cache)
        raise Missing("; ".join(reasons))
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _mirrors() -> list[str]:
    """Where this machine gets its distribution from: of its sources, those of its own release."""
    listed = run(["apt-get", "update", "--print-uris", "-o", "Debug::NoLocking=1"], Path("/"), "see /etc/apt")
    found = re.findall(r"^'(\S+?)/dists/([^'\s]+)/(?:In)?Release'", listed, re.MULTILINE)
    of_release = [uri for uri, suite in found if not re.search(r"[-/]", suite)]
    if not of_release:
        raise Missing(f"apt knows no source of packages to fetch newer ones from: install rdma-core >= {NEEDED}")
    return list(dict.fromkeys(of_release))


def _get(folder: Path, mirror: str, suite: str) -> None:
    """Packages and what they depend on, verified, into folder/apt/cache/archives."""
    apt = folder / "apt"
    for part in ("lists/partial", "cache/archives/partial"):
        (apt / part).mkdir(parents=True)
    (apt / "status").touch()  # nothing is installed: all dependencies are fetched
    keyring = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    signed = f"[signed-by={keyring}] " if keyring.exists() else ""
    # Packages of a `file:` source are used where they lie, and not brought here.
    source = re.sub(r"^file:", "copy:", mirror)
    (apt / "sources").write_text(f"deb {signed}{source} {suite} main\n")
    # Read behind the machine's own configuration: proxies and the like stay, its hooks and preferences do not.
    (apt / "conf").write_text(
        "#clear APT::Update;\n#clear DPkg;\n#clear Acquire::Languages;\n"
        f'Dir::State "{apt}";\nDir::State::Lists "{apt}/lists";\nDir::State::status "{apt}/status";\n'
        f'Dir::Cache "{apt}/cache";\nDir::Log "{apt}/log";\nDir::Etc::SourceList "{apt}/sources";\n'
        'Dir::Etc::SourceParts "/dev/null";\n'
        'Dir::Etc::Preferences "/dev/null";\nDir::Etc::PreferencesParts "/dev/null";\n'
        'Acquire::Languages "none";\nAPT::Sandbox::User "root";\nAPT::Install-Recommends "0";\nDebug::NoLocking "1";\n'
    )

    def shown(text: str) -> str:
        return text.replace(source, "the mirror").replace(mirror, "the mirror").replace(str(apt), "apt")

    def apt_run(*command: str) -> str:
        return run([command[0], "-q", "-c", str(apt / "conf"), *command[1:]], apt, "see the machine's apt", shown)

    apt_run("apt-get", "update", "-o", "APT::Update::Error-Mode=any")
    version = re.search(
        r"^Version: (\d+)", apt_run("apt-cache", "show", "--no-all-versions", "libibverbs1"), re.MULTILINE
    )
    if version is None or int(version[1]) < NEEDED:
        raise Missing(f"its rdma-core is {version[1] if version else 'none'}, and {NEEDED} is needed")
    apt_run("apt-get", "install", "-y", "--download-only", *PACKAGES)


def _unpack(partial: Path, cache: Path) -> Libraries:
    unpacked, made = partial / "unpacked", partial / "made"
    for package in sorted((partial / "apt/cache/archives").glob("*.deb")):
        run(["dpkg-deb", "-x", str(package), str(unpacked)], partial, "free space on that disk")
    lib = next(iter(sorted(unpacked.glob("**/libibverbs.so.1"))), unpacked / "no").parent
    (made / "bin").mkdir(parents=True)
    (made / "programs").mkdir()
    (made / "lib/libibverbs").mkdir(parents=True)
    folders = [lib, *(path for path in unpacked.glob(f"lib/{lib.name}") if path != lib)]
    libraries = [path for folder in folders for path in folder.glob("*.so*")]
    for kind, found in (
        ("lib", libraries),
        ("lib/libibverbs", list(lib.glob("libibverbs/*.so"))),
        ("programs", [path for pattern in _KEPT_PROGRAMS for path in (unpacked / "usr/bin").glob(pattern)]),
    ):
        for path in found:
            shutil.copy2(path, made / kind / path.name, follow_symlinks=False)
    _strip_dangling(made)
    result = _look(made / "lib")
    if result is None or set(PROVIDERS.values()) - result.providers:
        lacking = ", ".join(sorted(set(PROVIDERS.values()) - (result.providers if result else frozenset())))
        raise Missing(f"the packages have no libibverbs with providers {lacking}")
    files = {
        str(path.relative_to(made)): (path.stat().st_size, digest(path))
        for path in sorted(made.rglob("*")) if path.is_file() and not path.is_symlink()
    }  # fmt: skip
    name = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]
    final = cache / f"root-{result.release:04}-{name}"
    for path in (made / "programs").iterdir():
        start = shlex.join(loader(final.parent / partial.name / "made/lib")).replace(str(made), str(final))
        script = made / "bin" / path.name
        script.write_text(
            f'#!/bin/sh\nexec {start} --argv0 "$0" {shlex.quote(str(final / "programs" / path.name))} "$@"\n'
        )
        script.chmod(0o755)
        files[f"bin/{path.name}"] = (script.stat().st_size, digest(script))
    (made / "files.json").write_text(json.dumps(files, indent=1))
    _try(made)
    place(made, final)
    for old in (*cache.glob("root-*"), *cache.glob("python-*")):
        if old != final:
            shutil.rmtree(old, ignore_errors=True)
    return Libraries(result.release, result.providers, final)


def _strip_dangling(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.exists():
            path.unlink()


def _try(made: Path) -> None:
    """Its loader runs here, with its C library and libibverbs: a kernel that is too old, or a disk mounted noexec,
    shows now."""
    program = next(iter(sorted((made / "programs").glob("ibv_devices"))), None)
    if program is None:
        raise Missing("the packages have no ibv_devices")
    listed = [*loader(made / "lib"), "--list", str(program)]
    done = subprocess.run(listed, capture_output=True, text=True, errors="replace", timeout=60.0, check=False)
    if done.returncode or "not found" in done.stdout:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Missing(f"what was fetched does not run here: {said[-1] if said else done.returncode}")
