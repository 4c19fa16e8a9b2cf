# SPDX-License-Identifier: Apache-2.0
"""The model of the contract from Python: histories as the suite records them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from uccl_ep.explorer import model
from uccl_ep.explorer.model import History

HEADER = Path(__file__).resolve().parents[2] / "csrc/model/model.h"


def message(*, visible: bool) -> History:
    h = History(ranks=2, heap_bytes=4096, signals=8)
    h.store(0, 1, 2, offset=0, words=[11, 12])
    h.post(0, 3, 4, op="put", channel=0, target=1, ticket=0, local=0, remote=64, size=16)
    h.post(0, 5, 6, op="signal", channel=0, target=1, ticket=1, slot=3, add=1)
    h.signal(1, 7, 8, slot=3, value=1)
    h.read(1, 9, 10, offset=64, words=np.array([11, 12 if visible else 0], dtype=np.uint64))
    return h


def test_allowed() -> None:
    verdict = message(visible=True).judge()
    assert verdict.outcome == "allowed"
    assert (verdict.words_judged, verdict.signals_judged) == (2, 1)


def test_forbidden_names_clause_and_events() -> None:
    verdict = message(visible=False).judge()
    assert verdict.forbidden
    assert verdict.clause == "SIG-2"
    assert "rank 1 read 16 bytes at 64" in str(verdict)
    assert verdict.numbers[-1] == 4


def test_duty_of_the_program() -> None:
    h = History(ranks=2, heap_bytes=4096)
    h.store(0, 1, 1, offset=0, id=1, size=8)
    h.post(0, 2, 2, op="put", channel=0, target=1, ticket=0, local=0, remote=64, size=8)
    h.store(0, 3, 3, offset=0, id=2, size=8)
    h.read(1, 4, 4, offset=64, words=[model.stamp(2, 0)])
    verdict = h.judge()
    assert (verdict.outcome, verdict.clause) == ("program", "PUT-3")


def test_what_may_never_have_been_posted_breaks_no_duty() -> None:
    h = History(ranks=2, heap_bytes=4096)
    h.post(0, 1, 1, op="put", channel=0, target=1, ticket=0, local=0, remote=64, size=8)
    h.post(0, 2, 2, op="put", channel=0, target=1, ticket=model.NO_TICKET, local=0, remote=64, size=8, status=-7007)
    assert h.judge().outcome == "allowed"
    h.post(0, 3, 3, op="put", channel=0, target=1, ticket=1, local=0, remote=64, size=8)
    verdict = h.judge()
    assert (verdict.outcome, verdict.clause, verdict.numbers) == ("program", "PUT-7", (0, 2))


def test_many_events_at_once_are_the_same_events() -> None:
    one = message(visible=False)
    rows = np.zeros(5, model.EVENT_DTYPE)
    rows["kind"] = [model.KINDS[k] for k in ("store", "post", "post", "signal", "read")]
    rows["rank"] = [0, 0, 0, 1, 1]
    rows["begin"], rows["end"] = [1, 3, 5, 7, 9], [2, 4, 6, 8, 10]
    rows["op"], rows["peer"] = [0, 1, 2, 0, 0], [0, 1, 1, 0, 0]
    rows["ticket"], rows["slot"], rows["value"] = [0, 0, 1, 0, 0], [0, 0, 3, 3, 0], [0, 0, 1, 1, 0]
    rows["local"], rows["remote"], rows["bytes"] = [0, 0, 0, 0, 64], [0, 64, 0, 0, 0], [16, 16, 0, 0, 16]
    words = np.array([11, 0, 11, 12], np.uint64)  # what was read, what was stored
    first = np.array([2, model.NO_WORDS, model.NO_WORDS, model.NO_WORDS, 0], np.uint64)
    other = History(ranks=2, heap_bytes=4096, signals=8)
    other.add_all(rows, words, first)
    assert [other.describe(i) for i in range(5)] == [one.describe(i) for i in range(5)]
    assert str(other.judge()) == str(one.judge())
    rows["rank"][3] = 2
    with pytest.raises(ValueError, match="rank 2 of 2"):
        History(ranks=2, heap_bytes=4096).add_all(rows, words, first)
    with pytest.raises(ValueError, match="places of words"):
        other.add_all(rows, words, first[:2])


def test_waits_failures_resets_and_barriers_are_taken() -> None:
    h = History(ranks=2, heap_bytes=4096)
    h.post(0, 1, 1, op="put_signal", channel=0, target=1, ticket=0, remote=64, size=8, slot=0, add=1)
    h.failure(0, 2, 2, status=-7016, channel=0, peer=1, ticket=0)
    h.exclude(0, 3, 3, peer=1)
    h.wait(0, 4, 4)
    h.wait(0, 5, 5, channel=0, ticket=0, source=True)
    for rank in range(2):
        h.reset(rank, 6, 7, number=1)
        h.barrier(rank, 8, 9, number=1)
    assert h.judge().outcome == "allowed"
    h.barrier(0, 10, 11, number=2)
    h.barrier(1, 12, 13, number=2)
    assert h.judge().outcome == "invalid"


def test_what_is_no_event_is_refused() -> None:
    h = History(ranks=2, heap_bytes=4096)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        h.signal(2, 1, 1, slot=0, value=0)
    with pytest.raises(ValueError, match="ends before it begins"):
        h.signal(0, 2, 1, slot=0, value=0)
    with pytest.raises(ValueError, match="4096"):
        History(ranks=0, heap_bytes=0)
    assert len(h) == 0


@pytest.mark.skipif(not HEADER.is_file(), reason="not a checkout")
def test_declarations_are_those_of_the_header() -> None:
    def normal(text: str) -> str:
        text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S).replace("UCCL_EP_MODEL_API", "")
        text = text.replace("UCCL_EP_MODEL_VERDICT_EVENTS]", "8]")
        return re.sub(r"\s+", "", text)

    header = normal(HEADER.read_text())
    declarations = [d for d in re.split(r";\n(?! )", model.DECLARATIONS.strip()) if d.strip()]
    assert len(declarations) > 10
    for declaration in declarations:
        assert normal(declaration.rstrip(";")) in header, declaration
    for name, value in model.KINDS.items():
        assert f"UCCL_EP_MODEL_{name.upper()}={value}" in header
