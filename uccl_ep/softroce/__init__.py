# SPDX-License-Identifier: Apache-2.0
"""A guest kernel with Soft-RoCE: two RDMA devices and a wire between them, on any x86-64 machine, without root.

machine.py finds what is needed of the machine, kernel.py a kernel and its modules, image.py makes of them what QEMU
boots and keeps it, guest.py boots it and brings back what a command in it did, keeper.py sees that nothing of it stays.
In the guest wire.py makes the devices, impairs the wire and counts. docs/softroce.md says what that shows.
"""

from .._fetched import Missing
from .guest import Guest, GuestDied, Outcome

__all__ = ["Guest", "GuestDied", "Missing", "Outcome"]
