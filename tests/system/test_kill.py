# SPDX-License-Identifier: Apache-2.0
"""A rank is killed at any moment (ERR-1, ERR-5): the others say so in time, go on, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import statistics
import time
from collections import Counter
from typing import Any

import pytest

from uccl_ep.errors import BootstrapError, DeadlineExceeded, PeerLost

from .ranks import Footprint, Member, Ranks, belongings, facts_of, still_there
from .traffic import PEER_TIMEOUT, Exchange, make

ROUNDS = int(os.environ.get("UCCL_EP_KILL_ROUNDS", "200"))
SEED = int(os.environ.get("UCCL_EP_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
PHASES = ("construct", "first", "mid", "quiet", "destroy")
SHORT_BOOTSTRAP = 2.0
# Both strategies, and more than one thread that may be the first to notice.
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"backend_options": "promise=unordered"},
    {"channels": 3, "proxies": 2},
)


def live(member: Member, victim: int, phase: str, settings: dict[str, Any]) -> None:
    """What every rank does. The victim says where it is, and is killed somewhere after that."""
    with contextlib.suppress(BootstrapError):  # killed before that
        member.bootstrap.barrier(20.0)
    before = Footprint()
    member.say("construct")
    begin = time.monotonic()
    try:
        comm = make(member.bootstrap, bootstrap_timeout=SHORT_BOOTSTRAP if phase == "construct" else 30.0, **settings)
    except (BootstrapError, PeerLost, DeadlineExceeded) as error:
        if phase != "construct":
            raise
        refused = facts_of(error)
    else:
        return live_on(member, Exchange(member, comm, victim), phase, before)
    spent = time.monotonic() - begin
    assert spent < SHORT_BOOTSTRAP + 2.0, f"refused only after {spent} s"
    member.say("refused", spent=spent, **refused)
    assert not before.leaks(), before.leaks()
    go_on_anew(member)


def live_on(member: Member, exchange: Exchange, phase: str, before: Footprint) -> None:
    comm, victim = exchange.comm, exchange.victim
    member.say("has", names=belongings())
    if member.rank == victim:
        die(member, exchange, phase)
    exchange.run_until_lost()
    assert comm.lost == {victim}
    with pytest.raises(PeerLost) as refused:
        comm.channel(0).put(victim, 0, 0, 16)
    assert refused.value.record.peer == victim
    assert not comm.errors()
    exchange.check_guards()
    comm.quiet()
    member.bootstraps[1].barrier(20.0)
    comm.close()
    assert not before.leaks(), before.leaks()


def die(member: Member, exchange: Exchange, phase: str) -> None:
    if phase == "first":
        member.say(phase)
    for _ in range(3):
        exchange.round()
    if phase == "mid":
        member.say(phase)
    while phase in ("mid", "first", "construct"):
        exchange.round()
    if phase == "quiet":
        exchange.round(before_quiet=lambda: member.say("quiet"))
        while True:
            exchange.round()
    member.say(phase)
    exchange.comm.close()
    signal.pause()


def go_on_anew(member: Member) -> None:
    """The survivors of a construction make a communicator of their own."""
    comm = make(member.bootstraps[1])
    member.say("has", names=belongings())
    exchange = Exchange(member, comm)
    for _ in range(3):
        exchange.round()
    exchange.check_guards()
    comm.quiet()
    member.bootstraps[1].barrier(20.0)
    comm.close()


def timed(member: Member) -> None:
    member.bootstrap.barrier(20.0)
    begin = time.monotonic()
    comm = make(member.bootstrap)
    built = time.monotonic()
    exchange = Exchange(member, comm)
    exchange.round()
    first = time.monotonic()
    for _ in range(10):
        exchange.round()
    mid = time.monotonic()
    comm.quiet()
    comm.barrier()
    closing = time.monotonic()
    comm.close()
    closed = time.monotonic()
    usual = (built - begin, first - built, mid - first, (mid - first) / 20, closed - closing)
    member.say("usual", **dict(zip(PHASES, usual, strict=True)))


def usual_times() -> dict[str, float]:
    """How long each phase takes on this machine now: the moments of death are spread over that, and somewhat more."""
    with Ranks(4, timed) as ranks:
        said = [child.saw("usual") for child in ranks.join_well().values()]
        return {phase: 1.3 * max(one[phase] for one in said if one) for phase in PHASES}


def test_kill_9_of_any_rank_at_any_moment() -> None:
    print(f"\nseed {SEED} (replay: UCCL_EP_SEED={SEED}), {ROUNDS} rounds")
    draw = random.Random(SEED)
    before, usual = Footprint(), usual_times()
    hits: Counter[str] = Counter()
    noticed: list[float] = []
    begin = time.monotonic()
    for number in range(ROUNDS):
        size = draw.choice((3, 4))
        victim = draw.randrange(size)
        phase = PHASES[number % len(PHASES)]
        moment = draw.random() * usual[phase]
        settings = draw.choice(SETTINGS)
        survivors = [rank for rank in range(size) if rank != victim]
        what = f"seed {SEED} round {number}: {size} ranks, rank {victim} killed {moment * 1e3:.2f} ms into {phase}"
        what += f", {settings}"
        try:
            with Ranks(size, live, victim, phase, settings, groups=[survivors], seconds=60) as ranks:
                ranks.wait_for(victim, phase)
                time.sleep(moment)
                killed = ranks.signal(victim, signal.SIGKILL)
                children = ranks.join_well(victim)
                assert children[victim].ended == -signal.SIGKILL
                refused = [child for child in children.values() if child.saw("refused")]
                assert len(refused) in (0, len(survivors)), "some were refused and some were not"
                for rank in survivors:
                    if refused:
                        hits[f"refused {children[rank].saw('refused')['kind']}"] += 1
                        continue
                    lost = children[rank].all("lost")
                    assert len(lost) == 1, "lost once"
                    delay = (lost[0]["at"] - killed) / 1e9
                    assert delay < PEER_TIMEOUT + 1, f"rank {rank} noticed after {delay} s"
                    noticed.append(delay)
                    hits[f"in {lost[0]['where']}"] += 1
                hits[phase] += 1
                names = ranks.belongings()
            assert not still_there(names)
        except AssertionError as failed:
            raise AssertionError(f"{what}\n{failed}") from None
    spent = time.monotonic() - begin
    assert not before.leaks(), before.leaks()
    print(f"{spent:.1f} s; {dict(hits)}")
    print(f"noticed after {statistics.median(noticed) * 1e3:.2f} ms (median), {max(noticed) * 1e3:.2f} ms (longest)")
    assert all(hits[phase] for phase in PHASES)


# ----------------------------------------------------------------------------------------------- all at once, and again


def traffic_for_ever(member: Member) -> None:
    exchange = Exchange(member, make(member.bootstrap))
    member.say("has", names=belongings())
    exchange.round()
    member.say("traffic")
    while True:
        exchange.round()


def some_rounds(member: Member, rounds: int = 3) -> None:
    before = Footprint()
    comm = make(member.bootstrap)
    member.say("has", names=belongings())
    exchange = Exchange(member, comm)
    for _ in range(rounds):
        exchange.round()
    exchange.check_guards()
    comm.quiet()
    comm.barrier()
    comm.close()
    leaks = before.leaks()
    assert not leaks, leaks


def test_after_kill_9_of_all_ranks_a_restart_works_and_nothing_grows() -> None:
    """E9: twenty times."""
    print(f"\nseed {SEED} (replay: UCCL_EP_SEED={SEED})")
    draw = random.Random(SEED)
    before = Footprint()
    for _ in range(20):
        with Ranks(4, traffic_for_ever) as ranks:
            for rank in ranks.children:
                ranks.wait_for(rank, "traffic")
            time.sleep(draw.uniform(0, 0.01))
            for rank in ranks.children:
                ranks.signal(rank, signal.SIGKILL)
            assert {child.ended for child in ranks.join().values()} == {-signal.SIGKILL}
            names = ranks.belongings()
        assert len(names) == 4
        assert not still_there(names)
        with Ranks(4, some_rounds) as ranks:
            ranks.join_well()
    assert not before.leaks(), before.leaks()


# ------------------------------------------------------------------------------------------------------ leaving, coming


def replaced(member: Member) -> None:
    """Rank 3 is gone in the middle; the others stay, and start again with another rank 3."""
    comm = make(member.bootstrap)
    exchange = Exchange(member, comm, victim=3)
    for _ in range(3):
        exchange.round()
    if member.rank == 3:
        os._exit(0)
    exchange.run_until_lost()
    comm.close()
    member.say("alone")
    # Whoever comes first waits for the new rank: the bootstrap fails while the old one's end is the last that it knew.
    deadline = time.monotonic() + 20
    while True:
        try:
            member.bootstrap.barrier(20.0)
            break
        except BootstrapError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    some_rounds(member)


def newcomer(member: Member) -> None:
    member.bootstrap.barrier(20.0)
    some_rounds(member)


def test_a_rank_exits_and_the_rest_goes_on_with_a_new_one() -> None:
    """K3."""
    with Ranks(4, replaced) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "alone")
        assert ranks.children[3].ended == 0
        ranks.replace(3, newcomer)
        ranks.join_well()


def with_a_stopped_peer(member: Member) -> None:
    comm = make(member.bootstrap, peer_timeout=1.0)
    exchange = Exchange(member, comm)
    for _ in range(3):
        exchange.round()
    comm.barrier()
    if member.rank == 2:
        member.say("may be stopped")
        member.bootstraps[1].barrier(40.0)  # is in here while it is stopped
        comm.wait_signal(60, 2)
    else:
        member.say("ready")
        # What is put to it lies in its memory: it needs no time of it, and is complete (PRG-1, PUT-2).
        comm.channel(0).put_signal(2, 0, 0, 0, slot=60)
        comm.quiet(timeout=10)
        # Waiting for it ends at the deadline, and says for whom.
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded) as late:
            comm.wait_signal(2, exchange.epoch + 1, timeout=0.5, source=2)
        assert 0.5 <= time.monotonic() - begin < 5
        assert late.value.record.peer == 2
        assert "signal 2 is at" in late.value.record.text
        # The other two are not held up.
        other = 1 - member.rank
        for number in range(1, 101):
            comm.channel(0).put_signal(other, 0, 0, 64, slot=61)
            comm.wait_signal(61, number, source=other, timeout=10)
        assert not comm.lost
        assert not comm.errors()
        member.say("went on")
        member.bootstraps[1].barrier(40.0)
    # It continues, and so does everybody.
    for _ in range(3):
        exchange.round()
    assert not comm.lost
    comm.quiet()
    comm.barrier()
    comm.close()


def test_a_stopped_peer_delays_those_who_wait_for_it_and_nobody_else() -> None:
    with Ranks(3, with_a_stopped_peer, groups=[[0, 1, 2]]) as ranks:
        for rank in (0, 1):
            ranks.wait_for(rank, "ready")
        ranks.wait_for(2, "may be stopped")
        ranks.signal(2, signal.SIGSTOP)
        for rank in (0, 1):
            ranks.wait_for(rank, "went on")
        ranks.signal(2, signal.SIGCONT)
        ranks.join_well()


# ---------------------------------------------------------------------------------------------- ranks that do not start


def start_up_refused(member: Member, kind: str, culprit: int) -> None:
    before = Footprint()
    if member.rank == culprit:
        member.say("here")
        signal.pause()
    # A death is told at once; who does not come is missed when time is over.
    patience = 1.5 if kind == "DeadlineExceeded" else 15.0
    begin = time.monotonic()
    with pytest.raises((BootstrapError, DeadlineExceeded)) as refused:
        make(member.bootstrap, bootstrap_timeout=patience)
    spent = time.monotonic() - begin
    assert type(refused.value.__cause__).__name__ == kind, refused.value
    # Among others that have given up meanwhile.
    assert re.search(rf"ranks? \[?([0-9]+, )*{culprit}\b", refused.value.record.text), refused.value
    assert spent < 13
    assert not before.leaks(), before.leaks()
    raise SystemExit(3)


def test_a_rank_never_starts() -> None:
    """K13: the others end with an error within the bootstrap's deadline, and leave no thread, child or descriptor."""
    with Ranks(4, start_up_refused, "DeadlineExceeded", 3, absent=(3,)) as ranks:
        assert {child.ended for child in ranks.join(20).values()} == {3}, ranks.story()


def test_a_rank_hangs_before_it_starts() -> None:
    with Ranks(4, start_up_refused, "DeadlineExceeded", 3) as ranks:
        children = ranks.join(20, but=(3,))
        assert {children[rank].ended for rank in range(3)} == {3}, ranks.story()


def test_a_rank_dies_in_the_bootstrap() -> None:
    with Ranks(4, start_up_refused, "BootstrapError", 2) as ranks:
        ranks.wait_for(2, "here")
        ranks.signal(2, signal.SIGKILL)
        children = ranks.join(20)
        assert {children[rank].ended for rank in (0, 1, 3)} == {3}, ranks.story()
