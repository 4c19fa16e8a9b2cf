# SPDX-License-Identifier: Apache-2.0
"""The command line, `uccl-ep`. One module a group of commands; see app.py for how they are mounted."""

from __future__ import annotations


def main() -> None:
    from .app import run

    run()
