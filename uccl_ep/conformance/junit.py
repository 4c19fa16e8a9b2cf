# SPDX-License-Identifier: Apache-2.0
"""A run as JUnit XML, as continuous-integration servers read it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from . import files
from .results import CaseResult, SuiteResult

# XML 1.0 has no way to write most control characters, and what a dying process prints may hold any.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _clean(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def _add(suite: ET.Element, result: SuiteResult, case: CaseResult) -> None:
    element = ET.SubElement(
        suite,
        "testcase",
        name=case.id,
        classname=f"uccl_ep.{result.backend['name']}.{case.clauses[0]}",
        time=f"{case.seconds:.3f}",
    )
    message = _clean(f"[{case.broken_clause}] {case.message}" if case.broken_clause else case.message)
    text = _clean("\n".join(f"{k}: {v}" for k, v in case.detail.items()) + f"\nreplay: {result.replay_of(case)}")
    if case.status in ("fail", "timeout"):
        ET.SubElement(element, "failure", type=case.status, message=message).text = text
    elif case.bad:
        ET.SubElement(element, "error", type=case.status, message=message).text = text
    elif case.status in ("not_supported", "waived"):
        ET.SubElement(element, "skipped", message=f"{case.status}: {message}")


def write(result: SuiteResult, path: Path) -> None:
    counts = result.summary
    suite = ET.Element(
        "testsuite",
        name=f"uccl_ep conformance {result.backend['name']} {result.lane}",
        tests=str(len(result.cases)),
        failures=str(counts["fail"] + counts["timeout"]),
        errors=str(counts["crash"] + counts["internal_error"]),
        skipped=str(counts["not_supported"] + counts["waived"]),
        time=f"{result.seconds:.3f}",
        timestamp=str(result.environment["started"]),
    )
    properties = ET.SubElement(suite, "properties")
    for name, value in (("seed", result.seed), ("strategy", result.strategy), ("verdict", result.verdict)):
        ET.SubElement(properties, "property", name=name, value=str(value))
    for case in result.cases:
        _add(suite, result, case)
    root = ET.Element("testsuites")
    root.append(suite)
    files.write(path, ET.tostring(root, encoding="utf-8", xml_declaration=True))
