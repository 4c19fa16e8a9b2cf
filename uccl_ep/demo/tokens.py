# SPDX-License-Identifier: Apache-2.0
"""Tokens, experts and the reference: what is computed, without a word about how rows travel.

bf16 is kept as uint16, the upper half of a float32. Everything is a function of (seed, iteration, rank), so any process
can compute what any other has, and the reference needs no communication at all.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bf16 = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]
Index = npt.NDArray[np.int64]

NAN = np.uint16(0x7FC0)
# Exponents of 2^-10 .. 2^6: sums of products stay finite, and mantissas take every value.
_EXPONENTS = (117, 134)


def widen(values: Bf16) -> F32:
    return (values.astype(np.uint32) << 16).view(np.float32)


def round_to_bf16(values: F32) -> Bf16:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    rounded[np.isnan(values)] = NAN
    return rounded


def tokens(seed: int, iteration: int, rank: int, count: int, hidden: int) -> Bf16:
    rng = np.random.default_rng([seed, 1, iteration, rank])
    bits = rng.integers(0, 1 << 16, (count, hidden), dtype=np.uint16)
    low, high = _EXPONENTS
    exponent = low + ((bits >> 7) & 0xFF) % (high - low)
    return ((bits & 0x807F) | (exponent << 7)).astype(np.uint16)


def apply_experts(rows: Bf16, experts: Index) -> Bf16:
    """Row i through expert experts[i]: a scale by a power of two and an offset, so that experts can be told apart."""
    scale = np.exp2(experts % 7 - 3).astype(np.float32)
    offset = (experts % 61).astype(np.float32) / np.float32(16)
    results = np.empty_like(rows)
    for part in _parts(len(rows)):
        results[part] = round_to_bf16(widen(rows[part]) * scale[part, None] + offset[part, None])
    return results


def combine(rows: Bf16, where: Index, topk_weights: F32) -> Bf16:
    """Token i is the sum of rows[where[i, k]] by weight, in float32 and in the order of k. -1 takes no part."""
    results = np.empty((len(where), rows.shape[1]), np.uint16)
    for part in _parts(len(where)):
        total = np.zeros(results[part].shape, np.float32)
        for row, weight in zip(where[part].T, topk_weights[part].T, strict=True):
            chosen = row >= 0
            total[chosen] += widen(rows[row[chosen]]) * weight[chosen, None]
        results[part] = round_to_bf16(total)
    return results


def reference(x: Bf16, topk_idx: Index, topk_weights: F32) -> Bf16:
    """What a rank must get back for its tokens."""
    where = np.full(topk_idx.shape, -1)
    token, k = np.nonzero(topk_idx >= 0)
    where[token, k] = np.arange(len(token))
    return combine(apply_experts(x[token], topk_idx[token, k]), where, topk_weights)


def _parts(count: int) -> list[slice]:
    """So few rows at a time that they stay in a cache."""
    return [slice(begin, begin + 16) for begin in range(0, count, 16)]
