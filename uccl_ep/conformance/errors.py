# SPDX-License-Identifier: Apache-2.0
"""How a case ends other than by returning."""

from __future__ import annotations

from typing import Any


class CheckFailed(Exception):
    """The implementation broke a clause."""

    def __init__(self, clause: str, message: str, values: dict[str, Any]) -> None:
        super().__init__(f"{clause}: {message}")
        self.clause, self.message, self.values = clause, message, values


class NotSupported(Exception):
    """The NIC does not promise what the case needs. Counted as a failure if the NIC does promise it."""

    def __init__(self, capability: str, reason: str) -> None:
        super().__init__(f"{capability}: {reason}")
        self.capability, self.reason = capability, reason


class Interrupted(Exception):
    """Another rank failed; this one stops where it is. Never shown: the first failure is the one that counts."""


class OutOfTime(Exception):
    """The case's deadline came while it waited out of band, or for a task of its own."""


class GroupError(Exception):
    """An out-of-band step could not be done: a rank is dead, or did not come in time."""


class SuiteError(Exception):
    """The run cannot start: a wrong option, no such backend. One line for a person, and what would be valid."""
