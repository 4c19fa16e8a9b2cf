# SPDX-License-Identifier: Apache-2.0
"""Virtual NICs: all ranks of a communicator in this process, one virtual clock, one seed.

    from uccl_ep.simulator import run

    def rank(comm):
        comm.channel(0).signal((comm.rank + 1) % comm.size, 0)
        return comm.wait_signal(0, 1)

    assert run(rank, ranks=4, profile="efa", seed=1) == [1, 1, 1, 1]

docs/simulator.md says which NICs there are, what each may do, and which faults there are. `World` is the same with
everything in reach: faults, deaths, pauses, the hash of a run and its choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .meeting import Meeting, WorldBootstrap
from .world import Fiber, World, knobs, profiles

if TYPE_CHECKING:
    from ..communicator import Communicator

__all__ = ["Fiber", "Meeting", "World", "WorldBootstrap", "knobs", "profiles", "run"]


def run(
    function: Callable[[Communicator], Any],
    *,
    ranks: int = 4,
    profile: str = "efa",
    seed: int = 1,
    knobs: Mapping[str, Any] | str = "",
    faults: Iterable[str] | str = (),
    **options: Any,
) -> list[Any]:
    """Call `function(comm)` on every rank of a new world and return what each returned; an exception is raised.

    `options` go to Communicator (heap_bytes is 1 MiB). Communicators are quieted and closed at the end.
    """
    from ..communicator import Communicator

    options.setdefault("heap_bytes", 1 << 20)
    with World(ranks, profile, seed=seed, knobs=knobs, faults=faults) as world:
        meeting = Meeting(world)

        def life(rank: int) -> Any:
            try:
                with Communicator(
                    WorldBootstrap(meeting, rank),
                    backend="sim",
                    device=profile,
                    backend_options=world.backend_options(rank),
                    driver=world.driver(rank),
                    **options,
                ) as comm:
                    result = function(comm)
                    comm.quiet()
                    comm.barrier()
                    return result
            finally:
                meeting.gone.add(rank)

        fibers = world.start([(rank, lambda rank=rank: life(rank)) for rank in range(ranks)])  # type: ignore[misc]
        world.join()
        return [fiber.result for fiber in fibers]
