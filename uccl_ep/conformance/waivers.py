# SPDX-License-Identifier: Apache-2.0
"""Waivers: known failures that somebody answers for, until a date.

    [[waiver]]
    case = "err5.*"
    owner = "someone@example.org"
    reason = "firmware 1.2 loses the event"
    link = "https://..."
    expiry = 2027-01-31

All five are required. After its expiry a waiver counts for nothing.
"""

from __future__ import annotations

import datetime
import fnmatch
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import SuiteError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

_FIELDS = ("case", "owner", "reason", "link", "expiry")


@dataclass(frozen=True)
class Waiver:
    case: str
    owner: str
    reason: str
    link: str
    expiry: datetime.date

    def covers(self, case_id: str) -> bool:
        return fnmatch.fnmatchcase(case_id, self.case)

    def as_dict(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "owner": self.owner,
            "reason": self.reason,
            "link": self.link,
            "expiry": self.expiry.isoformat(),
        }


def read(path: Path) -> list[Waiver]:
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SuiteError(f"waivers {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SuiteError(f"waivers {path}: not TOML: {error}") from error
    entries = table.get("waiver", [])
    if set(table) - {"waiver"} or not isinstance(entries, list):
        raise SuiteError(f"waivers {path}: it holds [[waiver]] tables and nothing else")
    waivers = []
    for i, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise SuiteError(f"waivers {path}, number {i}: it is not a [[waiver]] table")
        missing = [f for f in _FIELDS if not entry.get(f)]
        extra = sorted(set(entry) - set(_FIELDS))
        if missing or extra:
            raise SuiteError(
                f"waivers {path}, number {i}: needs {', '.join(_FIELDS)}; missing {missing}, unknown {extra}"
            )
        expiry = entry["expiry"]
        if isinstance(expiry, str):
            try:
                expiry = datetime.date.fromisoformat(expiry)
            except ValueError as error:
                raise SuiteError(
                    f"waivers {path}, number {i}: expiry {expiry!r} is not a date like 2027-01-31"
                ) from error
        if isinstance(expiry, datetime.datetime):
            expiry = expiry.date()
        if not isinstance(expiry, datetime.date):
            raise SuiteError(f"waivers {path}, number {i}: expiry is not a date")
        case, owner, reason, link = (entry[f] for f in _FIELDS[:4])
        for name in _FIELDS[:4]:
            if not isinstance(entry[name], str):
                raise SuiteError(f"waivers {path}, number {i}: {name} is not text")
        waivers.append(Waiver(case, owner, reason, link, expiry))
    return waivers
