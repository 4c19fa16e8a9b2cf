# SPDX-License-Identifier: Apache-2.0
"""One rank of the demo: a process of its own, `python -m uccl_ep.demo.worker`.

Its options are one JSON document on the standard input; it says what happens in JSON documents, one a line, on the
standard output: {"iteration": i} as it goes, at last {"result": ...} or {"error": ...}.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import Communicator, UcclEpError
from ..bootstrap import LocalBootstrap
from . import tokens
from .exchange import SIGNALS_PER_EXPERT, Exchange, Shape, SignalOrderBroken
from .routing import Router, RoutingError
from .traffic import HostTraffic, KernelTraffic, Traffic, opened

if TYPE_CHECKING:
    from ..accel import Accelerator


def say(**document: Any) -> None:
    print(json.dumps(document), flush=True)


def compare(found: tokens.Bf16, expected: tokens.Bf16) -> str:
    """Bit by bit. Empty, or the first place where they differ."""
    wrong = np.argwhere(found != expected)
    if not len(wrong):
        return ""
    token, column = (int(at) for at in wrong[0])
    rows = len(np.unique(wrong[:, 0]))
    return (
        f"{len(wrong)} values in {rows} of {len(found)} tokens differ; the first is token {token}, column {column}: "
        f"0x{int(found[token, column]):04x} where 0x{int(expected[token, column]):04x} is right"
    )


def run(options: dict[str, Any], bootstrap: LocalBootstrap) -> dict[str, Any]:
    with opened(options["accel"]) as gpu:
        return run_on(options, bootstrap, gpu)


def run_on(options: dict[str, Any], bootstrap: LocalBootstrap, gpu: Accelerator | None) -> dict[str, Any]:
    shape = Shape(**options["shape"])
    rank, seed, timeout = bootstrap.rank, options["seed"], options["timeout"]
    router = Router(**options["routing"])
    memory = gpu.alloc(shape.heap_bytes) if gpu is not None and options["heap"] == "device" else None
    comm = Communicator(
        bootstrap,
        heap_bytes=None if memory else shape.heap_bytes,
        heap=memory,
        accelerator=gpu,
        device_channels=0 if gpu is None else options["channels"],
        signals=SIGNALS_PER_EXPERT * shape.experts,
        channels=options["channels"],
        backend=options["backend"],
        strategy=options["strategy"],
        timeout=timeout,
    )
    samples: list[dict[str, float]] = []
    problems: list[str] = []
    with comm:
        traffic: Traffic = HostTraffic(comm, timeout)
        if gpu is not None:
            traffic = KernelTraffic(comm, gpu, memory, shape.commands, shape.waits, timeout)
        exchange = Exchange(comm, shape, traffic)
        for iteration in range(options["warmup"] + options["iterations"]):
            routing = router.routing(iteration, rank)
            x = tokens.tokens(seed, iteration, rank, len(routing.topk_idx), shape.hidden)
            # Padding: whoever sends it, or reads it, spreads NaN.
            x[(routing.topk_idx < 0).all(axis=1)] = tokens.NAN
            start = time.perf_counter()
            exchange.begin(iteration, x, routing.topk_idx)
            prepared = time.perf_counter() - start
            bootstrap.barrier(timeout)
            dispatch_post, dispatch = exchange.dispatch()
            exchange.check_arrivals()
            start = time.perf_counter()
            exchange.experts()
            computed = time.perf_counter() - start
            bootstrap.barrier(timeout)
            combine_post, combined = exchange.combine()
            start = time.perf_counter()
            found = exchange.reduce(routing.topk_weights)
            reduced = time.perf_counter() - start
            problem = compare(found, tokens.reference(x, routing.topk_idx, routing.topk_weights))
            if problem:
                problems.append(f"rank {rank}, iteration {iteration}: {problem}")
            if iteration >= options["warmup"]:
                samples.append(
                    {
                        "dispatch": dispatch,
                        "dispatch_post": dispatch_post,
                        "combine": combined,
                        "combine_post": combine_post,
                        "prepare": prepared,
                        "experts": computed,
                        "reduce": reduced,
                        "rows_sent": exchange.rows_sent,
                        "rows_received": exchange.rows_received,
                    }
                )
            say(iteration=iteration)
        exchange.finish()
        bootstrap.barrier(timeout)
        stats = comm.stats()
        info = comm.info
    return {
        "rank": rank,
        "tokens": len(routing.topk_idx),
        "samples": samples,
        "problems": problems,
        "stats": stats,
        "strategy": info.strategy,
        "strategy_reason": info.strategy_reason,
        "backend": info.backend,
        "backend_version": info.backend_version,
        "device": info.device.name,
        "accelerator": None if gpu is None else {"kind": gpu.kind, "name": gpu.info.name, "heap": options["heap"]},
        "heap_bytes": info.heap_bytes,
    }


def main() -> int:
    bootstrap = LocalBootstrap.inherited()
    document = sys.stdin.read()
    if not document:
        return 1  # the parent was interrupted while it started this process
    options = json.loads(document)
    try:
        say(result=run(options, bootstrap))
        return 0
    except (UcclEpError, RoutingError, SignalOrderBroken) as error:
        say(error=f"{type(error).__name__}: {error}", primary=_is_primary(error))
        return 1
    except MemoryError as error:
        say(error=f"not enough memory: {error or 'give fewer tokens'}", primary=True)
        return 1


def _is_primary(error: Exception) -> bool:
    """Not a consequence of another rank's end."""
    return not isinstance(error, UcclEpError) or error.name not in ("E_PEER_LOST", "E_BOOTSTRAP", "E_CLOSED")


if __name__ == "__main__":
    sys.exit(main())
