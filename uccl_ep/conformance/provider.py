# SPDX-License-Identifier: Apache-2.0
"""The lane `provider`: the same suite, its ranks with the vendor's own library, on virtual NICs (uccl_ep.lab).

run_on_lab() is the caller's side. What answers in a NIC's place is preloaded, and the libraries may be others than this
machine's: so a process is started with both, which runs the suite and forks every rank. `python -m
uccl_ep.conformance.provider` is that process. Its NICs are on a fabric of their own, with the run's seed.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from uccl_ep.lab import BadNic, Lab, Missing, nics, root

from . import runner
from .errors import SuiteError
from .remote import Listener, Teller, options_told, told_options
from .results import SuiteResult
from .runner import Options, Progress

NICS = 2
_SILENCE_SECONDS = 600.0
_END_SECONDS = 10.0
_KEPT_OUTPUT = 6000
_PR_SET_PDEATHSIG = 1
# They name libraries; here the lab's are meant.
_NOT_INHERITED = ("UCCL_EP_LIBIBVERBS", "UCCL_EP_LIBEFA")


def lab_of(options: Options) -> Lab:
    """The NICs that are asked for, and what drives them. Raises SuiteError if there is no such thing here."""
    nic = options.backend
    if nic not in root.PROVIDERS:
        raise SuiteError(
            f"--lane 'provider': the backend {nic!r} drives no NIC there; give --backend {', '.join(root.PROVIDERS)}"
        )
    if options.libraries not in root.WHOSE:
        raise SuiteError(f"--libraries {options.libraries!r}: valid: {', '.join(root.WHOSE)}")
    try:
        built_in = dict.fromkeys(variant.nic for variant in nics.variants())
        if nic not in built_in:
            raise SuiteError(
                f"--lane 'provider': the lab has no model of the NIC {nic!r}; there are: {', '.join(built_in)}"
            )
        return Lab.of(
            nic, count=NICS, variant=options.variant, profile=options.profile, seed=options.seed, knobs=options.knobs,
            fabric=f"suite-{os.getpid()}-{secrets.token_hex(4)}", libraries=options.libraries,
        )  # fmt: skip
    except (BadNic, Missing) as error:
        raise SuiteError(f"--lane 'provider': {error}") from error


def facts(lab: Lab) -> dict[str, Any]:
    """For the report."""
    nic, libraries = lab.nics[0], lab.libraries
    return {
        "nic": nic.nic,
        "variant": nic.variant,
        "firmware": nic.firmware,
        "devices": [one.name for one in lab.nics],
        "library": f"lib{root.PROVIDERS[nic.nic]}",
        "rdma_core": libraries.release,
        "libraries": "the machine's" if libraries.root is None else "fetched",
    }


def labels(lab: Lab) -> list[str]:
    told = facts(lab)
    return [
        f"{told['library']} of rdma-core {told['rdma_core']} ({told['libraries']})",
        f"virtual NIC {told['nic']} {told['variant']}",
    ]


def _profile(lab: Lab, options: Options) -> str:
    mine = lab.nics[0]
    return options.profile or next(
        variant.profile for variant in nics.variants() if (variant.nic, variant.name) == (mine.nic, mine.variant)
    )


# ---------------------------------------------------------------------------------------------------- the caller's side


def run_on_lab(options: Options, progress: Progress | None = None) -> SuiteResult:
    """Start the process, hear it to its end; nothing of it remains running. Raises SuiteError if it cannot start."""
    options = runner.seeded(options)
    lab = lab_of(options)
    run = Listener(options, "provider", "process", progress)
    report: dict[str, Any] | None = None
    ended = ""
    told = told_options(replace(options, devices=[nic.name for nic in lab.nics]))
    with tempfile.TemporaryFile() as output:
        reader, writer = os.pipe()
        try:
            process = _start(lab, writer, output)
        finally:
            os.close(writer)
        try:
            assert process.stdin is not None
            process.stdin.write(told.encode())
            process.stdin.close()
            for line in _lines(reader, _SILENCE_SECONDS * options.time_scale):
                if line is None:
                    ended = f"the suite's process was silent for {_SILENCE_SECONDS * options.time_scale:g} s"
                elif b'"report"' in line[:16]:
                    report = json.loads(line)["report"]
                else:
                    run.hear(line)
        except BrokenPipeError:
            pass  # it is gone already; what it said tells why
        finally:
            os.close(reader)
            _end(process, at_once=report is None and run.error is None)
        output.seek(0)
        said: bytes = output.read()
    if run.error is not None:
        raise SuiteError(run.error)
    if report is not None:
        result = SuiteResult.from_dict(report, runner.replay(options))
    else:
        ended = ended or f"the suite's process ended with {process.returncode} and no report"
        result = run.outcome_of(ended, said[-_KEPT_OUTPUT:].decode(errors="replace").strip())
    result.lab, result.knobs, result.profile = facts(lab), options.knobs, _profile(lab, options)
    result.environment["command"] = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return result


def environment(lab: Lab) -> dict[str, str]:
    """Of a process in that lab, whose interpreter is lab.libraries.python()."""
    return {k: v for k, v in lab.environment().items() if k not in _NOT_INHERITED}


def _start(lab: Lab, writer: int, output: Any) -> subprocess.Popen[bytes]:
    words = [str(lab.libraries.python()), "-m", __name__, str(writer), str(os.getpid())]
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=(writer,),
            env=environment(lab),
            cwd="/",
        )
    except OSError as error:
        raise SuiteError(f"--lane 'provider': {words[0]}: {error.strerror}") from error


def _lines(reader: int, silence: float) -> Iterator[bytes | None]:
    """Until the other end is closed; None, and no more, if it says nothing for so long."""
    rest = b""
    while select.select([reader], [], [], silence)[0]:
        data = os.read(reader, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
    yield None


def _end(process: subprocess.Popen[bytes], at_once: bool) -> None:
    """Its ranks end with it."""
    try:
        process.wait(0.5 if at_once else _END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---------------------------------------------------------------------------------------------------- the other process


def main(writer: int, parent: int) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return 70
    options = options_told(sys.stdin.read())
    os.set_inheritable(writer, False)
    with open(writer, "wb", buffering=0) as lines:

        def say(message: dict[str, Any]) -> None:
            left = memoryview(json.dumps(message, allow_nan=False).encode() + b"\n")
            while left:
                left = left[lines.write(left) :]

        teller = Teller(say, labels(lab_of(options)))
        try:
            result = runner.run_here(options, teller.ended, teller)
        except SuiteError as error:
            say({"error": str(error)})
            return 2
        say({"report": result.as_dict()})
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
