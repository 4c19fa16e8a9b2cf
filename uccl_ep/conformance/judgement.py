# SPDX-License-Identifier: Apache-2.0
"""What the model of the contract said of histories (history.py)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Judgement:
    """What became of the histories of a case, or of a run."""

    judged: int = 0
    words: int = 0
    signals: int = 0
    undecided: int = 0  # signal values that were only bounded
    not_judged: Counter[str] = field(default_factory=Counter)  # reason: histories
    remarks: list[str] = field(default_factory=list)  # a program's breach of its own duties, a history that cannot be
    broken: dict[str, Any] | None = None  # as the detail of a case that failed: what the contract forbids

    def add(self, other: Judgement) -> None:
        self.judged += other.judged
        self.words += other.words
        self.signals += other.signals
        self.undecided += other.undecided
        self.not_judged.update(other.not_judged)
        self.remarks += other.remarks
        self.broken = self.broken or other.broken

    def told(self) -> dict[str, Any]:
        """All of it, for another process."""
        return {**self.as_dict(), "broken": self.broken}

    def as_dict(self) -> dict[str, Any]:
        """Counts and remarks; what is broken is told where a case's failure is."""
        return {
            "judged": self.judged,
            "words": self.words,
            "signals": self.signals,
            "undecided": self.undecided,
            "not_judged": dict(sorted(self.not_judged.items())),
            "remarks": self.remarks,
        }

    @staticmethod
    def from_dict(told: dict[str, Any]) -> Judgement:
        return Judgement(**{**told, "not_judged": Counter(told["not_judged"])})

    def __str__(self) -> str:
        reasons = "; ".join(f"{n} of {reason}" for reason, n in self.not_judged.most_common())
        left_out = self.not_judged.total()
        return (
            f"{self.judged} histories judged by the model: {self.words:,} words, {self.signals:,} signal values"
            f" ({self.undecided:,} of them only bounded); {left_out} not judged" + (f": {reasons}" if reasons else "")
        )
