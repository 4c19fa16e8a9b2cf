# SPDX-License-Identifier: Apache-2.0
"""A lab: NICs, the libraries that drive them, and the environment in which programs see both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .._fetched import Missing
from . import nics, root, sysfs


@dataclass(frozen=True)
class Lab:
    spec: str  # UCCL_EP_LAB
    nics: tuple[nics.Nic, ...]
    libraries: root.Libraries
    sysfs: Path

    @classmethod
    def of(
        cls, nic: str, *, count: int = 1, variant: str | None = None, profile: str | None = None,
        seed: int | None = None, fabric: str | None = None, knobs: str = "", libraries: str = "auto",
    ) -> Lab:  # fmt: skip
        """Raises Missing, and BadNic where one of these does not exist."""
        words = {"nic": nic, "count": count, "variant": variant, "profile": profile, "seed": seed, "fabric": fabric}
        spec = ",".join(
            [*(f"{key}={value}" for key, value in words.items() if value is not None), *filter(None, [knobs])]
        )
        found = tuple(nics.describe(spec))
        chosen = root.choose(nic, libraries)
        return cls(spec, found, chosen, sysfs.lay_out(found, root.cache()))

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """For programs of Lab.command(). What was preloaded before stays, behind."""
        old = dict(os.environ if base is None else base)
        library = str(nics.library())
        if any(mark in library for mark in " :"):
            raise Missing(f"{library}: LD_PRELOAD takes no name with a space or a colon: install elsewhere")
        preloaded = [word for word in old.get("LD_PRELOAD", "").replace(":", " ").split() if word != library]
        return old | self.libraries.environment(self.nics[0].nic) | {
            "UCCL_EP_LAB": self.spec,
            "SYSFS_PATH": str(self.sysfs),
            "LD_PRELOAD": ":".join([library, *preloaded]),
            # Doorbells come as stores of 8 bytes, not as whole requests (BlueFlame).
            "MLX5_SHUT_UP_BF": "1",
        }  # fmt: skip

    def command(self, program: str, arguments: list[str]) -> list[str]:
        return self.libraries.command(program, arguments)
