# SPDX-License-Identifier: Apache-2.0
"""Guests without a guest: what is looked for, fetched, kept and made; and deadlines and deaths, of a program in QEMU's
place. tests/system/test_softroce.py boots one."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from uccl_ep.conformance import runner, softroce
from uccl_ep.conformance.errors import SuiteError
from uccl_ep.conformance.results import CaseResult, SuiteResult
from uccl_ep.softroce import Guest, GuestDied, Missing, guest, image, kernel, machine, wire
from uccl_ep.softroce.guest import Limits


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def elf(interpreter: bool) -> bytes:
    """The head of a program of 64 bits with one segment: a loader's name, or code."""
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 2, 62, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    return head + struct.pack("<II48x", 3 if interpreter else 1, 5)


def module(*needs: str) -> bytes:
    return b"\x7fELF..\0license=GPL\0depends=" + ",".join(needs).encode() + b"\0name=x\0"


def kernel_tree(root: Path, version: str = "6.1.0-1-amd64", without: str = "") -> Path:
    """A kernel as packages lay it out; rdma_rxe needs ib_core, which needs none."""
    (root / "boot").mkdir(parents=True)
    (root / f"boot/vmlinuz-{version}").write_bytes(b"kernel " + version.encode())
    folder = root / "lib/modules" / version / "kernel/drivers"
    folder.mkdir(parents=True)
    for name in {*kernel.WANTED, "ib-core", "unwanted"} - {without, "virtio_pci"}:
        (folder / f"{name}.ko").write_bytes(module("ib_core") if name == "rdma_rxe" else module())
    (root / f"lib/modules/{version}/modules.builtin").write_text("kernel/drivers/virtio/virtio_pci.ko\n")
    return root


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    return folder


# ------------------------------------------------------------------------------------------------- what is missing


def test_everything_that_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "_SBIN", ())
    monkeypatch.setattr(machine, "_PROVIDERS", (str(tmp_path),))
    with pytest.raises(Missing) as caught:
        machine.find()
    text = str(caught.value)
    assert "apt-get install qemu-system-x86 busybox-static ibverbs-providers iproute2" in text
    assert "qemu-system-x86_64 (the machine that boots the guest)" in text


def test_a_busybox_that_needs_a_loader_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    busybox = program(tmp_path / "busybox", "")
    for content, missing in ((b"#!/bin/sh\n", True), (elf(True), True), (elf(False), False)):
        busybox.write_bytes(content)
        assert ("busybox-static" in {package for _, _, package in machine._lacking()}) is missing


def test_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    with pytest.raises(Missing, match=r"x86-64 machines, and this one is aarch64"):
        machine.find()


def test_the_cache_is_this_users_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UCCL_EP_CACHE_DIR", str(tmp_path / "own"))
    folder = machine.cache_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o750)
    with pytest.raises(Missing, match="chmod 700"):
        machine.cache_folder()
    monkeypatch.setenv("UCCL_EP_CACHE_DIR", "")
    with pytest.raises(Missing, match="UCCL_EP_CACHE_DIR is empty"):
        machine.cache_folder()


# -------------------------------------------------------------------------------------------------------- the kernel


def test_modules_stand_behind_what_they_need(tmp_path: Path) -> None:
    found = kernel.installed(kernel_tree(tmp_path))
    assert found is not None
    names = [path.name for path in found.modules]
    assert names.index("ib-core.ko") < names.index("rdma_rxe.ko")
    assert "unwanted.ko" not in names
    assert "virtio_pci.ko" not in names  # built in


def test_the_newest_kernel_that_has_all_is_taken(tmp_path: Path) -> None:
    kernel_tree(tmp_path / "a", "6.1.0-9-amd64")
    kernel_tree(tmp_path / "b", "6.1.0-10-amd64")
    kernel_tree(tmp_path / "c", "6.12.1-amd64", without="rdma_rxe")
    for other in "bc":
        shutil.copytree(tmp_path / other, tmp_path / "a", dirs_exist_ok=True)
    found = kernel.installed(tmp_path / "a")
    assert found is not None
    assert found.version == "6.1.0-10-amd64"
    assert kernel.installed(tmp_path / "c") is None


def test_compressed_modules_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.ko.xz"
    path.write_bytes(lzma.compress(module("b-c", "d")))
    assert kernel.depends(kernel.module_bytes(path)) == ["b_c", "d"]


APT = {
    "apt-cache": 'case "$3" in linux-image-amd64) echo "Depends: linux-image-6.1.0-1-amd64 (= 6.1.1-1)";; '
    '*) echo "Depends: kmod, linux-base";; esac',
    "apt-get": 'echo "$*" >> "$LOG"; [ -z "$OFFLINE" ] || { echo "E: Unable to locate package" >&2; exit 100; }; '
    "touch linux-image-6.1.0-1-amd64_6.1.1-1_amd64.deb",
    "dpkg-deb": 'cp -r "$TREE" "$3"',
}


