# SPDX-License-Identifier: Apache-2.0
"""Which token goes to which experts: drawn, or recorded from a model.

A file is a .npz with `topk_idx` (integers; -1: no expert) and `topk_weights` (floats), both of one of these shapes:

  [tokens, k]          any number of tokens; rank r gets the r-th of `ranks` parts, as equal as they can be. With fewer
                       tokens than ranks some ranks have none.
  [ranks, tokens, k]   one part a rank; the number of ranks must be that of the run.

A token whose entries are all -1 goes nowhere and comes back as zeros. An expert may occur twice in a row.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

ZIPF_EXPONENT = 1.0


class RoutingError(ValueError):
    """The routing that was asked for cannot be had; the text says what to change."""


@dataclass(frozen=True)
class Routing:
    """Of one rank in one iteration."""

    topk_idx: npt.NDArray[np.int64]  # [tokens, k]
    topk_weights: npt.NDArray[np.float32]  # [tokens, k]


class Router:
    """Gives the routing of any rank in any iteration."""

    def __init__(self, kind: str, *, ranks: int, tokens: list[int], experts: int, topk: int, seed: int) -> None:
        self.ranks, self.experts, self.topk, self.seed = ranks, experts, topk, seed
        self._recorded: list[Routing] | None = None
        self.kind = kind
        self.tokens = tokens
        if kind not in ("uniform", "zipf"):
            self.kind = "file"
            self._recorded = load(Path(kind), ranks, experts)
            self.tokens = [len(part.topk_idx) for part in self._recorded]
            self.topk = self._recorded[0].topk_idx.shape[1]
        elif topk > experts:
            raise RoutingError(
                f"--topk {topk} of --experts {experts}: a token cannot choose more experts than there are"
            )

    def routing(self, iteration: int, rank: int) -> Routing:
        if self._recorded is not None:
            return self._recorded[rank]
        rng = np.random.default_rng([self.seed, 2, iteration, rank])
        count = self.tokens[rank]
        # Gumbel's trick: the k largest of log p + noise are k draws without replacement.
        keys = rng.gumbel(size=(count, self.experts)) + self._log_popularity(iteration)
        idx = np.argsort(-keys, axis=1, kind="stable")[:, : self.topk]
        weights = rng.random((count, self.topk), np.float32) + np.float32(0.05)
        return Routing(idx.astype(np.int64), weights / weights.sum(axis=1, keepdims=True, dtype=np.float32))

    def _log_popularity(self, iteration: int) -> npt.NDArray[np.float64]:
        if self.kind == "uniform":
            return np.zeros(self.experts)
        # The same experts are popular on all ranks: that is what makes skew hurt.
        order = np.random.default_rng([self.seed, 3, iteration]).permutation(self.experts)
        return -ZIPF_EXPONENT * np.log1p(order)


def load(path: Path, ranks: int, experts: int) -> list[Routing]:
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise RoutingError(
                    f"{path} is not a .npz file: numpy.savez(path, topk_idx=..., topk_weights=...) makes one"
                )
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in ("topk_idx", "topk_weights") if name not in archive.files]
            if missing:
                raise RoutingError(f"{path} has no array {' or '.join(missing)}, only {', '.join(archive.files)}")
            idx, weights = archive["topk_idx"], archive["topk_weights"]
        if not (isinstance(idx, np.ndarray) and isinstance(weights, np.ndarray)):
            raise ValueError("numpy gives the bytes of what is no array")
    except FileNotFoundError:
        raise RoutingError(f"no file {path}: --routing takes uniform, zipf or a .npz file") from None
    except RoutingError:
        raise
    except OSError as error:
        raise RoutingError(f"{path}: {error.strerror or error}") from error
    except (ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        # Not numpy's text: it advises to unpickle what was found.
        raise RoutingError(
            f"{path} is damaged, or topk_idx and topk_weights are not plain arrays of numbers: write it again"
        ) from error
    if idx.dtype.kind not in "iu":
        raise RoutingError(f"{path}: topk_idx holds {idx.dtype}, not integers")
    if weights.dtype.kind != "f":
        raise RoutingError(f"{path}: topk_weights holds {weights.dtype}, not floats")
    if idx.shape != weights.shape or idx.ndim not in (2, 3) or idx.shape[-1] == 0:
        raise RoutingError(
            f"{path}: topk_idx {list(idx.shape)} and topk_weights {list(weights.shape)} must both be [tokens, k] "
            "or [ranks, tokens, k]"
        )
    if idx.ndim == 3 and len(idx) != ranks:
        raise RoutingError(f"{path} is for {len(idx)} ranks: run with --ranks {len(idx)}")
    idx, weights = idx.astype(np.int64), weights.astype(np.float32)
    if idx.size and idx.min() < -1:
        raise RoutingError(f"{path}: topk_idx has {idx.min()}; -1 is no expert, and other negative numbers are nothing")
    if idx.size and idx.max() >= experts:
        enough = -(-(int(idx.max()) + 1) // ranks) * ranks
        raise RoutingError(
            f"{path}: topk_idx goes up to {idx.max()}, and --experts {experts} end at {experts - 1}: "
            f"give --experts {enough}"
        )
    if not np.isfinite(weights[idx >= 0]).all():
        raise RoutingError(f"{path}: a weight is not finite")
    parts = list(range(ranks)) if idx.ndim == 3 else None
    split_idx = [idx[rank] for rank in parts] if parts else np.array_split(idx, ranks)
    split_weights = [weights[rank] for rank in parts] if parts else np.array_split(weights, ranks)
    return [Routing(i, w) for i, w in zip(split_idx, split_weights, strict=True)]


def rows_between(routing: Routing, ranks: int, experts: int) -> npt.NDArray[np.int64]:
    """Rows that this rank sends to each rank."""
    chosen = routing.topk_idx[routing.topk_idx >= 0]
    return np.bincount(chosen // (experts // ranks), minlength=ranks)
