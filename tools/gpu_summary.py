# SPDX-License-Identifier: Apache-2.0
"""gpu_summary.py FOLDER ACCEL [short]: what gpu_check.sh's parts left there, as one verdict a line (summary.txt,
summary.json). Exit status: 0 all passed, 1 something failed, 3 something is open."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

COMMANDS = 10**9
Found = tuple[bool | None, str]  # None: open


@dataclass
class Line:
    part: str
    what: str
    verdict: str
    detail: str
    seconds: int | None


class Part:
    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.text = folder / f"{name}.txt"
        self.status: int | None = None
        self.seconds: int | None = None
        end = folder / f"{name}.end"
        if end.is_file():
            self.status, self.seconds, self.limit = map(int, end.read_text().split())
        report = folder / f"{name}.json"
        self.report: dict[str, Any] = json.loads(report.read_text()) if report.is_file() else {}
        self.junit = folder / f"{name}.xml"

    def stopped(self) -> Found | None:
        """Why there is nothing to judge."""
        if self.status is None:
            return None, "not run"
        if self.status in (124, 137):
            return False, f"stopped at its limit of {self.limit} s: {self.text}"
        if self.status != 0:
            return False, f"ended with {self.status}: {self.text}"
        return None


def suite(part: Part, short: bool) -> Found:
    counts, cases = part.report["summary"], part.report["cases"]
    said = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()) if n)
    good = bool(cases) and all(case["status"] in ("pass", "not_supported") for case in cases)
    return (None if good and short else good), said + (", level core alone" if short else "")


def pushes(part: Part, short: bool) -> Found:
    checked = sum(row["commands"] for row in part.report["gpu"]["soak"])
    return (True if checked >= COMMANDS else None), f"{checked:.3g} of {COMMANDS:.0e}, none torn, lost or doubled"


def demo(part: Part, short: bool) -> Found:
    good = part.report["results"] == "exact"
    return (None if good and short else good), f"results {part.report['results']}"


def memcheck(part: Part, short: bool) -> Found:
    errors = [line for line in part.text.read_text().splitlines() if "ERROR SUMMARY" in line]
    if not errors:
        return None, "without compute-sanitizer"
    good = all("ERROR SUMMARY: 0 errors" in line for line in errors)
    return good, f"{len(errors)} processes: {errors[-1].strip('= ')}"


def tests(part: Part, short: bool) -> Found:
    root = xml.etree.ElementTree.parse(part.junit).getroot()
    total = {
        key: sum(int(s.get(key, 0)) for s in root.iter("testsuite"))
        for key in ("tests", "failures", "errors", "skipped")
    }
    good = not (total["failures"] or total["errors"])
    return (None if good and total["skipped"] == total["tests"] else good), str(total)


def refusals(part: Part) -> Iterator[tuple[str, Found]]:
    for entry in part.report["cases"]:
        yield entry["what"], (entry["ok"], entry["said"])


def budgets(part: Part, short: bool) -> Iterator[tuple[str, Found]]:
    rows = part.report["gpu"].get("budgets")
    if rows is None:
        yield "budgets beside UCCL-EP's FIFO", (None, "give --against, its benchmark")
    for row in rows or []:
        ratio = (
            "not taken" if row["ratio"] is None else f"{row['ratio']:.2f}x, must be {row['must']}x, aim {row['aim']}"
        )
        yield row["what"], (None if short or row["met"] is None else bool(row["met"]), ratio)


ONE: dict[str, tuple[str, Callable[[Part, bool], Found]]] = {
    "suite-host": ("the suite from kernels, 4 ranks, heaps in host memory", suite),
    "suite-device": ("the suite from kernels, 4 ranks, heaps in device memory", suite),
    "pushes": ("10^9 pushes", pushes),
    "demo-host": ("the demo, heaps in host memory", demo),
    "demo-device": ("the demo, heaps in device memory", demo),
    "memcheck": ("compute-sanitizer memcheck", memcheck),
    "tests": ("tests/gpu", tests),
}


def judged(folder: Path, accel: str, short: bool) -> Iterator[Line]:
    def line(part: Part, what: str, found: Found) -> Line:
        good, detail = found
        # What an emulation passes is not what has to hold.
        if good and accel == "cpu":
            good, detail = None, f"passed on the emulation; {detail}"
        verdict = "open" if good is None else "pass" if good else "FAIL"
        return Line(part.name, what, verdict, detail, part.seconds)

    for name, (what, judge) in ONE.items():
        part = Part(folder, name)
        yield line(part, what, part.stopped() or judge(part, short))
    part = Part(folder, "errors")
    stopped = part.stopped()
    if stopped and not part.report:
        yield line(part, "error cases", stopped)
    else:
        for what, found in refusals(part):
            yield line(part, what, found)
    part = Part(folder, "budgets")
    stopped = part.stopped()
    for what, found in [("budgets", stopped)] if stopped else budgets(part, short):
        yield line(part, what, found)


def main(arguments: list[str]) -> int:
    folder, accel, short = Path(arguments[0]), arguments[1], len(arguments) > 2 and bool(arguments[2])
    lines = list(judged(folder, accel, short))
    text = "".join(f"{line.verdict:4}  {line.part:13} {line.what}: {line.detail}\n" for line in lines)
    (folder / "summary.txt").write_text(text)
    device = Part(folder, "suite-host").report.get("accelerator")
    summary = {"schema": "uccl_ep.gpu_check/1", "accel": accel, "short": short, "accelerator": device}
    (folder / "summary.json").write_text(json.dumps({**summary, "lines": [asdict(line) for line in lines]}, indent=1))
    print(text, end="")
    print(f"gpu_check: raw figures in {folder}")
    verdicts = {line.verdict for line in lines}
    return 1 if "FAIL" in verdicts else 3 if "open" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
