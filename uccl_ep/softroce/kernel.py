# SPDX-License-Identifier: Apache-2.0
"""A kernel for the guest: one that is installed, or the distribution's package, fetched and unpacked, not installed.

Which modules are needed, and in which order, is read from the modules themselves (`depends=` in section .modinfo), so
that neither depmod nor root is. Of a package only these are kept. apt does the fetching, as this machine is set up.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .._fetched import Missing, digest, locked, place, run

# What the guest loads, beside what these depend on. crc32 is asked for by name when a device is made, crc32c when
# modules are: no file names them.
WANTED = (
    "crc32c_generic", "crc32_generic", "virtio_pci", "9pnet_virtio", "9p", "overlay", "veth", "sch_netem", "rdma_rxe",
)  # fmt: skip
# Debian's and Ubuntu's packages that depend on the current kernel.
_META = ("linux-image-amd64", "linux-image-generic")
_PARTS = re.compile(r"linux-(?:image|binary|modules|modules-extra)-\d[^\s,|(]*")


@dataclass(frozen=True)
class Kernel:
    version: str
    image: Path  # vmlinuz
    modules: tuple[Path, ...]  # in the order in which they are loaded


# ------------------------------------------------------------------------------------------------------ a folder of one


def installed(root: Path = Path("/")) -> Kernel | None:
    """The newest one below `root` that can be read and has all modules."""
    versions = [path.name for path in (root / "lib/modules").glob("*") if (path / "kernel").is_dir()]
    for version in sorted(versions, key=_by_number, reverse=True):
        image = root / f"boot/vmlinuz-{version}"
        if os.access(image, os.R_OK):
            modules = _in_order(root / "lib/modules" / version)
            if modules is not None:
                return Kernel(version, image, modules)
    return None


def _by_number(version: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"[.\-+~]", version)]


def _in_order(folder: Path) -> tuple[Path, ...] | None:
    """The files of WANTED and of what they depend on, each behind what it needs; None: one is not there."""
    files = {_name(path): path for path in (folder / "kernel").rglob("*.ko*")}
    try:
        built_in = {_name(Path(line)) for line in (folder / "modules.builtin").read_text().splitlines()}
    except OSError:
        built_in = set()
    order: dict[str, Path] = {}
    try:
        for name in WANTED:
            _append(name, files, built_in, order)
    except LookupError:
        return None
    return tuple(order.values())


def _name(path: Path) -> str:
    return path.name.partition(".ko")[0].replace("-", "_")


def _append(name: str, files: dict[str, Path], built_in: set[str], order: dict[str, Path]) -> None:
    if name in order or name in built_in:
        return
    if name not in files:
        raise LookupError(name)
    for needed in depends(module_bytes(files[name])):
        _append(needed, files, built_in, order)
    order[name] = files[name]


def depends(module: bytes) -> list[str]:
    found = re.search(rb"\0depends=([^\0]*)\0", module)
    return [name.replace("-", "_") for name in found[1].decode("ascii", "replace").split(",") if name] if found else []


def module_bytes(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    return unzstd(data, str(path)) if path.suffix == ".zst" else data


def unzstd(data: bytes, what: str) -> bytes:
    try:
        return subprocess.run(["zstd", "-qdc"], input=data, stdout=subprocess.PIPE, check=True, timeout=60.0).stdout
    except FileNotFoundError:
        raise Missing(f"{what} is compressed by zstd, which is not found. On Debian: apt-get install zstd") from None
    except (subprocess.SubprocessError, OSError) as error:
        raise Missing(f"{what} cannot be uncompressed: {error}") from error


# ------------------------------------------------------------------------------------------------------- from a package


def find(cache: Path) -> Kernel:
    """An installed one, one fetched before, or one fetched now. Raises Missing."""
    return installed() or _kept(cache) or _fetch(cache)


def _kept(cache: Path) -> Kernel | None:
    """One that was fetched, if every file is as it was written."""
    for folder in sorted(cache.glob("kernel-*"), key=lambda path: _by_number(path.name), reverse=True):
        try:
            digests = json.loads((folder / "digests.json").read_text())
            if digests and all(digest(folder / name) == value for name, value in digests.items()):
                kernel = installed(folder)
                if kernel is not None:
                    return kernel
        except (OSError, ValueError, AttributeError):
            continue  # damaged: it is fetched again, and replaced
    return None


def _fetch(cache: Path) -> Kernel:
    with locked(cache):
        kernel = _kept(cache)  # another process may have been faster
        if kernel is not None:
            return kernel
        packages = _packages()
        partial = Path(tempfile.mkdtemp(prefix="partial-", dir=cache))
        try:
            run(["apt-get", "-q", "download", *packages], partial, "apt-get update, then again")
            for package in sorted(partial.glob("*.deb")):
                run(["dpkg-deb", "-x", str(package), "unpacked"], partial, "free space on that disk")
            whole = installed(partial / "unpacked")
            if whole is None:
                raise Missing(
                    f"{' '.join(packages)} has not all of {', '.join(WANTED)}: install a kernel that has, e.g. "
                    "Debian's linux-image-amd64 (those for clouds have none)"
                )
            _keep(whole, partial / "unpacked", partial / "kept")
            final = cache / f"kernel-{whole.version}"
            place(partial / "kept", final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        kernel = installed(final)
        assert kernel is not None
        return kernel


def _packages() -> list[str]:
    """Those that the distribution's current kernel consists of."""
    for tool in ("apt-cache", "apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise Missing(
                f"no kernel with rdma_rxe is installed in /boot and /lib/modules, and none can be fetched: there is no "
                f"{tool}. Install the distribution's kernel with its extra modules (Debian: linux-image-amd64)"
            )
    for meta in _META:
        found: dict[str, None] = {}
        waiting = _parts_of(meta)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found[name] = None
                waiting += _parts_of(name)
        if found:
            return list(found)
    raise Missing(
        f"no kernel with rdma_rxe is installed, and apt knows none of {', '.join(_META)}: run apt-get update, "
        "or install one"
    )


def _parts_of(package: str) -> list[str]:
    shown = subprocess.run(
        ["apt-cache", "show", "--no-all-versions", package],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=60.0, check=False,
    )  # fmt: skip
    depends = re.search(r"^Depends: (.*)$", shown.stdout, re.MULTILINE)
    return _PARTS.findall(depends[1]) if depends else []


def _keep(kernel: Kernel, root: Path, kept: Path) -> None:
    """Copy what is needed of it, with what each file's bytes come to."""
    digests = {}
    built_in = root / "lib/modules" / kernel.version / "modules.builtin"
    for path in (kernel.image, *kernel.modules, built_in):
        if path.exists():
            name = str(path.relative_to(root))
            (kept / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, kept / name)
            digests[name] = digest(kept / name)
    (kept / "digests.json").write_text(json.dumps(digests, indent=1))
