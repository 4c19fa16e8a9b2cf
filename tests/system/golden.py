# SPDX-License-Identifier: Apache-2.0
"""What vendors' libraries write into the queues of the lab's NICs, for tests/native/golden: one file for each library,
version and kind of NIC that writes differently.

    python tests/system/golden.py        makes those files anew whose libraries this machine has (`uccl-ep lab setup`)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from uccl_ep.lab import Lab, Missing

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
FILES = CHECKOUT / "tests" / "native" / "golden"
SECONDS = 240.0  # for what takes one


@dataclass(frozen=True)
class Golden:
    nic: str
    variant: str
    library: str
    release: int  # of rdma-core
    which: str  # of `lab run --libraries`

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.library}-{self.release}"

    @property
    def file(self) -> Path:
        return FILES / f"{self.name}.json"


ALL = [
    Golden("connectx", "cx7", "libmlx5", 44, "machine"),
    Golden("connectx", "cx7", "libmlx5", 65, "root"),
    Golden("efa", "efa2", "libefa", 65, "root"),
    Golden("efa", "efa3", "libefa", 65, "root"),
    Golden("thor", "thor", "libbnxt_re", 44, "machine"),
    Golden("thor", "thor2", "libbnxt_re", 65, "root"),
    Golden("pollara", "pollara", "libionic", 65, "root"),
    Golden("pollara", "pollara-v2", "libionic", 65, "root"),
]


def build(folder: Path) -> Path:
    """The program that has a library write. Its header is that of rdma-core, any version."""
    program = folder / "golden"
    headers = [f"-I{CHECKOUT / 'csrc' / 'lab'}", f"-I{CHECKOUT / 'tests' / 'native'}"]
    options = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-D_GNU_SOURCE", *headers]
    command = [os.environ.get("CC", "cc"), *options, str(HERE / "golden.c"), "-o", str(program), "-libverbs", "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"{' '.join(command)}: {done.stderr}")
    return program


def dump(golden: Golden, program: Path) -> str:
    """Raises Missing where this machine has no such library."""
    lab = Lab.of(
        golden.nic, variant=golden.variant, libraries=golden.which, fabric=f"golden-{golden.name}-{os.getpid()}"
    )
    if lab.libraries.release != golden.release:
        raise Missing(f"{golden.name}: rdma-core is {lab.libraries.release} here, and not {golden.release}")
    command = lab.command(str(program), [golden.variant, f"{golden.library}-{golden.release}"])
    done = subprocess.run(command, env=lab.environment(), capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode or done.stderr:
        raise RuntimeError(f"{golden.name}: {done.returncode}: {done.stderr}")
    return done.stdout


def main() -> None:
    FILES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for golden in ALL:
            try:
                golden.file.write_text(dump(golden, program))
                print(golden.file)
            except Missing as missing:
                print(f"{golden.name}: {missing}", file=sys.stderr)


if __name__ == "__main__":
    main()
