# SPDX-License-Identifier: Apache-2.0
"""Calls, commands and command lines that are wrong: refused with what would be right, and nothing else happens."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import uccl_ep
from uccl_ep import COMMAND_DTYPE, Channel, Communicator, Op, SingleProcess, Ticket
from uccl_ep.errors import CommandError, NoDevice, NotABackend, UcclEpError

from .outside import COMMAND, run
from .ranks import Footprint, Member, Ranks

SEED = int(os.environ.get("UCCL_EP_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
HEAP = 1 << 16
SIGNALS = 64
PARITY = np.uint64(1 << 63)

# ----------------------------------------------------------------------------------------------------------- the calls

Wrong = tuple[str, Callable[[Communicator], Any], str, str, str]


def batch(**fields: int) -> np.ndarray[Any, Any]:
    commands = np.zeros(3, COMMAND_DTYPE)
    for command in commands:
        command["op"], command["granularity"] = Op.PUT, 16
        command["bytes"] = 16
    for name, value in fields.items():
        commands[1][name] = value
    return commands


WRONG: tuple[Wrong, ...] = (
    ("rank", lambda c: c.channel(0).put(2, 0, 0, 16), "E_RANGE", "PUT-4", "rank 2 of 2"),
    ("rank of the codec's limit", lambda c: c.channel(0).signal(4096, 0), "E_RANGE", "PUT-4", "rank 4096 of 2"),
    ("rank below 0", lambda c: c.channel(0).put(-1, 0, 0, 16), "E_INVALID", "", "negative"),
    ("rank of 40 bits", lambda c: c.channel(0).put(1 << 40, 0, 0, 16), "E_INVALID", "", "32-bit"),
    ("rank and a half", lambda c: c.channel(0).put(0.5, 0, 0, 16), "E_INVALID", "", "integer"),  # type: ignore[arg-type]
    ("no rank", lambda c: c.channel(0).put(None, 0, 0, 16), "E_INVALID", "", "integer"),  # type: ignore[arg-type]
    ("slot", lambda c: c.channel(0).signal(1, SIGNALS), "E_RANGE", "SIG-1", f"slot {SIGNALS} of {SIGNALS}"),
    ("slot of put_signal", lambda c: c.channel(0).put_signal(1, 0, 0, 16, SIGNALS), "E_RANGE", "SIG-1", "slot"),
    ("slot of 32 bits", lambda c: c.channel(0).signal(1, 2**32 - 1), "E_RANGE", "SIG-1", "slot 4294967295"),
    ("slot of 33 bits", lambda c: c.channel(0).signal(1, 2**32), "E_INVALID", "", "does not fit"),
    ("slot below 0", lambda c: c.channel(0).signal(1, -1), "E_INVALID", "", "negative"),
    ("add below 0", lambda c: c.channel(0).signal(1, 0, -1), "E_INVALID", "", "negative"),
    ("add of 65 bits", lambda c: c.channel(0).signal(1, 0, 2**64), "E_INVALID", "", "too big"),
    ("source offset", lambda c: c.channel(0).put(1, HEAP, 0, 16), "E_RANGE", "PUT-4", f"heap of {HEAP} bytes"),
    ("target offset", lambda c: c.channel(0).put(1, 0, HEAP, 16), "E_RANGE", "PUT-4", f"heap of {HEAP} bytes"),
    ("one granule too far", lambda c: c.channel(0).put(1, 0, HEAP - 16, 32), "E_RANGE", "PUT-4", "32 bytes"),
    ("offset that wraps", lambda c: c.channel(0).put(1, 0, 2**64 - 16, 32), "E_RANGE", "PUT-4", "leave the heap"),
    ("offset of 4 GiB", lambda c: c.channel(0).put(1, 1 << 32, 0, 16), "E_RANGE", "PUT-4", "4294967296"),
    ("length", lambda c: c.channel(0).put(1, 0, 0, HEAP + 16), "E_RANGE", "PUT-4", f"{HEAP + 16} bytes"),
    ("length that wraps", lambda c: c.channel(0).put(1, 16, 16, 2**64 - 16), "E_RANGE", "PUT-4", "leave the heap"),
    ("length below 0", lambda c: c.channel(0).put(1, 0, 0, -16), "E_INVALID", "", "negative"),
    ("source alignment", lambda c: c.channel(0).put(1, 8, 0, 16), "E_ALIGNMENT", "PUT-4", "multiples of 16"),
    ("target alignment", lambda c: c.channel(0).put(1, 0, 4, 16), "E_ALIGNMENT", "PUT-4", "multiples of 16"),
    ("length's alignment", lambda c: c.channel(0).put(1, 0, 0, 15), "E_ALIGNMENT", "PUT-4", "multiples of 16"),
    ("channel", lambda c: c.channel(2), "E_INVALID", "", "channel 2 of 2"),
    ("channel below 0", lambda c: c.channel(-1), "E_INVALID", "", "channel -1 of 2"),
    ("batch: rank", lambda c: c.channel(0).post_many(batch(target=2)), "E_RANGE", "PUT-4", "rank 2 of 2"),
    ("batch: offset", lambda c: c.channel(0).post_many(batch(remote=HEAP)), "E_RANGE", "PUT-4", "command 1"),
    ("batch: alignment", lambda c: c.channel(0).post_many(batch(local=4)), "E_ALIGNMENT", "PUT-4", "command 1"),
    ("batch: operation", lambda c: c.channel(0).post_many(batch(op=5)), "E_INVALID", "PUT-4", "command 1"),
    ("batch: no operation", lambda c: c.channel(0).post_many(batch(op=0)), "E_INVALID", "PUT-4", "command 1"),
    ("batch: granularity", lambda c: c.channel(0).post_many(batch(granularity=4)), "E_INVALID", "PUT-4", "larity 4"),
    ("batch: a put's slot", lambda c: c.channel(0).post_many(batch(slot=1)), "E_INVALID", "PUT-4", "command 1"),
    ("batch: reserved", lambda c: c.channel(0).post_many(batch(reserved=1)), "E_INVALID", "PUT-4", "command 1"),
    ("batch: empty", lambda c: c.channel(0).post_many(batch()[:0]), "E_INVALID", "PUB-2", "at least one"),
    ("batch: longer than a ring", lambda c: c.channel(0).post_many(np.repeat(batch(), 99)), "E_RANGE", "PUB-2", "256"),
    ("batch: of another type", lambda c: c.channel(0).post_many(np.zeros(3)), "E_INVALID", "", "COMMAND_DTYPE"),
    ("raw: parity", lambda c: c.channel(0).post_raw(np.full((1, 2), PARITY)), "E_INVALID", "ERR-4", "bit 63"),
    ("raw: shape", lambda c: c.channel(0).post_raw(np.zeros(4, np.uint64)), "E_INVALID", "", "shape [n, 2]"),
    ("raw: type", lambda c: c.channel(0).post_raw(np.zeros((2, 2), np.int64)), "E_INVALID", "", "uint64"),
    ("raw: too many", lambda c: c.channel(0).post_raw(np.zeros((257, 2), np.uint64)), "E_RANGE", "PUB-2", "256 slots"),
    ("ticket never given out", lambda c: Ticket(c.channel(1), 7).wait(), "E_RANGE", "QUI-1", "never given out"),
    ("ticket below 0", lambda c: Ticket(c.channel(1), -1).done(), "E_INVALID", "", "negative"),
    ("wait: slot", lambda c: c.wait_signal(SIGNALS, 1), "E_RANGE", "SIG-1", f"slot {SIGNALS} of"),
    ("wait: source", lambda c: c.wait_signal(0, 1, source=2), "E_RANGE", "SIG-1", "rank 2 of 2"),
    ("read: slot", lambda c: c.read_signal(SIGNALS), "E_RANGE", "SIG-1", f"slot {SIGNALS} of"),
    ("exclude: itself", lambda c: c.exclude(c.rank), "E_RANGE", "ERR-5", "cannot be excluded"),
    ("exclude: nobody", lambda c: c.exclude(2), "E_RANGE", "ERR-5", "rank 2"),
    ("trace: proxy", lambda c: c.trace(1), "E_RANGE", "", "1 proxies"),
    ("progress of threads", lambda c: c.progress(), "E_INVALID", "PRG-1", "threads of its own"),
    ("timeout below 0", lambda c: c.quiet(timeout=-1), "E_INVALID", "", "not negative"),
    ("timeout no number", lambda c: c.channel(0).put(1, 0, 0, 16, timeout=math.nan), "E_INVALID", "", "not negative"),
)  # fmt: skip


def calls(member: Member) -> None:
    before = Footprint()
    comm = Communicator(member.bootstrap, heap_bytes=HEAP, signals=SIGNALS, channels=2, ring_log2=8, timeout=20)
    comm.heap[:] = 0x5A
    comm.barrier()
    if member.rank == 0:
        for what, call, name, clause, part in WRONG:
            with pytest.raises(CommandError) as refused:
                call(comm)
            error = refused.value
            assert isinstance(error, ValueError)
            assert (error.name, error.record.clause) == (name, clause), f"{what}: {error}"
            assert part in error.record.text, f"{what}: {error}"
            assert error.advice
            if clause.startswith("PUT") or name == "E_ALIGNMENT":
                assert (error.record.rank, error.record.channel) == (0, 0), f"{what}: {error}"
                assert "batch" in what or error.record.peer is not None, f"{what}: {error}"
        stats = comm.stats()
        assert all(channel["posted"] == channel["failed"] == 0 for channel in stats["channels"]), "nothing was posted"
        assert not comm.errors()
        for channel in range(2):
            comm.channel(channel).put(1, 0, HEAP - 16, 16).wait()  # and all works
            comm.channel(channel).put(1, HEAP, HEAP, 0).wait()
    comm.barrier()
    assert (comm.heap == 0x5A).all()
    assert not any(comm.read_signal(slot) for slot in range(SIGNALS))
    comm.close()
    assert not before.leaks(), before.leaks()


def test_wrong_calls() -> None:
    with Ranks(2, calls) as ranks:
        ranks.join_well()


CREATES: tuple[tuple[dict[str, Any], type[UcclEpError], str], ...] = (
    ({"heap_bytes": 0}, CommandError, "1 to 68719476736"),
    ({"heap_bytes": -1}, CommandError, "heap_bytes=-1"),
    ({"heap_bytes": 1.5}, CommandError, "heap_bytes=1.5"),
    ({"heap_bytes": (64 << 30) + 1}, CommandError, "1 to 68719476736 are addressable at granularity 16"),
    ({"heap_bytes": (16 << 30) + 1, "granularity": 4}, CommandError, "16 reaches four times as far"),
    ({"heap_bytes": 2**64}, CommandError, "heap_bytes="),
    ({"granularity": 8}, CommandError, "16 and 4 are possible"),
    ({"signals": 1 << 25}, CommandError, "at most 16777216"),
    ({"signals": -1}, CommandError, "signals=-1"),
    ({"channels": 65}, CommandError, "at most 64 a proxy"),
    ({"channels": 4096, "proxies": 64}, CommandError, "at most 32"),
    ({"channels": 1, "proxies": 2}, CommandError, "no more than channels"),
    ({"ring_log2": 17}, CommandError, "1 to 16"),
    ({"strategy": "hold"}, CommandError, "known: auto, fenced_atomic, ordered_atomic, sender_hold"),
    ({"strategy": "sender-hodl"}, CommandError, "did you mean"),
    ({"progress": "none"}, CommandError, "known: caller, threads"),
    ({"cpus": "4095"}, CommandError, ""),
    ({"cpus": "zero"}, CommandError, "no list such as 2,5-7"),
    ({"cpus": "3-1"}, CommandError, "no list such as 2,5-7"),
    ({"backend": "shmm"}, NotABackend, "did you mean 'shm'?"),
    ({"device": "shm1"}, NoDevice, "it is called shm0"),
    ({"device": "x" * 300}, CommandError, "255 bytes"),
    ({"backend_options": "promise=much"}, CommandError, "there are promise=ordered"),
    ({"backend_options": {"a,b": "c"}}, CommandError, "comma"),
    ({"backend_options": "x" * 300}, CommandError, "255"),
    ({"timeout": 0}, CommandError, "every wait has a deadline"),
    ({"peer_timeout": math.nan}, CommandError, "every wait has a deadline"),
    ({"bootstrap_timeout": -1}, CommandError, "every wait has a deadline"),
    ({"first_ticket": 2**63}, CommandError, "2^63 - 1 at most"),
    ({"idle_sleep": -1}, CommandError, "not negative"),
    ({"idle_sleep": 1}, CommandError, "less than a second"),
    ({"idle_sleep": 100}, CommandError, "less than a second"),
)  # fmt: skip


def test_wrong_configurations() -> None:
    def program(member: Member) -> None:
        before = Footprint()
        for settings, kind, part in CREATES:
            with pytest.raises(kind) as refused:
                Communicator(SingleProcess(), **{"heap_bytes": HEAP, **settings})
            assert part in refused.value.record.text, f"{settings}: {refused.value}"
            assert not before.leaks(), f"{settings}: {before.leaks()}"
        Communicator(SingleProcess(), heap_bytes=HEAP).close()

    with Ranks(1, program) as ranks:
        ranks.join_well()


# --------------------------------------------------------------------------------------------------- words in the ring


def random_words(draw: np.random.Generator, n: int, targets: int | None) -> np.ndarray[Any, Any]:
    words = draw.integers(0, 1 << 63, (n, 2), np.uint64)
    if targets is not None:  # the target's field: 12 bits from 51 on
        words[:, 1] &= np.uint64((1 << 51) - 1)
        words[:, 1] |= draw.integers(0, targets, n, np.uint64) << np.uint64(51)
    return words


def post_noise(comm: Communicator, draw: np.random.Generator, total: int) -> int:
    """Random bytes through channel 1, while channel 0 works on. Returns how many times it had to be reset."""
    posted = resets = 0
    refused = 0
    while posted < total:
        n = int(draw.integers(1, 1 << comm.info.ring_log2))
        words = random_words(draw, n, None if draw.random() < 0.03 else comm.size)
        decoded, _ = uccl_ep.decode(words)
        try:
            with pytest.raises(UcclEpError) as failed:
                comm.channel(1).post_raw(words).wait()
            assert failed.value.name in ("E_MALFORMED", "E_CLOSED"), failed.value
            posted += n
        finally:
            comm.channel(0).signal(1, 1)
            comm.channel(0).quiet()
        stats = comm.channel(1).stats()
        unreadable = bool((decoded["target"] >= comm.size).any())
        assert (stats["state"] != 0) == unreadable
        refused += 1
        if unreadable or refused % 16 == 0:
            comm.channel(0).signal(1, 2)  # "reset with me"
            comm.reset()
            resets += 1
    return resets


def noise(member: Member, total: int, seed: int) -> None:
    comm = Communicator(
        member.bootstrap, heap_bytes=HEAP, signals=SIGNALS, channels=2, ring_log2=11, timeout=20, bootstrap_timeout=40
    )
    canary = np.random.default_rng(7).integers(0, 256, HEAP, np.uint8)
    comm.heap[:] = canary
    comm.barrier()
    if member.rank == 0:
        resets = post_noise(comm, np.random.default_rng(seed), total)
        comm.channel(0).signal(1, 3).wait()
        member.say("resets", n=resets)
    else:
        while True:
            # Words start at zero again with a reset.
            while not comm.read_signal(2) and not comm.read_signal(3):
                time.sleep(1e-4)
            assert comm.read_signal(1) > 0 or comm.read_signal(3)
            if comm.read_signal(3):
                break
            comm.reset()
    comm.barrier()
    assert np.array_equal(comm.heap, canary), "random words moved bytes"
    ours = {1, 2, 3} if member.rank == 1 else set()
    assert not any(comm.read_signal(slot) for slot in range(SIGNALS) if slot not in ours)
    comm.barrier()
    comm.close()


def test_random_words_in_the_ring() -> None:
    """ERR-4: half a million times 16 random bytes: refused, at no more cost than the target, or at most the channel."""
    print(f"\nseed {SEED} (replay: UCCL_EP_SEED={SEED})")
    with Ranks(2, noise, 500_000, SEED, seconds=120) as ranks:
        children = ranks.join_well(seconds=120)
        seen = children[0].saw("resets")
        assert seen
        print(f"{seen['n']} resets")


def model(words: np.ndarray[Any, Any], size: int, heaps: np.ndarray[Any, Any], signals: np.ndarray[Any, Any]) -> int:
    """What the contract says about these words, one after the other. Returns how many are executed."""
    commands, well = uccl_ep.decode(words)
    closed: set[int] = set()
    executed = 0
    for command, good in zip(commands, well, strict=True):
        target = int(command["target"])
        put, signal = bool(command["op"] & 1), bool(command["op"] & 2)
        local, remote, n, slot = (int(command[name]) for name in ("local", "remote", "bytes", "slot"))
        if target >= size:
            break
        if put:
            good = good and command["granularity"] == 16 and local + n <= HEAP and remote + n <= HEAP
        if signal:
            good = good and slot < SIGNALS
        if not good:
            closed.add(target)
        if target in closed:
            continue
        executed += 1
        if put:
            heaps[target, remote : remote + n] = heaps[0, local : local + n].copy()
        if signal:
            signals[target, slot] += command["add"]
    return executed


def wait_for_the_rest(channel: Channel) -> None:
    """A wait ends with the first failure that it covers, and what comes after that is still on its way."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        stats = channel.stats()
        if stats["complete"] == (stats["taken"] if stats["state"] else stats["posted"]):
            return
    raise AssertionError(f"not complete: {stats}")


