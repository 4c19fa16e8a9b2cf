# SPDX-License-Identifier: Apache-2.0
"""A world: ranks, their virtual NICs, one clock and one seed.

    with World(ranks=2, profile="efa", seed=7) as world:
        ...
        world.start([(0, first), (1, second)])      # functions of the ranks, as fibers
        world.join()
        print(world.hash)

A fiber is a thread that runs only while it holds the world's baton. It gives the baton away in `turn()`, and in every
call of a communicator that has `driver=world.driver(rank)`; between two turns it is alone. So nothing in a fiber may
block any other way, and a run is a function of profile, knobs, faults, seed and program.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .. import errors
from . import _native

_TEXT_BYTES = 256
FOREVER = (1 << 64) - 1


def profiles() -> dict[str, str]:
    """Every profile and what NIC it stands for."""
    ffi, sim, _ = _native.load()
    found: dict[str, str] = {}
    text = ffi.new("const char **")
    while (name := sim.profile(len(found), text)) != ffi.NULL:
        found[_native.text_of(name)] = _native.text_of(text[0])
    return found


def knobs(profile: str) -> str:
    """A profile's knobs, one a line: "name=value  what it means"."""
    if profile not in profiles():
        raise errors.CommandError(f"no profile named {profile!r}; {errors.nearest(profile, profiles())}")
    ffi, sim, _ = _native.load()
    need = sim.knobs(profile.encode(), ffi.NULL, 0)
    room = ffi.new("char[]", need + 1)
    sim.knobs(profile.encode(), room, need + 1)
    return _native.text_of(room)


def _options(value: Mapping[str, Any] | str) -> str:
    if isinstance(value, str):
        return value
    return ",".join(f"{key}={int(one) if isinstance(one, bool) else one}" for key, one in value.items())


class Fiber:
    """One thread of a rank."""

    def __init__(self, world: World, rank: int, function: Callable[[], Any]) -> None:
        self.world, self.rank = world, rank
        self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._function = function
        self._following: Sequence[Fiber] = ()
        # A daemon: the threads of a killed rank never end.
        self._thread = threading.Thread(target=self._main, name=f"rank {rank}", daemon=True)

    def _main(self) -> None:
        world = self.world
        world._enter(self.rank)
        try:
            for other in self._following:
                world._launch(other)
            self.result = self._function()
        except BaseException as error:
            self.error = error
            world._failures.append(error)
        finally:
            self.ended = True
            world._leave(self)

    def join(self, timeout: float | None = None) -> bool:
        """From another fiber: take turns until this one has ended, or until `timeout` seconds of the world are over."""
        end = None if timeout is None else self.world.now() + timeout
        while not self.ended:
            if end is not None and self.world.now() >= end:
                return False
            self.world.turn()
        return True


