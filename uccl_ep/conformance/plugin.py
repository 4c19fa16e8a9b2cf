# SPDX-License-Identifier: Apache-2.0
"""The suite as pytest items: `pip install 'uccl_ep[test]'`, then `pytest --uccl-ep-backend shm`.

pytest loads this in every project on the machine where the wheel is installed. Without its options it only adds them:
nothing else of the package is imported, and nothing is collected.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .registry import Case
    from .results import CaseResult
    from .runner import Options


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("uccl_ep", "uccl_ep conformance")
    group.addoption("--uccl-ep-backend", metavar="NAME", help="run the conformance suite on this backend")
    group.addoption("--uccl-ep-library", metavar="PATH", help="run it on this shared library")
    group.addoption("--uccl-ep-profile", metavar="NAME", help="of virtual NICs (the backend sim): which one")
    group.addoption("--uccl-ep-level", metavar="LEVEL", default="core", help="core or full")
    group.addoption("--uccl-ep-ranks", metavar="N", type=int, default=4, help="most ranks a case gets")
    group.addoption("--uccl-ep-seed", metavar="S", type=int, help="replay a run")
    group.addoption("--uccl-ep-clause", metavar="CLAUSE", action="append", default=[], help="only cases of this clause")
    group.addoption("--uccl-ep-time-scale", metavar="X", type=float, default=1.0, help="stretch every deadline")


def _options(config: pytest.Config) -> Options | None:
    backend, library = config.getoption("--uccl-ep-backend"), config.getoption("--uccl-ep-library")
    if backend is None and library is None:
        return None
    from .runner import Options

    return Options(
        backend=backend or "",
        library=Path(library) if library is not None else None,
        profile=config.getoption("--uccl-ep-profile"),
        level=config.getoption("--uccl-ep-level"),
        ranks=config.getoption("--uccl-ep-ranks"),
        seed=config.getoption("--uccl-ep-seed"),
        clauses=tuple(c.upper() for c in config.getoption("--uccl-ep-clause")),
        time_scale=config.getoption("--uccl-ep-time-scale"),
    )


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    options = _options(config)
    if options is None:
        return
    from .errors import SuiteError
    from .runner import check, plan, probe, seeded

    try:
        options = seeded(options)
        identity = probe(options)
        cases, _ = plan(options, check(options), identity["strategy"])
    except SuiteError as error:
        raise pytest.UsageError(str(error)) from error
    suite = Suite.from_parent(session, name=f"uccl_ep[{identity['name']}]", nodeid=f"uccl_ep[{identity['name']}]")
    suite.options, suite.capabilities = options, identity["capabilities"]
    session.config.stash[_SEED] = options.seed
    items.extend(CaseItem.from_parent(suite, name=case.id, case=case) for case in cases)


_SEED = pytest.StashKey[Any]()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    seed = config.stash.get(_SEED, None)
    if seed is not None:
        terminalreporter.write_line(f"uccl_ep conformance: seed {seed}")


class Suite(pytest.Collector):
    options: Options
    capabilities: dict[str, Any]

    def collect(self) -> list[pytest.Item]:
        return []  # the items are added when all else is collected


class CaseFailed(Exception):
    def __init__(self, result: CaseResult, seed: int | None) -> None:
        super().__init__(result.message)
        self.result, self.seed = result, seed


class CaseItem(pytest.Item):
    def __init__(self, *, case: Case, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.case = case

    def runtest(self) -> None:
        from .runner import run_case

        suite = self.parent
        assert isinstance(suite, Suite)
        assert suite.options.seed is not None
        result = run_case(self.case, suite.options, suite.options.seed, suite.capabilities)
        if result.status == "not_supported":
            pytest.skip(result.message)
        if result.bad:
            raise CaseFailed(result, suite.options.seed)

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        if not isinstance(excinfo.value, CaseFailed):
            return super().repr_failure(excinfo)
        result = excinfo.value.result
        clause = f"{result.broken_clause}: " if result.broken_clause else ""
        lines = [f"{result.status}: {clause}{result.message}", result.title]
        for name, value in result.detail.items():
            if name not in ("clause", "message"):
                lines.append(f"  {name}: {value}")
        lines.append(f"replay with --uccl-ep-seed {excinfo.value.seed} -k '{self.case.id}'")
        return "\n".join(lines)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.config.rootpath, None, f"{self.case.id}: {self.case.title}"