@pytest.fixture
def apt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Programs in place of apt's, and no kernel installed; where apt-get writes what it was asked."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in APT.items():
        program(programs / name, text)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("TREE", str(kernel_tree(tmp_path / "tree")))
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    real = kernel.installed
    monkeypatch.setattr(kernel, "installed", lambda root=None: None if root is None else real(root))
    return tmp_path / "log"


def test_a_package_is_fetched_once_and_again_when_it_was_damaged(apt: Path, cache: Path) -> None:
    stale = cache / "partial-of-one-that-was-killed"
    stale.mkdir()
    found = kernel.find(cache)
    assert found.image.read_bytes() == b"kernel 6.1.0-1-amd64"
    assert kernel.find(cache) == found
    assert apt.read_text() == "-q download linux-image-6.1.0-1-amd64\n"
    # Only what is needed is kept, and nothing of the work.
    assert sorted(path.name for path in cache.iterdir()) == ["kernel-6.1.0-1-amd64", "lock"]
    assert not list(cache.rglob("unwanted.ko"))
    found.modules[0].write_bytes(b"damaged")
    assert kernel.find(cache).modules[0].read_bytes() != b"damaged"
    assert len(apt.read_text().splitlines()) == 2


def test_without_apt_or_its_lists_the_error_says_what_helps(
    apt: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLINE", "1")
    with pytest.raises(Missing, match=r"Unable to locate package \(try: apt-get update"):
        kernel.find(cache)
    assert not list(cache.glob("partial-*"))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Missing, match=r"there is no apt-cache.*linux-image-amd64"):
        kernel.find(cache)