def flips(member: Member, rounds: int, seed: int) -> None:
    comm = Communicator(
        member.bootstrap, heap_bytes=HEAP, signals=SIGNALS, ring_log2=9, timeout=20, bootstrap_timeout=40
    )
    draw = np.random.default_rng(seed)  # the same on both ranks: rank 1 knows what to expect
    executed = 0
    for number in range(rounds):
        heaps = draw.integers(0, 256, (2, HEAP), np.uint8)
        signals = np.zeros((2, SIGNALS), np.uint64)
        comm.heap[:] = heaps[member.rank]
        comm.barrier()
        commands = np.zeros(64, COMMAND_DTYPE)
        commands["op"] = draw.choice([Op.PUT, Op.SIGNAL, Op.PUT_SIGNAL, Op.FLUSH], 64)
        # Never the own rank, nor by a flip: what it writes could be the source of another put, in no order (PUT-3).
        commands["target"] = 1
        put, signal = commands["op"] & 1 == 1, commands["op"] & 2 == 2
        commands["granularity"][put] = 16
        commands["bytes"][put] = 16 * draw.integers(0, 65, put.sum())
        for name in ("local", "remote"):
            commands[name][put] = 16 * draw.integers(0, HEAP // 16 - 64, put.sum())
        commands["slot"][signal] = draw.integers(0, SIGNALS, signal.sum())
        commands["add"][signal] = draw.integers(0, 8192, signal.sum())
        words = uccl_ep.encode(commands)
        bad = draw.random(64) < 1 / 16
        bits = draw.choice([bit for bit in range(126) if bit != 63 + 51], bad.sum())
        words[bad, bits // 63] ^= np.uint64(1) << (bits % 63).astype(np.uint64)
        executed += model(words, 2, heaps, signals)
        if member.rank == 0:
            ticket = comm.channel(0).post_raw(words)
            try:
                ticket.wait()
            except UcclEpError as error:
                assert comm.errors()
                member.say("refused", name=error.name)
                wait_for_the_rest(comm.channel(0))
            else:
                assert not comm.errors()
            assert not comm.lost
        comm.barrier()
        assert np.array_equal(comm.heap, heaps[member.rank]), f"round {number}"
        got = np.array([comm.read_signal(slot) for slot in range(SIGNALS)], np.uint64)
        assert np.array_equal(got, signals[member.rank]), f"round {number}"
        comm.reset()
    member.say("executed", n=executed, of=rounds * 64)
    comm.close()


def test_a_flipped_bit_is_a_command_or_refused() -> None:
    """Good commands, one bit of some turned round: what becomes of them is what the contract says, byte for byte."""
    print(f"\nseed {SEED} (replay: UCCL_EP_SEED={SEED})")
    with Ranks(2, flips, 250, SEED, seconds=120) as ranks:
        children = ranks.join_well(seconds=120)
        names = {one["name"] for one in children[0].all("refused")}
        # A channel that closed says so to a wait for a ticket that it never took.
        assert {"E_MALFORMED"} <= names <= {"E_MALFORMED", "E_CLOSED"}
        print(children[0].saw("executed"))


# ---------------------------------------------------------------------------------------------------- the command line

LINES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("devices", "--backend", "shmm"), ("'shm'", "known")),
    (("conformance", "--backend", "shmm"), ("shm",)),
    (("conformance", "--lane", "shn"), ("shm",)),
    (("conformance", "--level", "cor"), ("core", "full")),
    (("conformance", "--seed", "-1"), ("seed",)),
    (("conformance", "--seed", "x"), ("seed",)),
    (("conformance", "--ranks", "0"), ("ranks",)),
    (("conformance", "--ranks", "99999"), ("ranks",)),
    (("conformance", "--strategy", "hold"), ("sender_hold",)),
    (("conformance", "--case", "no.such.case"), ("no case", "--list")),
    (("conformance", "--clause", "SIG-99"), ("SIG-99",)),
    (("conformance", "--json", "/proc/nowhere/report.json"), ("/proc/nowhere/report.json",)),
    (("conformance", "--time-scale", "-1"), ("time",)),
    (("frobnicate",), ("frobnicate",)),
    (("doctor", "--jsn"), ("--jsn",)),
)


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line[0]))
def test_wrong_command_lines(tmp_path: Path, line: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
    """M3, M9: exit code 2, the cause and the valid values in a few lines, no traceback; nothing is written."""
    arguments, parts = line
    done = run(tmp_path, COMMAND, *arguments)
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert "Traceback" not in said
    assert all(part in said for part in parts), said
    assert len(said.splitlines()) < 20, said
    assert not list(tmp_path.iterdir())
