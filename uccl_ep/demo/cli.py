# SPDX-License-Identifier: Apache-2.0
"""`uccl-ep demo`. Exit status: 0 results are exact, 1 they are not or a rank failed, 2 the command line is wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..cli.common import json_text, writable, write_report

if TYPE_CHECKING:
    from rich.console import Console

    from .driver import Result

_ROUTING_HELP = (
    "uniform, zipf, or a .npz file with topk_idx and topk_weights of shape (tokens, k), split over the ranks, or "
    "(ranks, tokens, k); -1 is no expert."
)


def demo(
    ranks: Annotated[int, typer.Option(help="Processes.")] = 4,
    tokens: Annotated[
        str | None, typer.Option(help="Tokens a rank: one number, or one a rank as in 128,0,64,7. Default: 128.")
    ] = None,
    hidden: Annotated[int, typer.Option(help="Values in a token.")] = 7168,
    experts: Annotated[int, typer.Option(help="Experts, a multiple of the ranks.")] = 256,
    topk: Annotated[int | None, typer.Option(help="Experts a token goes to. Default: 8.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of a value: bf16.")] = "bf16",
    routing: Annotated[str, typer.Option(help=_ROUTING_HELP)] = "uniform",
    iterations: Annotated[int, typer.Option(help="Measured iterations, after a warm-up of two.")] = 10,
    seed: Annotated[int, typer.Option(help="Of tokens and routing.")] = 0,
    backend: Annotated[str, typer.Option(help="Backend by name, or the path of its library.")] = "shm",
    strategy: Annotated[str, typer.Option(help="Signal strategy.")] = "auto",
    channels: Annotated[int, typer.Option(help="Command rings a rank.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds that any wait may take.")] = 60.0,
    accel: Annotated[
        str | None,
        typer.Option(help="Let kernels post and wait: cuda, hip, or cpu, the emulation. Default: the CPU does."),
    ] = None,
    heap: Annotated[str, typer.Option(help="With --accel: tokens in host or in device memory.")] = "host",
    json: Annotated[Path | None, typer.Option(help="Write the numbers there; - is the standard output.")] = None,
) -> None:
    """Expert-parallel exchange on this machine: tokens to experts and results back, compared bit by bit with numpy."""
    from rich.console import Console

    from .driver import DemoError, Options, run
    from .routing import RoutingError

    to_stdout = json is not None and str(json) == "-"
    console = Console(stderr=to_stdout, highlight=False)
    options = Options(
        ranks,
        tokens,
        hidden,
        experts,
        topk,
        dtype,
        routing,
        iterations,
        seed,
        backend,
        strategy,
        channels,
        timeout,
        accel,
        heap,
    )
    if json is not None and not to_stdout:
        writable(json, "--json")
    try:
        with _Progress(console) as progress:
            result = run(options, progress)
    except RoutingError as error:
        print(f"uccl-ep demo: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except (DemoError, OSError) as error:
        print(f"uccl-ep demo: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except MemoryError as error:
        print(f"uccl-ep demo: not enough memory: {error}; give fewer --tokens or --experts", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("uccl-ep demo: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
    show(console, result)
    if json is not None:
        write_report(json, json_text("uccl_ep.demo/1", **result.as_dict()))
    if not result.exact:
        raise typer.Exit(1)


class _Progress:
    """A bar where somebody watches; nothing elsewhere."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total, description=f"{done} of {total} iterations")


def show(console: Console, result: Result) -> None:
    from rich.table import Table

    options, first = result.options, result.ranks[0]
    each_rank = sorted(set(result.tokens))
    tokens = f"{each_rank[0]} a rank" if len(each_rank) == 1 else ", ".join(map(str, result.tokens))
    console.print(
        f"{options.ranks} ranks on {first['backend']} {first['backend_version']} ({first['device']}), strategy "
        f"{first['strategy']}: {first['strategy_reason']}",
        soft_wrap=True,
        markup=False,
    )
    if first["accelerator"] is not None:
        console.print(
            f"posted by kernels on {first['accelerator']['name']}, heaps in {first['accelerator']['heap']} memory",
            soft_wrap=True,
            markup=False,
        )
    console.print(
        f"tokens: {tokens} (hidden {options.hidden}, {options.dtype}), {options.experts} experts, top {options.topk}, "
        f"routing {options.routing}, seed {options.seed}",
        soft_wrap=True,
        markup=False,
    )
    console.print(
        f"an iteration: {result.rows} rows and {result.bytes_each_way / 1e6:.1f} MB each way; {options.iterations} "
        "iterations after warm-up, medians of the slowest rank",
        soft_wrap=True,
    )

    phases = Table(header_style="bold")
    who = "Python" if first["accelerator"] is None else "kernel"
    for column in ("", "time", f"posting ({who})", "rows/s", "GB/s"):
        phases.add_column(column, justify="left" if not column else "right")
    for phase in ("dispatch", "combine"):
        rate = result.rate(phase)
        phases.add_row(
            phase,
            _milliseconds(result.seconds[phase]),
            _milliseconds(result.seconds[f"{phase}_post"]),
            f"{rate / result.row_bytes:,.0f}",
            f"{rate / 1e9:.2f}",
        )
    console.print(phases)
    console.print(
        f"beside the exchange, in numpy: preparing commands {_milliseconds(result.seconds['prepare'])}, experts "
        f"{_milliseconds(result.seconds['experts'])}, weighted sums {_milliseconds(result.seconds['reduce'])}; in all "
        f"{result.total_seconds:.1f} s",
        soft_wrap=True,
    )

    channels = Table(title="All ranks together", title_justify="left", header_style="bold")
    for column in ("channel", "commands", "bytes", "signals", "failed"):
        channels.add_column(column, justify="right")
    for number, stats in enumerate(result.channels):
        numbers = [stats[key] for key in ("posted", "bytes", "signals", "failed")]
        channels.add_row(str(number), *(f"{value:,}" for value in numbers))
    console.print(channels)
    for problem in result.problems:
        console.print(problem, style="red", soft_wrap=True, markup=False)
    console.print("results: exact" if result.exact else "results: WRONG", style="green" if result.exact else "bold red")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
