# SPDX-License-Identifier: Apache-2.0
"""The lab without a program in it: which NICs there are, how a machine with them looks, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from uccl_ep import _fetched, paths, rdma
from uccl_ep.lab import BadNic, Lab, nics, root, sysfs
from uccl_ep.lab.cli import app

pytestmark = pytest.mark.skipif(
    not (paths.library_dir() / "libuccl_ep_lab.so").is_file(), reason="built without the kernel's headers"
)
ALL = frozenset(root.PROVIDERS.values())
Cli = Callable[..., Result]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UCCL_EP_CACHE_DIR", str(tmp_path))
    return root.cache()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with new libraries."""
    monkeypatch.setattr(root, "machines", lambda: root.Libraries(root.NEEDED, ALL))


def built_in() -> list[str]:
    return sorted({variant.nic for variant in nics.variants()})


def test_every_variant_can_be_asked_for_and_says_who_makes_it() -> None:
    makers = {"connectx": 0x15B3, "efa": 0x1D0F, "thor": 0x14E4, "pollara": 0x1DD8}
    for variant in nics.variants():
        (nic,) = nics.describe(f"nic={variant.nic},variant={variant.name}")
        assert nic.variant == variant.name
        assert nic.pci == (makers[variant.nic], nic.part)
        assert variant.profile in nics.profiles()


def test_nics_of_a_lab_differ() -> None:
    for name in built_in():
        found = nics.describe(f"nic={name},count=8")
        for attribute in ("name", "guid", "gids"):
            assert len({getattr(nic, attribute) for nic in found}) == 8, attribute
        assert {nic.nic for nic in found} == {name}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nic=cx", "nic=cx: connectx"),
        ("nic=connectx,variant=cx3", "variant=cx3: cx7"),
        ("nic=efa,profile=efa9", "profile=efa9: connectx"),
        ("nic=efa,max_sgl=2", "max_sgl"),
        ("nic=efa,max_sge=many", "max_sge"),
        ("nic=efa,count=9", "count=9: 1 to 8 are possible"),
        ("nic=efa,seed=x", "seed=x: a number is wanted"),
        ("nic=efa,fabric=a/b", "fabric=a/b"),
        ("", "no NIC is named"),
    ],
)
def test_what_there_is_not_is_named_with_what_there_is(spec: str, said: str) -> None:
    with pytest.raises(BadNic) as caught:
        nics.describe(spec)
    assert said in str(caught.value)


def test_a_machine_with_these_nics(cache: Path, own: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As rdma.py, which is not made for this, reads it."""
    for name in built_in():
        lab = Lab.of(name, count=2)
        monkeypatch.setenv("SYSFS_PATH", str(lab.sysfs))
        found = rdma.devices()
        assert [device.name for device in found] == [nic.name for nic in lab.nics]
        for device, nic in zip(found, lab.nics, strict=True):
            assert (device.vendor_id, device.part_id) == nic.pci
            assert device.firmware == nic.firmware
            assert (device.node_guid or "").replace(":", "") == nic.guid
            (port,) = device.ports
            assert port.active
            assert tuple(gid.address for gid in port.gids) == nic.gids
            assert port.pkeys == (0xFFFF,)
        numbers = [(lab.sysfs / f"class/infiniband_verbs/uverbs{i}/dev").read_text() for i in range(2)]
        assert numbers == ["231:192\n", "231:193\n"]
        modalias = (lab.sysfs / "class/infiniband_verbs/uverbs1/device/modalias").read_text()
        assert modalias == lab.nics[1].modalias + "\n"


def test_a_machine_is_laid_out_once(cache: Path) -> None:
    found = nics.describe("nic=efa,count=3")
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: sysfs.lay_out(found, cache), range(8)))
    (folder,) = folders
    before = folder.stat().st_mtime_ns
    assert sysfs.lay_out(found, cache) == folder
    assert folder.stat().st_mtime_ns == before
    assert sysfs.lay_out(found[:1], cache) != folder
    assert not list(cache.glob("*partial*"))


def test_what_a_killed_run_left_goes_with_the_next(cache: Path) -> None:
    (cache / "sysfs-partial-dead/class").mkdir(parents=True)
    with _fetched.making(cache, "sysfs") as alive:
        folder = sysfs.lay_out(nics.describe("nic=efa"), cache)
        assert {path.name for path in cache.iterdir()} == {folder.name, alive.name}
    assert {path.name for path in cache.iterdir()} == {folder.name}


def test_a_layout_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    with pytest.raises(OSError, match="No space"):
        sysfs.lay_out(nics.describe("nic=efa"), cache)
    assert not list(cache.iterdir())


def test_what_a_program_is_told(cache: Path, own: None) -> None:
    lab = Lab.of("efa", count=2, variant="efa3", profile="efa", seed=9, fabric="here", knobs="max_wr=64,rnr=fail")
    library = str(nics.library())
    told = lab.environment({"LD_PRELOAD": f"/x.so {library}:/y.so", "HOME": "/h"})
    spec = "nic=efa,count=2,variant=efa3,profile=efa,seed=9,fabric=here,max_wr=64,rnr=fail"
    assert told == {
        "HOME": "/h",
        "LD_PRELOAD": f"{library}:/x.so:/y.so",
        "SYSFS_PATH": str(lab.sysfs),
        "UCCL_EP_LAB": spec,
        "MLX5_SHUT_UP_BF": "1",
    }


# ------------------------------------------------------------------------------------------------------------ the CLI


@pytest.fixture
def cli(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`uccl-ep lab` with an empty cache."""
    monkeypatch.setenv("COLUMNS", "400")
    return lambda *words: CliRunner().invoke(app, words)


def test_list_names_all(cli: Cli) -> None:
    done = cli("list")
    assert done.exit_code == 0, done.output
    for variant in nics.variants():
        assert re.search(rf"^  --variant {variant.name}: profile {variant.profile}", done.output, re.MULTILINE)
    for name in nics.profiles():
        assert f"--profile {name}: " in done.output


@pytest.mark.parametrize(
    ("words", "said", "status"),
    [
        (["--nic", "cx", "--", "true"], "'cx'; known: connectx, efa, pollara, thor", 2),
        (["--nic", "efa", "--profile", "nobody", "--", "true"], "profile=nobody: connectx", 2),
        (["--nic", "efa", "--knobs", "max_sge=x", "--", "true"], "max_sge", 2),
        (["--nic", "efa", "--libraries", "theirs", "--", "true"], "'theirs'; known: auto, machine, root", 2),
        (["--nic", "efa", "--libraries", "root", "--", "true"], "run `uccl-ep lab setup`", 1),
        (["--nic", "efa"], "Missing argument", 2),
    ],
)
def test_refusals_have_a_remedy(cli: Cli, words: list[str], said: str, status: int) -> None:
    done = cli("run", *words)
    assert done.exit_code == status
    assert said in done.output
