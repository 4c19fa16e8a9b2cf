# SPDX-License-Identifier: Apache-2.0
"""Data that gives itself away.

Every eight bytes are a hash of a key (seed, source rank, sequence, ...) and of their own position. So a byte from
another message, another offset, an earlier lap or nobody at all differs from what is expected, wherever it was cut.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def key_of(parts: Iterable[int | str]) -> int:
    """A 64-bit key of any numbers and names, the same in every process."""
    key = 0
    for part in parts:
        value = zlib.crc32(part.encode()) if isinstance(part, str) else part
        key = _mix(key ^ (value & _MASK) ^ ((value >> 64) & _MASK))
    return key


def _mix(x: int) -> int:
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def data(nbytes: int, *key: int | str) -> Bytes:
    """`nbytes` of the stream that belongs to `key`."""
    words = np.arange(1, (nbytes + 7) // 8 + 1, dtype=np.uint64)
    words *= np.uint64(_GOLDEN)
    words += np.uint64(key_of(key))
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words.view(np.uint8)[:nbytes]


def difference(got: Bytes, want: Bytes, before: Bytes | None = None) -> dict[str, object]:
    """Where two arrays differ, in terms that tell lost from torn from misplaced. `before`: what was there earlier."""
    wrong = np.flatnonzero(got != want)
    first, last = int(wrong[0]), int(wrong[-1])
    seen: dict[str, object] = {
        "bytes_wrong": int(wrong.size),
        "bytes_compared": int(want.size),
        "first": first,
        "last": last,
        "want": want[first : first + 16].tobytes().hex(),
        "got": got[first : first + 16].tobytes().hex(),
    }
    if before is not None:
        old = int(np.count_nonzero(got[wrong] == before[wrong]))
        seen["untouched"] = old
        if old == wrong.size:
            seen["meaning"] = "not written" if wrong.size > 0.99 * want.size else "written in part"
        elif old == 0:
            seen["meaning"] = "overwritten with something else"
        else:
            seen["meaning"] = "torn: part old, part foreign"
    return seen
