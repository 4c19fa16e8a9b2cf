# SPDX-License-Identifier: Apache-2.0
"""Which NICs the lab has: asked of libuccl_ep_lab.so, which has to answer for them later."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

from .. import paths
from .._fetched import Missing


class BadNic(ValueError):
    """There is no such NIC, variant, profile or knob. Says which there are."""


@dataclass(frozen=True)
class Nic:
    name: str  # "mlx5_0"
    nic: str  # "connectx"
    variant: str
    vendor: int  # as verbs say it, which may be another than PCI's
    part: int
    firmware: str
    modalias: str
    abi: int
    guid: str  # 16 digits
    gids: tuple[str, ...]  # as IPv6 is written

    @property
    def pci(self) -> tuple[int, int]:
        """Vendor and device."""
        found = re.match(r"pci:v([0-9A-F]{8})d([0-9A-F]{8})", self.modalias)
        assert found is not None, self.modalias
        return int(found[1], 16), int(found[2], 16)


@dataclass(frozen=True)
class Variant:
    nic: str
    name: str
    profile: str  # what it is unless another is named


def library() -> Path:
    path = paths.library_dir() / "libuccl_ep_lab.so"
    if not path.is_file():
        raise Missing(f"{path} is not there: built without the kernel's headers: install linux-libc-dev and reinstall")
    return path


def _ask(function: str, *arguments: bytes) -> list[str]:
    call = getattr(ctypes.CDLL(str(library())), function)
    call.argtypes = [*(ctypes.c_char_p for _ in arguments), ctypes.c_char_p, ctypes.c_uint32]
    call.restype = ctypes.c_uint32
    size = 1 << 16
    text = ctypes.create_string_buffer(size)
    needed = call(*arguments, text, size)
    assert needed <= size, f"{function} says more than was ever expected"
    return text.value.decode().splitlines()


def describe(spec: str) -> list[Nic]:
    """Of a specification as in UCCL_EP_LAB. Raises BadNic."""
    found = []
    for line in _ask("uccl_ep_lab_describe", spec.encode()):
        kind, _, rest = line.partition(" ")
        if kind == "error":
            raise BadNic(rest)
        values = dict(word.split("=", 1) for word in rest.split(" "))
        found.append(
            Nic(
                values["name"], values["nic"], values["variant"], int(values["vendor"]), int(values["part"]),
                values["firmware"], values["modalias"], int(values["abi"]), values["guid"],
                tuple(values["gids"].split(",")),
            )
        )  # fmt: skip
    return found


def variants() -> list[Variant]:
    return [Variant(*line.split(" ")[1:]) for line in _ask("uccl_ep_lab_list") if line.startswith("variant ")]


def profiles() -> dict[str, str]:
    """Of virtual NICs, with what each is."""
    lines = (line.split(" ", 2) for line in _ask("uccl_ep_lab_list") if line.startswith("profile "))
    return {name: text for _, name, text in lines}