class World:
    deaths = 0  # of ranks, in all worlds of this process

    def __init__(
        self,
        ranks: int,
        profile: str,
        *,
        seed: int = 0,
        knobs: Mapping[str, Any] | str = "",
        faults: Iterable[str] | str = (),
        choices: Sequence[int] = (),
        first_later: bool = False,
        trace_lines: int = 0,
    ) -> None:
        """`knobs` change the profile, `faults` are as for inject(); docs/simulator.md lists both. `choices` are taken
        first, then the seed's, or always the first alternative if `first_later`."""
        ffi, sim, _ = _native.load()
        self._ffi, self._sim = ffi, sim
        self._yield = getattr(sim, "yield")  # a word of Python's
        if not 0 <= seed < 1 << 64:
            raise errors.CommandError(f"a seed is a number of 64 bits, not {seed}")
        config = ffi.new("uccl_ep_sim_config *")
        # The first fiber starts the others, see start().
        changes = ",".join(filter(None, ("fibers=1", _options(knobs))))
        bad_luck = faults if isinstance(faults, str) else ";".join(faults)
        strings = [ffi.new("char[]", text.encode()) for text in (profile, changes, bad_luck)]
        scripted = ffi.new("uint32_t[]", list(choices))
        config.size, config.ranks, config.seed = ffi.sizeof("uccl_ep_sim_config"), ranks, seed
        config.profile = strings[0]
        config.knobs = strings[1]
        config.faults = strings[2] if bad_luck else ffi.NULL
        config.choices, config.n_choices = scripted, len(choices)
        config.first_later, config.trace_lines = int(first_later), trace_lines
        text = ffi.new("char[]", _TEXT_BYTES)
        self._opened = sim.world_open(config, text)
        if self._opened == ffi.NULL:
            raise errors.CommandError(_native.text_of(text))
        self._closed = False
        self.ranks, self.profile, self.seed = ranks, profile, seed
        self.number = int(sim.world_number(self._world))
        self._local = threading.local()
        self._fibers: list[Fiber] = []
        self._running = 0
        self._failures: list[BaseException] = []
        self._idle = threading.Event()  # no fiber is left to run
        self._idle.set()
        self._killed = False
        self._drivers: dict[int, WorldDriver] = {}

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """After its communicators are closed. A world in which a rank was killed, or whose fibers still run, keeps what
        it has until the process ends: its threads are in the middle of calls."""
        if self._closed:
            return
        if not self._killed and not self._running:
            self._sim.world_close(self._world)
        self._closed = True

    @property
    def _world(self) -> Any:
        if self._closed:
            raise errors.CommandError("this world is closed")
        return self._opened

    def _rank(self, rank: int) -> int:
        if not 0 <= rank < self.ranks:
            raise errors.CommandError(f"rank {rank}: this world has ranks 0 to {self.ranks - 1}")
        return rank

    def in_fiber(self) -> bool:
        """Is the caller a fiber of this world? Nobody else can wait in it: time goes on in turns of fibers alone."""
        return getattr(self._local, "rank", None) is not None

    # ---------------------------------------------------------------------------------------------------- time, turns

    def now_ns(self) -> int:
        return int(self._sim.now(self._world))

    def now(self) -> float:
        """Seconds of the world's clock."""
        return self.now_ns() * 1e-9

    def turn(self) -> None:
        """Let others run until it is this fiber's turn again. Outside of fibers: nothing."""
        if self.in_fiber():
            self._yield(self._world)

    def sleep(self, seconds: float) -> None:
        """Of the world's clock, in a fiber."""
        if not self.in_fiber():
            raise errors.CommandError("only a fiber can sleep in a world: start() one")
        end = self.now_ns() + int(seconds * 1e9)
        while True:
            self.turn()
            if self.now_ns() >= end:
                return

    # --------------------------------------------------------------------------------------------------------- fibers

    def start(self, functions: Iterable[tuple[int, Callable[[], Any]]]) -> list[Fiber]:
        """Begin a world's life: one fiber for each (rank, function). The first one starts the others, so that they come
        in this order whatever the machine does. For a thread that is no fiber of this world."""
        fibers = [Fiber(self, self._rank(rank), function) for rank, function in functions]
        if not fibers:
            raise errors.CommandError("a world's life begins with one fiber at least")
        self._fibers += fibers
        first, *rest = fibers
        first._following = rest
        self._running += len(fibers)
        self._idle.clear()
        first._thread.start()
        return fibers

    def spawn(self, rank: int, function: Callable[[], Any]) -> Fiber:
        """A further thread of a rank, from a fiber."""
        fiber = Fiber(self, self._rank(rank), function)
        self._fibers.append(fiber)
        self._running += 1
        self._launch(fiber)
        return fiber

    def _launch(self, fiber: Fiber) -> None:
        # It must be in the world's list before anything else happens, or the run would depend on the machine's
        # scheduler.
        before = self._sim.fibers(self._world)
        fiber._thread.start()
        while self._sim.fibers(self._world) == before:
            time.sleep(1e-5)

    def _enter(self, rank: int) -> None:
        self._sim.enter(self._world, rank)
        self._local.rank = rank

    def _leave(self, fiber: Fiber) -> None:
        self._local.rank = None
        self._ended(1)
        self._sim.leave(self._world)

    def _ended(self, n: int) -> None:
        self._running -= n
        if not self._running:
            self._idle.set()

    def join(self, timeout: float | None = None) -> bool:
        """Until no fiber is left that can run; the first exception of one is raised. `timeout`: real seconds."""
        if not self._idle.wait(timeout):
            return False
        for fiber in self._fibers:
            if fiber.ended:
                fiber._thread.join()
        if self._failures:
            raise self._failures[0]
        return True

    # ------------------------------------------------------------------------------------------------ ranks and faults

    def driver(self, rank: int) -> WorldDriver:
        """For Communicator(driver=...) of this rank."""
        if rank not in self._drivers:
            self._drivers[rank] = WorldDriver(self, self._rank(rank))
        return self._drivers[rank]

    def backend_options(self, rank: int, knobs: Mapping[str, Any] | str = "") -> str:
        """For Communicator(backend_options=...) of this rank."""
        own = f"world={self.number},rank={self._rank(rank)}"
        return f"{own},{_options(knobs)}" if knobs else own

    def inject(self, fault: str) -> None:
        """A fault: "name key=value ..."; docs/simulator.md lists them."""
        text = self._ffi.new("char[]", _TEXT_BYTES)
        if self._sim.inject(self._world, fault.encode(), text):
            raise errors.CommandError(_native.text_of(text))

    def kill(self, rank: int) -> None:
        """The rank's process and NIC are gone. If it is the calling fiber's own, this does not return."""
        if not self.alive(rank):
            return
        self._killed = True
        World.deaths += 1
        self._sim.kill(self._world, rank)
        for handle in self.driver(rank).handles:
            handle.abandon()
        self._ended(sum(1 for fiber in self._fibers if fiber.rank == rank and not fiber.ended))
        if getattr(self._local, "rank", None) == rank:
            while True:  # the baton is given away for ever
                self._yield(self._world)

    def pause(self, rank: int, seconds: float | None = None) -> None:
        """As SIGSTOP; None: until resume()."""
        self._sim.pause(self._world, self._rank(rank), FOREVER if seconds is None else int(seconds * 1e9))

    def resume(self, rank: int) -> None:
        self._sim.resume(self._world, self._rank(rank))

    def alive(self, rank: int) -> bool:
        return bool(self._sim.alive(self._world, self._rank(rank)))

    # ------------------------------------------------------------------------------------------------------ observing

    def stats(self) -> dict[str, int]:
        struct = self._ffi.new("uccl_ep_sim_stats *")
        self._sim.stats(self._world, struct)
        return {name: int(getattr(struct, name)) for name, _ in self._ffi.typeof(struct[0]).fields}

    @property
    def hash(self) -> str:
        """Of every event and choice so far: equal hashes, equal runs."""
        return f"{self.stats()['hash']:016x}"

    def choices(self) -> list[int]:
        count = self._ffi.new("uint32_t *")
        made = self._sim.choices(self._world, count)
        return [int(made[i].taken) for i in range(count[0])]

    def trace(self) -> list[str]:
        """The last events, oldest first: as many as `trace_lines` of the constructor."""
        need = self._sim.trace(self._world, self._ffi.NULL, 0)
        room = self._ffi.new("char[]", need + 1)
        self._sim.trace(self._world, room, need + 1)
        return _native.text_of(room).splitlines()


