# SPDX-License-Identifier: Apache-2.0
"""Limits of a process and of a machine that are too small: refused by name, on all ranks, and nothing is left."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from uccl_ep import backends, doctor
from uccl_ep.errors import OutOfMemory, SystemError_, UcclEpError

from .ranks import Footprint, Member, Ranks, facts_of, open_files
from .traffic import Exchange, make

MIB = 1 << 20


def limit(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    resource.setrlimit(which, (value, hard))


def used_address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def ordinary_user() -> None:
    """Root may lock memory and start threads without a limit."""
    if os.geteuid() == 0:
        backends.probe(backends.find("shm").library)
        os.setgroups([])
        os.setresgid(54321, 54321, 54321)
        os.setresuid(54321, 54321, 54321)


def refused_on_all(
    prepare: Callable[[int], None],
    kinds: type[UcclEpError] | tuple[type[UcclEpError], ...],
    parts: tuple[str, ...],
    size: int = 2,
    **settings: object,
) -> None:
    """One start that must fail, then one without what was asked too much of."""

    def program(member: Member) -> None:
        before = Footprint()
        with pytest.raises(kinds) as refused:
            make(member.bootstrap, **settings)
        member.say("refused", **facts_of(refused.value), code=refused.value.record.vendor_code)
        assert not before.leaks(), before.leaks()

    with Ranks(size, program, environment=prepare) as ranks:
        for child in ranks.join_well().values():
            said = child.saw("refused")
            assert said
            assert all(part in said["text"] for part in parts), said


# -------------------------------------------------------------------------------------------------------------- memory


def test_a_heap_larger_than_the_address_space() -> None:
    """Of rank 1: it says the limit and how to raise it, and rank 0 hears of it."""

    def prepare(rank: int) -> None:
        if rank == 1:
            limit(resource.RLIMIT_AS, used_address_space() + 256 * MIB)

    parts = ("1073741824 bytes are needed", "address space is limited to", "ulimit -v", "smaller heap")
    refused_on_all(prepare, OutOfMemory, parts, heap_bytes=1024 * MIB)


def test_no_address_space_for_the_memory_of_the_others() -> None:
    """The own heap fits, those of three peers do not."""

    def prepare(rank: int) -> None:
        if rank == 1:
            limit(resource.RLIMIT_AS, used_address_space() + 900 * MIB)

    parts = ("map", "ulimit -v")
    refused_on_all(prepare, OutOfMemory, parts, size=4, heap_bytes=400 * MIB, bootstrap_timeout=10.0)


def test_files_limited_to_less_than_the_heap() -> None:
    """Shared memory is a file to the kernel, and passing the limit would kill by SIGXFSZ."""

    def prepare(rank: int) -> None:
        limit(resource.RLIMIT_FSIZE, MIB)

    refused_on_all(prepare, OutOfMemory, ("ulimit -f", str(MIB)), heap_bytes=8 * MIB)


def test_locked_memory_too_small() -> None:
    def prepare(rank: int) -> None:
        limit(resource.RLIMIT_MEMLOCK, 64 << 10)
        ordinary_user()

    parts = ("mlock of 8388608 bytes", "limit of locked memory is 65536", "ulimit -l")
    refused_on_all(prepare, OutOfMemory, parts, heap_bytes=8 * MIB, lock_memory=True)


def test_locked_memory_large_enough() -> None:
    def program(member: Member) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        want = 4 * MIB
        if hard != resource.RLIM_INFINITY and hard < want + MIB:
            return
        limit(resource.RLIMIT_MEMLOCK, hard)
        comm = make(member.bootstrap, heap_bytes=want, lock_memory=True)
        (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmLck:")]
        assert int(line.split()[1]) * 1024 >= want
        comm.close()

    with Ranks(1, program) as ranks:
        ranks.join_well()


def test_huge_pages_that_are_not_there() -> None:
    """Asked for, and more than any machine has spare; not asked for, ordinary pages do."""

    def prepare(rank: int) -> None:
        pass

    refused_on_all(prepare, OutOfMemory, ("huge pages", "vm.nr_hugepages"), heap_bytes=60 << 30, huge_pages=True)


def test_a_heap_larger_than_the_machine() -> None:
    """Pages are given when they are written: it works while little of it is used. The doctor says how much there is."""
    (line,) = [one for one in Path("/proc/meminfo").read_text().splitlines() if one.startswith("MemTotal:")]
    total = int(line.split()[1]) * 1024
    heap = 64 << 30
    if total >= heap:
        pytest.skip("no addressable heap is larger than this machine")

    def program(member: Member) -> None:
        comm = make(member.bootstrap, heap_bytes=heap)
        other = 1 - member.rank
        for at in (0, 4 << 30, (4 << 30) + 12288, heap - 4096):
            comm.heap[at : at + 4096] = (at >> 12) % 251 + member.rank
        comm.barrier()
        for number, at in enumerate((4 << 30, heap - 4096)):
            comm.channel(0).put_signal(other, at, at - 8192 * (number + 1), 4096, slot=number)
            comm.wait_signal(number, 1)
            got = comm.heap[at - 8192 * (number + 1) :][:4096]
            assert np.array_equal(got, np.full(4096, (at >> 12) % 251 + other, np.uint8))
        comm.quiet()
        comm.barrier()
        comm.close()

    with Ranks(2, program) as ranks:
        ranks.join_well()
    (left,) = [check for check in doctor.examine().checks if check.name == "shm: memory"]
    assert left.level == "info"
    assert "left for all heaps together" in left.found


# --------------------------------------------------------------------------------------------------- files and threads


def test_every_number_of_open_files_too_small() -> None:
    """From none to enough, one more each time: a start works or names `ulimit -n`; it never hangs or half works."""

    def program(member: Member) -> None:
        member.bootstrap.barrier(20.0)
        before = Footprint()
        highest = max(int(number) for number in open_files())
        refused = worked = 0
        for more in range(1, 28):
            if member.rank == 1:
                # Holes below the highest are filled, so that exactly `more` are left.
                fillers = []
                while (fd := os.open("/dev/null", os.O_RDONLY)) < highest:
                    fillers.append(fd)
                os.close(fd)
                limit(resource.RLIMIT_NOFILE, highest + 1 + more)
            try:
                comm = make(member.bootstrap, bootstrap_timeout=15.0)
            except SystemError_ as error:
                record = error.record
                refused += 1
                assert not worked, f"{more}: worked with fewer"
                assert "ulimit -n" in record.text, record
                assert member.rank == 1 or record.peer == 1, record
            else:
                worked += 1
                exchange = Exchange(member, comm)
                exchange.round()
                comm.quiet()
                comm.barrier()
                comm.close()
            if member.rank == 1:
                limit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
                for fd in fillers:
                    os.close(fd)
            assert not before.leaks(), before.leaks()
        member.say("tried", refused=refused, worked=worked)
        assert refused
        assert worked

    with Ranks(3, program, seconds=120) as ranks:
        children = ranks.join_well(seconds=120)
        print(children[1].saw("tried"))


def test_threads_that_cannot_be_started() -> None:
    def prepare(rank: int) -> None:
        if rank == 1:
            ordinary_user()
            limit(resource.RLIMIT_NPROC, 0)
        elif os.geteuid() == 0:
            ordinary_user()  # one job is one user's

    refused_on_all(prepare, SystemError_, ("thread of proxy 0", "ulimit -u"))


def test_a_signal_in_the_middle_of_a_wait_is_seen() -> None:
    """Ctrl-C ends a wait of the main thread long before its deadline, and the communicator can still be closed."""

    def program(member: Member) -> None:
        comm = make(member.bootstrap, timeout=50.0)
        if member.rank == 0:

            def wait() -> None:
                member.say("waits")
                comm.wait_signal(5, 1)

            with pytest.raises(KeyboardInterrupt):
                wait()
            comm.channel(0).signal(1, 5).wait()
            member.bootstrap.barrier(20.0)
        else:
            comm.wait_signal(5, 1, source=0)
            member.bootstrap.barrier(20.0)
        comm.close()

    with Ranks(2, program) as ranks:
        ranks.wait_for(0, "waits")
        ranks.signal(0, signal.SIGINT)
        ranks.join_well(seconds=30)
