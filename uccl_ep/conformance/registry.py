# SPDX-License-Identifier: Apache-2.0
"""The cases of the suite: what one is, how it is declared, where all of them are found.

A case is a function that runs on *every* rank. It states the clauses of the contract that it checks; an assertion of it
may cite those clauses and no others, so that a failure says what was broken.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from .errors import SuiteError

if TYPE_CHECKING:
    from .context import Context

CASES_PACKAGE = "uccl_ep.conformance.cases"
CASES_ENVIRONMENT = "UCCL_EP_CONFORMANCE_CASES"
# Where they are when this file is used from a checkout.
CHECKOUT_CASES = Path(__file__).resolve().parents[2] / "tests" / "conformance"
MAX_RANKS = 8
LEVELS = ("core", "full")

# Every clause of the contract, with what it is about in a few words.
CLAUSES: Mapping[str, str] = MappingProxyType(
    {
        "PUB-1": "posting is a release",
        "PUB-2": "posting together, all or none",
        "PUT-1": "exactly these bytes, and no others",
        "PUT-2": "no code runs at the target",
        "PUT-3": "source stable until quiet_source",
        "PUT-4": "any size and offset, refused or exact",
        "PUT-5": "puts are ordered by completion alone",
        "PUT-6": "the own rank obeys the same clauses",
        "PUT-7": "target bytes are quiet until complete",
        "SIG-1": "adds modulo 2^64, exactly once",
        "SIG-2": "a signal shows every earlier put",
        "SIG-3": "PUT_SIGNAL covers its own bytes",
        "SIG-4": "many sources, one word, all count",
        "SIG-5": "signals of a channel keep their order",
        "SIG-6": "words are never reset",
        "SIG-7": "the same on NICs with no ordering",
        "QUI-0": "quiet_source: sources reusable",
        "QUI-1": "quiet: visible and applied",
        "QUI-2": "quiet over all channels",
        "QUI-3": "tickets: wait, poll or drop",
        "QUI-4": "nothing outstanding, no round trip",
        "QUI-5": "causality over a third rank",
        "MEM-1": "refused at registration or never",
        "MEM-2": "nothing outside is written",
        "MEM-3": "applied only after visible",
        "PRG-1": "progress without further calls",
        "PRG-2": "no channel starves",
        "PRG-3": "a full ring waits, never loses",
        "LIM-1": "wrapping counters change nothing",
        "THR-1": "any number of producers",
        "ERR-1": "every wait has a deadline",
        "ERR-2": "one failure, one record",
        "ERR-3": "no false signal after a failure",
        "ERR-4": "malformed commands move nothing",
        "ERR-5": "a lost peer costs its own commands",
        "ERR-6": "closed until a collective reset",
        "ABT-1": "abort is final and fast",
        "ABI-1": "another ABI is refused, both named",
    }
)

# Cited by what the runner checks in every case: stray bytes, stray signals, things left behind.
IMPLICIT_CLAUSES = frozenset({"PUT-1", "SIG-1", "ABT-1"})

CaseFunction = Callable[["Context"], None]


@dataclass(frozen=True)
class Case:
    id: str
    function: CaseFunction
    clauses: tuple[str, ...]
    ranks: tuple[int, ...] = (2, 4)
    level: str = "core"
    needs: frozenset[str] = frozenset()  # of the lane: see NEEDS
    requires: tuple[str, ...] = ()  # promises of the NIC
    timeout: float = 20.0  # seconds, for the whole case
    comm: Mapping[str, Any] = field(default_factory=dict)  # overrides of the communicator's options
    weak: bool = False  # also run against the weakest promises, or with other strategies (SIG-7)
    many_writers: bool = False  # several ranks add to one signal word: not for sender_hold_sum
    variant: str = ""

    @property
    def title(self) -> str:
        lines = (self.function.__doc__ or "").strip().splitlines()
        return lines[0].rstrip(".") if lines else self.id

    def ranks_for(self, cap: int) -> int:
        """As many ranks as allowed below the cap; a case that needs more takes the fewest that it can do with."""
        fitting = [n for n in self.ranks if n <= cap]
        return max(fitting) if fitting else min(self.ranks)

    def as_variant(self, name: str, comm: Mapping[str, Any]) -> Case:
        return replace(self, id=f"{self.id}@{name}", variant=name, comm={**self.comm, **comm}, weak=False)


class RegistryError(SuiteError):
    """The suite itself is wrong: a case is declared twice, cites no clause, or cannot be loaded."""


# What a case may need of a lane.
NEEDS: Mapping[str, str] = MappingProxyType(
    {
        "threads": "ctx.spawn",
        "caller": "progress='caller': nothing moves but in calls of the rank",
        "standstill": "the same, and in no calls but progress()",
        "kill": "ctx.kill: a rank dies",
        "stop": "ctx.stop, ctx.resume: a rank does not run for a while",
        "nested": "ctx.run_group: ranks of their own",
        "batches": "posts of the CPU: any number of commands together, with a deadline of their own",
        "heaps": "heaps that the library allocates",
        "gigabytes": "a heap of 6 GiB a rank, which a NIC may pin",
        "warps": "up to 32 commands posted together",
        "device": "kernels of a GPU, or of the CPU in its place",
        "processes": "every rank is a process: fork, limits, /proc",
        "faults": "ctx.inject: the NIC fails when it is told to",
    }
)

_ID = re.compile(r"^[a-z]{3}[0-9](\.[a-z0-9_]+)+$")
_cases: dict[str, Case] = {}


def case(
    id: str,
    *,
    clauses: Sequence[str],
    ranks: Sequence[int] = (2, 4),
    level: str = "core",
    needs: Iterable[str] = (),
    requires: Sequence[str] = (),
    timeout: float = 20.0,
    comm: Mapping[str, Any] | None = None,
    weak: bool = False,
    many_writers: bool = False,
) -> Callable[[CaseFunction], CaseFunction]:
    """Declare a case. `ranks`: numbers of ranks that it can run with; `weak`: run it again on the weakest promises."""
    unknown = [c for c in clauses if c not in CLAUSES]
    if not _ID.match(id):
        raise RegistryError(f"case {id!r}: an id looks like 'sig2.sizes'")
    if not clauses or unknown:
        raise RegistryError(f"case {id}: cites {unknown or 'no clause'}")
    if level not in LEVELS or not ranks or min(ranks) < 1 or max(ranks) > MAX_RANKS:
        raise RegistryError(f"case {id}: level {level!r} or ranks {tuple(ranks)} are not valid")

    def declare(function: CaseFunction) -> CaseFunction:
        if id in _cases:
            raise RegistryError(f"case {id} is declared twice")
        _cases[id] = Case(
            id,
            function,
            tuple(clauses),
            tuple(sorted(ranks)),
            level,
            frozenset(needs),
            tuple(requires),
            timeout,
            dict(comm or {}),
            weak,
            many_writers,
        )
        return function

    return declare


def _cases_package(directory: str | os.PathLike[str] | None) -> ModuleType:
    directory = directory or os.environ.get(CASES_ENVIRONMENT)
    if directory is None:
        try:
            return importlib.import_module(CASES_PACKAGE)
        except ModuleNotFoundError as error:
            if error.name != CASES_PACKAGE:
                raise
            directory = CHECKOUT_CASES
    init = Path(directory) / "__init__.py"
    if not init.is_file():
        raise RegistryError(
            f"there are no cases in {directory}: install the wheel, or set {CASES_ENVIRONMENT} to the "
            "tests/conformance of a checkout"
        )
    loaded = sys.modules.get(CASES_PACKAGE)
    if loaded is not None and loaded.__file__ is not None and os.path.samefile(loaded.__file__, init):
        return loaded
    spec = importlib.util.spec_from_file_location(
        CASES_PACKAGE, init, submodule_search_locations=[str(Path(directory).resolve())]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[CASES_PACKAGE] = package
    spec.loader.exec_module(package)
    return package


def load(directory: str | os.PathLike[str] | None = None) -> list[Case]:
    """All cases, in the order of the contract. `directory`, or the environment, names a folder to take them from."""
    package = _cases_package(directory)
    for module in sorted(m.name for m in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"{CASES_PACKAGE}.{module}")
    order = {clause: i for i, clause in enumerate(CLAUSES)}
    return sorted(_cases.values(), key=lambda c: (order[c.clauses[0]], c.id))


def select(
    cases: Iterable[Case], *, level: str = "full", globs: Sequence[str] = (), clauses: Sequence[str] = ()
) -> list[Case]:
    """The cases of a level ("full" holds "core") whose id matches one of `globs` and that cite one of `clauses`."""
    chosen = []
    for c in cases:
        if level == "core" and c.level != "core":
            continue
        if globs and not any(fnmatch.fnmatchcase(c.id, g) for g in globs):
            continue
        if clauses and not set(clauses) & set(c.clauses):
            continue
        chosen.append(c)
    return chosen
