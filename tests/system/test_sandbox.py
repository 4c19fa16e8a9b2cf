# SPDX-License-Identifier: Apache-2.0
"""Places that give less: calls refused by a sandbox, other users, folders that cannot be written, a full /dev/shm."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from uccl_ep import backends
from uccl_ep.errors import SystemError_

from .ranks import Footprint, Member, Ranks, belongings, facts_of, open_files
from .test_kill import some_rounds
from .traffic import Exchange, make

_libc = ctypes.CDLL(None, use_errno=True)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: to be two users, or to mount")


def call(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


# --------------------------------------------------------------------------------------------- system calls are refused

NUMBERS = {
    "x86_64": {"memfd_create": 319, "process_vm_readv": 310, "process_vm_writev": 311},
    "aarch64": {"memfd_create": 279, "process_vm_readv": 270, "process_vm_writev": 271},
}
EVERYWHERE = {"pidfd_open": 434, "pidfd_getfd": 438}


def refuse(*names: str, error: int = errno.EPERM) -> None:
    """From now on this process and its children get `error` from these system calls: seccomp, as a container has it."""
    load, jump_equal, give, allow, errno_action = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
    numbers = [{**EVERYWHERE, **NUMBERS[platform.machine()]}[name] for name in names]
    program = [(load, 0, 0, 0)]
    program += [(jump_equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    program += [(give, 0, 0, allow), (give, 0, 0, errno_action | error)]
    code = b"".join(struct.pack("HBBI", *one) for one in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    filters = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    pr_set_no_new_privs, pr_set_seccomp, mode_filter = 38, 22, 2
    call(_libc.prctl(pr_set_no_new_privs, 1, 0, 0, 0), "no_new_privs")
    call(_libc.prctl(pr_set_seccomp, mode_filter, ctypes.create_string_buffer(filters, len(filters))), "seccomp")


def test_the_refusal_itself() -> None:
    def program(member: Member) -> None:
        os.close(os.memfd_create("x"))
        os.close(os.pidfd_open(os.getpid()))
        refuse("memfd_create", "pidfd_open", error=errno.ENOSYS)
        for step in (lambda: os.memfd_create("x"), lambda: os.pidfd_open(os.getpid())):
            with pytest.raises(OSError, match="not implemented") as refused:
                step()
            assert refused.value.errno == errno.ENOSYS

    with Ranks(1, program) as ranks:
        ranks.join_well()


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_without_pidfd_a_death_is_noticed_all_the_same(error: int) -> None:
    """E7. Also when a child of the dead holds its connection open: then only looking for the process tells."""

    def program(member: Member) -> None:
        refuse("pidfd_open", "pidfd_getfd", "process_vm_readv", "process_vm_writev", error=error)
        exchange = Exchange(member, make(member.bootstrap), victim=1)
        exchange.round()
        if member.rank == 1:
            orphan = os.fork()
            if orphan == 0:
                while True:
                    signal.pause()
            member.say("forked", pid=orphan)
            os.kill(os.getpid(), signal.SIGKILL)
        exchange.run_until_lost()
        exchange.comm.close()

    with Ranks(3, program) as ranks:
        orphan = ranks.wait_for(1, "forked")["pid"]
        try:
            # Until then it is a zombie, which can still be signalled.
            assert ranks.reap(1) == -signal.SIGKILL
            ranks.join_well(1)
            os.kill(orphan, 0)  # it did live
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_without_memfd_the_start_is_refused_and_names_the_call() -> None:
    """E7: on every rank, also those that could; and the list of devices says why."""

    def program(member: Member) -> None:
        if member.rank == 1:
            refuse("memfd_create")
        before = Footprint()
        with pytest.raises(SystemError_) as refused:
            make(member.bootstrap)
        member.say("refused", **facts_of(refused.value))
        assert not before.leaks(), before.leaks()
        if member.rank == 1:
            (device,) = backends.probe(backends.find("shm").library).devices
            assert "memfd_create" in device.unusable
            assert "allow" in device.unusable

    with Ranks(3, program) as ranks:
        for child in ranks.join_well().values():
            said = child.saw("refused")
            assert said
            assert said["name"] == "E_SYSTEM"
            assert "memfd_create" in said["text"]
            assert "Operation not permitted" in said["text"]
            assert "allow this system call" in said["text"], said["text"]
            assert child.rank == 1 or "rank 1" in said["text"]


# ----------------------------------------------------------------------------------------------------- users and places


def become(user: int) -> Callable[[int], None]:
    def change(rank: int) -> None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)

    return change


def elsewhere(rank: int) -> None:
    """A mount namespace of its own, where HOME, /tmp and /dev/shm have room for one page and cannot be written."""
    clone_newns, ms_rec, ms_private, ms_remount_rdonly = 0x20000, 0x4000, 1 << 18, 32 | 1
    call(_libc.unshare(clone_newns), "unshare")
    call(_libc.mount(b"none", b"/", None, ms_rec | ms_private, None), "mount private")
    for place in ("/tmp", "/dev/shm", "/root", "/var/tmp", "/run"):
        for flags in (0, ms_remount_rdonly) if Path(place).is_dir() else ():
            call(_libc.mount(b"tmpfs", place.encode(), b"tmpfs", flags, b"size=4096"), f"mount {place}")
    os.environ.update(HOME="/root", TMPDIR="/tmp/" + "long" * 40)


@as_root
def test_two_users_at_once() -> None:
    """F19: the same job as root and as another user, each again after the other was killed."""
    backends.probe(backends.find("shm").library)  # loaded as root: it may be installed where only root reads
    for kill_first in (False, True):
        with Ranks(3, some_rounds, 30) as mine, Ranks(3, some_rounds, 30, environment=become(1000)) as theirs:
            if kill_first:
                for rank in theirs.children:
                    theirs.wait_for(rank, "has")
                    if theirs.children[rank].ended is None:
                        theirs.signal(rank, signal.SIGKILL)
                theirs.join()
            else:
                theirs.join_well()
            mine.join_well()
            assert not mine.belongings() & theirs.belongings()
    with Ranks(3, some_rounds, environment=become(1000)) as theirs:
        theirs.join_well()


@as_root
def test_ranks_of_different_users_are_refused() -> None:
    """One job is one user's: said at the start, on all ranks, with the remedy."""
    backends.probe(backends.find("shm").library)

    def program(member: Member) -> None:
        with pytest.raises(Exception, match="user 1000") as refused:
            make(member.bootstrap)
        member.say("refused", **facts_of(refused.value))

    with Ranks(2, program, environment=lambda rank: become(1000)(rank) if rank else None) as ranks:
        for child in ranks.join_well().values():
            said = child.saw("refused")
            assert said
            assert said["name"] == "E_BOOTSTRAP"
            assert "start all as one" in said["text"]


@as_root
def test_no_file_is_needed_anywhere() -> None:
    """F19: HOME, TMPDIR and /dev/shm are full, read-only and too long for a socket's name: nothing is written there."""

    def program(member: Member) -> None:
        for place in ("/dev/shm", "/tmp", os.environ["HOME"]):
            with pytest.raises(OSError, match=r"Read-only|No space"):
                Path(place, "probe").write_text("x")
        some_rounds(member)

    with Ranks(3, program, environment=elsewhere) as ranks:
        ranks.join_well()


def test_own_descriptors_are_closed_to_others() -> None:
    """Memory is reached by descriptors alone, which no other user can open and no started program inherits."""

    def program(member: Member) -> None:
        comm = make(member.bootstrap)
        Exchange(member, comm).round()
        ours = {n: what for n, what in open_files().items() if "memfd:uccl_ep" in what or "pidfd" in what}
        assert any("memfd" in what for what in ours.values())
        assert any("pidfd" in what for what in ours.values())
        for number, what in ours.items():
            assert not os.get_inheritable(int(number)), what
        assert all(name.startswith("@uccl_ep-") for name in belongings())
        comm.quiet()
        comm.barrier()
        comm.close()

    with Ranks(2, program) as ranks:
        ranks.join_well()
