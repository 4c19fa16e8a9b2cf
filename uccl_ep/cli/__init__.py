# SPDX-License-Identifier: Apache-2.0
"""The command line, `uccl-ep`. One module a group of commands; see app.py for how they are mounted."""

from __future__ import annotations

import signal


def main() -> None:
    # Loading what a command needs takes a while in which Ctrl-C has nothing to tell: then it ends the process as it
    # ends any program, by the signal. Whoever ignores it (a shell's background job) goes on ignoring it.
    loading = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if loading:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .app import run

    if loading:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
