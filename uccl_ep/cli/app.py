# SPDX-License-Identifier: Apache-2.0
"""`uccl-ep`: its commands, and what every command shares: exit codes, encodings, errors without tracebacks.

Exit codes: 0 all is well; 1 it did not work, or something that was looked at is not well; 2 the command line is wrong.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from .. import errors
from . import inventory

# Commands that live with what they run: name -> (module, function, help). Imported when they are asked for.
_ELSEWHERE = {
    "conformance": ("uccl_ep.conformance.cli", "conformance"),
    "mutants": ("uccl_ep.mutants.cli", "mutants"),
    "explore": ("uccl_ep.explorer.cli", "explore"),
    "demo": ("uccl_ep.demo.cli", "demo"),
    "perf": ("uccl_ep.perf.cli", "perf"),
    "lab": ("uccl_ep.lab.cli", "app"),
}


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *(name for name, (module, _) in _ELSEWHERE.items() if _there(module))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _ELSEWHERE or not _there(_ELSEWHERE[cmd_name][0]):
            return super().get_command(ctx, cmd_name)
        module, function = _ELSEWHERE[cmd_name]
        return _as_command(cmd_name, getattr(importlib.import_module(module), function))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            ctx.fail(f"no command {name!r}; {errors.nearest(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


def _as_command(name: str, function: Callable[..., Any] | typer.Typer) -> Any:
    if isinstance(function, typer.Typer):  # it has commands of its own
        alone = function
    else:
        alone = typer.Typer(add_completion=False)
        alone.command(name)(function)
    command = get_command(alone)
    command.name = name
    return command


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Expert-parallel communication through any NIC: look at this machine, prove a backend, measure it.",
)
app.command("backends")(inventory.list_backends)
app.command("devices")(inventory.list_devices)
app.command("doctor")(inventory.doctor)


def _print_version(asked: bool) -> None:
    if asked:
        from .. import __version__

        print(f"uccl-ep {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def run() -> None:
    # A terminal that cannot show a character shows a question mark; it does not end the program (M5).
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        app()
    except errors.UcclEpError as error:
        sys.exit(f"uccl-ep: {error}")
    except BrokenPipeError:
        # The reader has gone, e.g. `| head`. Nothing more can be said there, and nothing is wrong here.
        sys.stdout = None
        sys.exit(1)