def test_a_package_without_the_modules_is_refused(
    apt: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREE", str(kernel_tree(tmp_path / "cloud", without="9p")))
    with pytest.raises(Missing, match="those for clouds have none"):
        kernel.find(cache)


def test_a_cache_in_use_is_waited_for_with_a_deadline(cache: Path) -> None:
    with (
        kernel.locked(cache),
        pytest.raises(Missing, match="in use by another process"),
        kernel.locked(cache, seconds=0.01),
    ):
        pass


# --------------------------------------------------------------------------------------------------------- the image


def bz_image(payload: bytes) -> bytes:
    head = bytearray(0x400)
    head[0x1F1] = 1
    head[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", head, 0x248, 0, len(payload))
    return bytes(head) + payload


def test_the_kernel_is_uncompressed_where_it_can_be() -> None:
    inner = b"\x7fELF" + bytes(100)
    assert image.uncompressed(bz_image(lzma.compress(inner, check=lzma.CHECK_CRC32) + b"\0\0\0\0")) == inner
    if shutil.which("zstd"):
        packed = subprocess.run(["zstd", "-qc"], input=inner, stdout=subprocess.PIPE, check=True).stdout
        assert image.uncompressed(bz_image(packed + b"\0\0\0\0")) == inner
    for other in (b"", b"short", bz_image(b"\x04\x22\x4d\x18 lz4"), bz_image(b"\xfd7zXZ\0 cut"), bytes(0x300)):
        assert image.uncompressed(other) == other


def test_the_archive_is_one_for_others(tmp_path: Path) -> None:
    if shutil.which("busybox") is None:
        pytest.skip("there is no busybox to read it")
    entries = [("bin", 0o040755, b""), ("bin/odd", 0o100755, b"12345"), ("empty", 0o100644, b""), ("x", 0o100600, b"y")]
    subprocess.run(
        ["busybox", "cpio", "-id"], cwd=tmp_path, input=image.archive(entries), check=True, capture_output=True
    )
    found = {
        str(path.relative_to(tmp_path)): path.read_bytes() if path.is_file() else b"" for path in tmp_path.rglob("*")
    }
    assert found == {name: content for name, _, content in entries}
    assert (tmp_path / "bin/odd").stat().st_mode & 0o777 == 0o755


def test_a_damaged_image_is_made_again_and_old_ones_go(apt: Path, cache: Path, tmp_path: Path) -> None:
    busybox = tmp_path / "busybox"
    for turn in range(5):
        busybox.write_bytes(b"busybox %d" % turn)
        made = image.prepare(machine.Machine(Path("/qemu"), busybox), cache)
        again = image.prepare(machine.Machine(Path("/qemu"), busybox), cache)
        assert made == again
    assert len(list(cache.glob("image-*"))) == 3
    for damage in (b"", made.files.read_bytes()[:-1]):
        made.files.write_bytes(damage)
        assert image.prepare(machine.Machine(Path("/qemu"), busybox), cache) == made
        assert made.files.read_bytes() != damage
    (made.files.parent / "digests.json").write_text("{}")
    image.prepare(machine.Machine(Path("/qemu"), busybox), cache)
    assert set(json.loads((made.files.parent / "digests.json").read_text())) == {"kernel", "files"}


# ------------------------------------------------------------------------------------- deadlines and deaths of a guest

# Where the guest's /out is, from QEMU's arguments.
FIND_OUT = (
    'for a; do case "$a" in local,id=out,path=*) out=${a#local,id=out,path=}; out=${out%%,security*};; esac; done'
)


def fake(tmp_path: Path, body: str, **options: Any) -> Guest:
    qemu = program(tmp_path / "qemu", f"{FIND_OUT}\n{body}")
    files = image.Image("6.1.0-1-amd64", tmp_path / "kernel", tmp_path / "files")
    return Guest(machine.Machine(qemu, tmp_path / "busybox"), files, **options)


@pytest.fixture
def tidy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for runs, in which nothing may stay."""
    folder = tmp_path / "runs, with a comma"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_what_a_command_did_comes_back(tmp_path: Path, tidy: Path) -> None:
    # The path has a comma, which QEMU wants twice.
    body = (
        'out=$(printf %s "$out" | sed s/,,/,/g)\necho ready\necho one; printf tw; sleep 0.1; echo o\n'
        '. "$out/command" > "$out/stdout"; cp "$out/given" "$out/taken"; echo 3 > "$out/rc"'
    )
    heard: list[bytes] = []
    done = fake(tmp_path, body).run(
        "echo said", Limits(run=30), inputs={"given": b"a\0b"}, outputs=("taken", "absent"), on_line=heard.append
    )
    assert (done.status, done.stdout, done.files) == (3, "said\n", {"taken": b"a\0b"})
    assert heard == [b"one", b"two"]
    assert not list(tidy.iterdir())


@pytest.mark.parametrize(
    ("body", "limits", "kind", "text"),
    [
        ("exec sleep 1000", Limits(run=1, boot=0.3), "boot", "not up after 0.3 s"),
        ("echo ready; exec sleep 1000", Limits(run=0.3), "hang", "did not end within 0.3 s"),
        (
            "echo ready; while :; do echo x; sleep 0.05; done",
            Limits(run=0.5, silence=60),
            "hang",
            "did not end within 0.5 s",
        ),
        (
            "echo ready; echo x; exec sleep 1000",
            Limits(run=100, silence=0.3),
            "hang",
            "nothing was heard of it for 0.3 s",
        ),
    ],
)
def test_a_guest_that_hangs(tmp_path: Path, tidy: Path, body: str, limits: Limits, kind: str, text: str) -> None:
    began = time.monotonic()
    with pytest.raises(GuestDied, match=text) as caught:
        fake(tmp_path, f"echo words >&2; echo $$ > {tmp_path}/pid; {body}").run("true", limits)
    assert caught.value.kind == kind
    assert "words" in caught.value.console
    assert time.monotonic() - began < 30
    assert not list(tidy.iterdir())
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_a_guest_that_died_is_tried_once_more(tmp_path: Path, tidy: Path) -> None:
    count = f"echo x >> {tmp_path}/tries; echo ready"
    deaths: list[GuestDied] = []
    with pytest.raises(GuestDied, match="without an exit status"):
        fake(tmp_path, f"{count}; echo Kernel panic >&2").run("true", Limits(run=30), on_death=deaths.append)
    assert [death.kind for death in deaths] == ["died"]
    assert "Kernel panic" in deaths[0].console
    (tmp_path / "tries").unlink()
    comes_back = f'{count}; [ $(wc -l < {tmp_path}/tries) = 1 ] || echo 0 > "$(echo "$out" | sed s/,,/,/g)/rc"'
    assert fake(tmp_path, comes_back).run("true", Limits(run=30)).status == 0
    assert not list(tidy.iterdir())


def test_qemu_that_cannot_be_started_says_why(tmp_path: Path, tidy: Path) -> None:
    one = fake(tmp_path, "")
    (tmp_path / "qemu").unlink()
    with pytest.raises(GuestDied) as caught:
        one.run("true", Limits(run=30))
    assert "No such file" in caught.value.console


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_stays_of_an_owner_that_is_killed(tmp_path: Path, tidy: Path, how: signal.Signals) -> None:
    body = f"echo $$ > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/pid; echo ready; exec sleep 1000"
    qemu = program(tmp_path / "qemu", body)
    owner = f"""
import tempfile
from pathlib import Path
from uccl_ep.softroce import Guest, guest, image, machine
tempfile.tempdir = {str(tidy)!r}
one = Guest(machine.Machine(Path({str(qemu)!r}), Path("/b")), image.Image("6", Path("/k"), Path("/f")))
one.run("true", guest.Limits(run=1000))
"""
    process = subprocess.Popen([sys.executable, "-c", owner], stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(how)
    process.wait(60)
    pid = (tmp_path / "pid").read_text().strip()
    while Path(f"/proc/{pid}").exists() or list(tidy.iterdir()):
        assert time.monotonic() < end, "something of the guest stayed"
        time.sleep(0.01)


# ------------------------------------------------------------------------------------------------------------ the lane


def test_a_result_comes_through_json_whole() -> None:
    result = runner.run_suite(runner.Options(backend="shm", ranks=2, seed=5, cases=("sig1.add_of_zero", "abi1.*")))
    result.labels.append("for a test")
    told = json.loads(result.json_text())
    again = SuiteResult.from_dict(told, result.replay)
    assert again.as_dict() == told
    assert again.replay_of(again.cases[0]) == result.replay_of(result.cases[0])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lane": "softroce", "backend": "shm"}, "opens no RDMA device"),
        ({"lane": "softroce", "backend": "sim"}, "go together"),
        ({"impair": True}, "add --lane softroce"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], text: str) -> None:
    with pytest.raises(SuiteError, match=text):
        runner.check(runner.Options(**options))


class _Guest:
    """A guest that tells these lines, and then dies or ends."""

    lines: tuple[dict[str, Any], ...] = ()
    death: GuestDied | None = None

    def run(self, command: str, limits: Limits, **given: Any) -> guest.Outcome:
        assert "uccl_ep.conformance.softroce" in command
        for line in self.lines:
            given["on_line"](json.dumps(line).encode())
        if self.death is not None:
            raise self.death
        return guest.Outcome(1, "out", "err", "6", 1.0, 2.0)


OPTIONS = runner.Options(backend="connectx", lane="softroce", seed=3)


def test_a_guest_that_is_lost_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softroce, "Guest", _Guest)
    monkeypatch.setattr(_Guest, "death", GuestDied("hang", "the guest hangs: so", "last words"))
    seen: list[CaseResult] = []
    result = runner.run_suite(OPTIONS, lambda case, done, total: seen.append(case))
    assert result.failed
    assert [(case.status, case.message) for case in result.cases] == [("internal_error", "the guest hangs: so")]
    assert result.cases[0].detail["output"] == "last words"
    assert seen == result.cases
    json.loads(result.json_text())

    # In the middle: what ended stays, what ran is blamed.
    started = runner.run_suite(runner.Options(backend="shm", ranks=2, seed=5, cases=("sig1.add_of_zero",)))
    (case,) = (one.as_dict() for one in started.cases)
    told = {**started.as_dict(), "cases": []}
    other = {**case, "id": "sig1.other"}
    monkeypatch.setattr(
        _Guest,
        "lines",
        [
            {"started": told, "replay": "replay"},
            {"begins": case},
            {"ended": case, "done": 1, "total": 2},
            {"begins": other},
        ],
    )
    result = runner.run_suite(OPTIONS)
    assert [(one.id, one.status) for one in result.cases] == [
        ("sig1.add_of_zero", "pass"),
        ("sig1.other", "internal_error"),
    ]
    assert result.verdict == "does not conform"
    json.loads(result.json_text())

    monkeypatch.setattr(_Guest, "death", None)
    assert "ended in the guest with 1 and no report" in runner.run_suite(OPTIONS).cases[-1].message


def test_what_the_guest_refuses_the_caller_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softroce, "Guest", _Guest)
    monkeypatch.setattr(_Guest, "lines", [{"error": "no case is selected"}])
    with pytest.raises(SuiteError, match="no case is selected"):
        runner.run_suite(OPTIONS)


def test_faults_that_nobody_met_are_no_proof() -> None:
    def counts(dropped: int, again: int) -> dict[str, Any]:
        device = {"completer_retry_err": again, "duplicate_request": 0}
        return {**{end: {"dropped": dropped} for end in wire.ENDS}, **dict.fromkeys(wire.DEVICES, device)}

    assert wire.bitten(counts(1, 1))
    assert not wire.bitten(counts(1, 0))
    assert not wire.bitten(counts(0, 1))


def test_labels_say_what_the_devices_are() -> None:
    assert softroce.labels(OPTIONS) == ["Soft-RoCE", "limits only"]
    own = runner.Options(backend="own", library=Path("/x.so"), lane="softroce", impair=True)
    assert softroce.labels(own) == ["Soft-RoCE", f"impaired: {' '.join(wire.IMPAIRMENT)}"]
