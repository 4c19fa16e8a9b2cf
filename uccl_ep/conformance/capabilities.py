# SPDX-License-Identifier: Apache-2.0
"""The promises of a NIC, by name: what a case may require and what the scorecard shows."""

from __future__ import annotations

from typing import Any

# Bit of uccl_ep_caps.flags, name, what is promised. The order is the header's.
FLAGS: tuple[tuple[int, str, str], ...] = (
    (0, "order_write_write", "writes to one peer become visible in order"),
    (1, "order_write_atomic", "an atomic is applied after earlier writes are visible"),
    (2, "order_write_imm", "an immediate arrives after earlier writes are visible"),
    (3, "atomic_add64", "64-bit add"),
    (4, "atomic_coherent", "adds are atomic against all NICs and CPUs of the target"),
    (5, "completes_in_order", "completions of a peer come in posting order"),
    (6, "unsignalled", "operations without a completion of their own"),
    (7, "no_duplicates", "bytes are placed once, never after the completion"),
    (8, "error_stops", "nothing behind an operation that was not executed is"),
    (9, "imm_needs_receive", "an immediate takes a receive credit (a duty)"),
    (10, "host_memory", "registers host memory of the caller"),
    (11, "cuda_memory", "registers CUDA memory"),
    (12, "rocm_memory", "registers ROCm memory"),
    (13, "dmabuf", "registers dmabuf memory"),
    (14, "own_memory", "allocates memory of its own"),
    (15, "deferred_doorbell", "may leave the doorbell to the next submit"),
    (16, "peer_events", "reports dead peers without traffic"),
    (17, "signals_strict", "words and payload in one device's memory, strictly ordered"),
    (18, "fence_delivered", "a fence waits for delivered writes"),
    (19, "read_flushes", "a read makes earlier writes of its endpoint visible"),
    (20, "visible_on_request", "a completion that is raised to visible for the asking"),
    (21, "imm_visible", "behind an immediate its own bytes are visible"),
    (22, "emulated_memory", "registers memory of the emulated accelerator"),
    (23, "flush_local", "a target can make what has arrived visible"),
    (24, "device_signals", "adds to words in device memory, in order behind what it writes there"),
)
LIMITS = (
    "max_message_bytes",
    "max_inflight_bytes",
    "max_region_bytes",
    "max_inflight_peer",
    "max_inflight_endpoint",
    "max_batch",
    "max_endpoints",
    "max_peers",
    "max_inline_bytes",
    "write_alignment",
    "immediate_bits",
    "responder_atomics",
    "adding_nics",
    "max_receives",
)
COMPLETION_LEVELS = ("transmitted", "delivered", "visible")
# Also to be required by cases: a completion at least as strong as this, and a heap that is not staged.
REACHED = "heap_reached"
NAMES = frozenset(name for _, name, _ in FLAGS) | {f"completion_{level}" for level in COMPLETION_LEVELS} | {REACHED}


def describe(info: Any) -> dict[str, Any]:
    """The promises in a CommInfo, as plain data: {"flags": {...}, "completion_level": ..., "limits": {...}}."""
    caps = info.device.caps
    flags = int(caps.flags)
    return {
        "completion_level": COMPLETION_LEVELS[int(caps.completion_level)],
        "flags": {name: bool(flags >> bit & 1) for bit, name, _ in FLAGS},
        "limits": {name: int(getattr(caps, name)) for name in LIMITS},
        "staged": bool(info.staged),
    }


def promised(caps: dict[str, Any], name: str) -> bool:
    if name == REACHED:
        return not caps["staged"]
    if name.startswith("completion_"):
        level = name.removeprefix("completion_")
        return COMPLETION_LEVELS.index(caps["completion_level"]) >= COMPLETION_LEVELS.index(level)
    return bool(caps["flags"][name])