class WorldDriver:
    """uccl_ep.communicator.Driver of one rank."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        ffi, sim = world._ffi, world._sim

        def address(value: Any) -> int:
            return int(ffi.cast("uintptr_t", value))

        self.clock, self.idle, self.context = address(sim.now), address(world._yield), address(world._world)
        self.handles: weakref.WeakSet[Any] = weakref.WeakSet()
        self._pass = ffi.NULL

    def now(self) -> float:
        return self._world.now()

    def turn(self) -> None:
        self._world.turn()

    def adopt(self, handle: Any) -> None:
        self.handles.add(handle)

    def _proxies(self, comm: Any) -> Any:
        from .._native import ffi, lib

        if self._pass == self._world._ffi.NULL:
            entry = int(ffi.cast("uintptr_t", ffi.addressof(lib, "uccl_ep_progress_proxy")))
            self._pass = self._world._ffi.cast("uccl_ep_status (*)(void *, uint32_t, uint32_t *)", entry)
        return self._world._ffi.cast("void *", int(ffi.cast("uintptr_t", comm)))

    def attach(self, comm: Any, proxies: int) -> None:
        context = self._proxies(comm)
        for index in range(proxies):
            self._world._sim.proxy_add(self._world._world, self._rank, self._pass, context, index)

    def detach(self, comm: Any, proxies: int) -> None:
        context = self._proxies(comm)
        for index in range(proxies):
            self._world._sim.proxy_remove(self._world._world, context, index)
