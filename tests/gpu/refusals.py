# SPDX-License-Identifier: Apache-2.0
"""refusals.py KIND OUT.json: what cannot be had of an accelerator is refused by an error that says why, and what to do.

Each in a process of its own, since a driver that was told once that there is no GPU does not look again. A program and
no test, so that tools/gpu_check.sh can run it on any kind; what the kind does not have is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

# What is tried, for which kinds, in which environment, and the name of the error and words of its text.
CASES: tuple[tuple[str, tuple[str, ...], dict[str, str], str, str, str], ...] = (
    (
        "no GPU is refused",
        ("cuda",),
        {"CUDA_VISIBLE_DEVICES": ""},
        "accel.open(kind)",
        "NoDevice",
        "CUDA_VISIBLE_DEVICES",
    ),
    (
        "no GPU is refused",
        ("hip",),
        {"HIP_VISIBLE_DEVICES": "-1"},
        "accel.open(kind)",
        "NoDevice",
        "HIP_VISIBLE_DEVICES",
    ),
    ("a GPU that there is not is refused", ("cuda", "hip", "cpu"), {}, "accel.open(kind, 99)", "NoDevice", "99"),
    (
        "no GPU, asked of the library, is refused",
        ("cuda", "hip", "cpu"),
        {},
        "Communicator(SingleProcess(), heap_bytes=4096, accelerator=Missing(kind))",
        "NoDevice",
        "",
    ),
    (
        "an architecture that is not supported is refused",
        ("cuda", "hip"),
        {},
        "accel.compile_for(kind, 'sm_20' if kind == 'cuda' else 'gfx1', '', 'empty.cu', cache=False)",
        "UnsupportedArchitecture",
        "",
    ),
    (
        "host memory that cannot be registered is refused",
        ("cuda", "hip"),
        {},
        "accel.open(kind).register(numpy.frombuffer((ctypes.c_char * 4096).from_address(64 << 40), numpy.uint8))",
        "RegistrationError",
        "ulimit -l",
    ),
    (
        "a heap that is no device memory is refused",
        ("cuda", "hip", "cpu"),
        {},
        "Communicator(SingleProcess(), heap=(4096, 4096, 'device'), accelerator=accel.open(kind))",
        "",
        "",
    ),
    (
        "more memory than there is is refused",
        ("cuda", "hip"),
        {},
        "accel.open(kind).alloc(1 << 50)",
        "OutOfMemory",
        "",
    ),
)

PROGRAM = """
import ctypes, json, sys
import numpy
from uccl_ep import Communicator, SingleProcess, accel, errors

class Missing:
    device = 99
    def __init__(self, kind):
        self.kind, self.library = kind, accel.library(kind)

kind = sys.argv[1]
try:
    CODE
except errors.UcclEpError as error:
    print(json.dumps([type(error).__name__, str(error)]))
else:
    print(json.dumps(["", "nothing was refused"]))
"""


def tried(kind: str, code: str, environment: dict[str, str], name: str, words: str) -> tuple[bool, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("CODE", code), kind],
        capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **environment},
    )  # fmt: skip
    if done.returncode:
        return False, done.stderr.strip()[-400:]
    found, text = json.loads(done.stdout.splitlines()[-1])
    good = bool(found) and name in (found, "") and words in text and len(text) > 20
    return good, f"{found}: {text}"


def main(kind: str, out: str) -> int:
    results: list[dict[str, Any]] = []
    for what, kinds, environment, code, name, words in CASES:
        if kind in kinds:
            good, said = tried(kind, code, environment, name, words)
            results.append({"what": what, "ok": good, "said": said})
    with open(out, "w") as file:
        json.dump({"cases": results}, file, indent=1)
    for result in results:
        print("pass" if result["ok"] else "FAIL", result["what"], result["said"], sep=": ")
    return 0 if results and all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
