# SPDX-License-Identifier: Apache-2.0
"""`uccl-ep lab`: RDMA programs on virtual NICs, through the vendors' own libraries."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated, NoReturn

import typer

from .._fetched import Missing
from ..cli.common import pick
from . import nics, root
from .run import Lab

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Run RDMA programs on virtual NICs, through the vendors' libraries.",
)


def _fail(error: Exception) -> NoReturn:
    sys.exit(f"uccl-ep lab: {error}")


@app.command()
def setup(
    renew: Annotated[bool, typer.Option("--renew", help="Fetch them again, even if they are there.")] = False,
) -> None:
    """See that there are libraries for all four NICs; fetch newer ones into the cache where the machine's are too old.

    Nothing is installed, and it needs no root: packages are Debian's, got and verified by apt.
    """
    begun = time.monotonic()
    try:
        found = root.setup(renew=renew)
    except Missing as missing:
        _fail(missing)
    where = "the machine's own" if found.root is None else found.root
    print(f"rdma-core {found.release}: {where} ({time.monotonic() - begun:.1f} s)")


@app.command("list")
def list_nics() -> None:
    """Say which NICs, variants and profiles there are, and whose libraries would drive them."""
    try:
        variants, profiles = nics.variants(), nics.profiles()
    except Missing as missing:
        _fail(missing)
    for nic, provider in root.PROVIDERS.items():
        own = [variant for variant in variants if variant.nic == nic]
        try:
            libraries = root.choose(nic)
            said = f"rdma-core {libraries.release}, {'the machine' if libraries.root is None else 'fetched'}"
        except Missing as missing:
            said = f"not here: {missing}"
        if not own:
            said = "not built in"
        print(f"{nic} (library {provider}: {said})")
        for at, variant in enumerate(own):
            print(f"  --variant {variant.name}: profile {variant.profile}{'' if at else ' (the default)'}")
    print("profiles of virtual NICs (any knob of one can be changed by --knobs: `uccl-ep conformance --help`):")
    for name, text in profiles.items():
        print(f"  --profile {name}: {text}")


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def run(
    command: Annotated[list[str], typer.Argument(metavar="PROGRAM [ARGUMENTS]", help="What to run, behind `--`.")],
    nic: Annotated[str, typer.Option(help=f"Which NICs it sees: {', '.join(root.PROVIDERS)}.")],
    count: Annotated[int, typer.Option(min=1, max=8, help="How many.")] = 1,
    variant: Annotated[str | None, typer.Option(help="Which generation: `uccl-ep lab list`.")] = None,
    profile: Annotated[str | None, typer.Option(help="What they may do: `uccl-ep lab list`.")] = None,
    knobs: Annotated[str, typer.Option(help="And what else: KNOB=VALUE,... of the virtual NIC.")] = "",
    seed: Annotated[int | None, typer.Option(min=0, help="Of what is left to chance.")] = None,
    fabric: Annotated[str | None, typer.Option(help="Programs that name the same one reach each other.")] = None,
    libraries: Annotated[str, typer.Option(help="Whose: auto, machine or root (those that setup fetched).")] = "auto",
) -> None:
    """Run a program on virtual NICs. Its exit status is the program's.

    uccl-ep lab run --nic connectx -- ibv_devinfo -v
    """
    pick(nic, root.PROVIDERS, "--nic")
    pick(libraries, root.WHOSE, "--libraries")
    try:
        lab = Lab.of(
            nic, count=count, variant=variant, profile=profile, seed=seed, fabric=fabric, knobs=knobs,
            libraries=libraries,
        )  # fmt: skip
        line = lab.command(command[0], command[1:])
        environment = lab.environment()
    except nics.BadNic as bad:
        raise typer.BadParameter(str(bad)) from None
    except Missing as missing:
        _fail(missing)
    sys.stdout.flush()
    try:
        os.execve(line[0], line, environment)
    except OSError as error:
        _fail(OSError(f"{line[0]}: {error.strerror}"))
