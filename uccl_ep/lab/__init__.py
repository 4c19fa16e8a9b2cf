# SPDX-License-Identifier: Apache-2.0
"""Virtual NICs for the vendors' own libraries, and for any program that uses them: `uccl-ep lab`.

root.py finds those libraries, or fetches newer ones; nics.py asks libuccl_ep_lab.so which NICs there are; sysfs.py lays
out what a machine with them would show; run.py puts that together, cli.py runs programs on it. docs/lab.md says what
that shows.
"""

from .._fetched import Missing
from .nics import BadNic
from .run import Lab

__all__ = ["BadNic", "Lab", "Missing"]
