"""Is the position component a curve rather than a subspace? (arXiv 2505.13027 v1, Appendix C.4)

C.4 calls absolute position encoding f(g(i)), g a continuous curve on a torus and f an embedding. Any points p_0, p_1,
.. lie on such a curve, so the form alone says nothing. What can be asked is whether the positions resolve it: whether a
position's neighbours tell it (`neighbour_error`), and whether a few neighbours need fewer dimensions than points in no
order would (`curve_dimension`), though all together span many more. The tables as they are drawn are asked here, those
that models have learned among the heads' records.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from toeplens.encodings import build
from toeplens.lens.stream import curve_dimension, neighbour_error
from toeplens.papers.mathematics.records import UNIVERSAL, Record, Records, short, universal
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.contrasts import difference
from toeplens.studies.kit.verdicts import RULE, Finding, below, supporting

ENCODINGS = ("sinusoidal", "learned", "random-fixed")
WIDTHS, LENGTHS = (16, 64, 256), (24, 128, 512)
WINDOW = 8
TOLD = 0.5  # neighbour error below which neighbours explain three quarters of a position's variance
NOTHING = 1.0  # neighbour error at which neighbours explain no more than the mean of all positions
THIN = (WINDOW - 1) / 2  # dimensions: points in no order need WINDOW - 1
_SOURCE = "arXiv 2505.13027 v1, Appendix C.4"


def curve(p: Float[np.ndarray, "N D"]) -> dict[str, Any]:
    """Measures of a position table: ``neighbour_error``, ``local_rank`` (of `WINDOW` positions), ``rank``."""
    found = curve_dimension(p, window=WINDOW)
    return {"neighbour_error": short(neighbour_error(p)), "local_rank": short(found.local_rank), "rank": found.rank}


def manifold(seed: int) -> dict[str, Any]:
    """The untrained tables of `ENCODINGS`: ``tables`` has one row per encoding, width and length."""
    return {"tables": [_table(*case, seed) for case in product(ENCODINGS, WIDTHS, LENGTHS)]}


def _table(encoding: str, width: int, length: int, seed: int) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        table = build(encoding, d_model=width, num_heads=1, head_dim=width, max_len=length)
    p = table.embed(torch.zeros(1, length, width, dtype=torch.float64), torch.arange(length))[0].detach().numpy()
    return {"encoding": encoding, "width": width, "length": length, **curve(p)}


# ---- the claims ------------------------------------------------------------------------------------------------------


def _tables(records: Records, encoding: str) -> list[Record]:
    return [row for run in records.get("manifold", ()) for row in run["tables"] if row["encoding"] == encoding]


def _told(records: Records, encoding: str) -> Finding:
    rows = _tables(records, encoding)
    worst = max((row["neighbour_error"] for row in rows), default=np.nan)
    return universal(
        f"{encoding}: a position is predicted by its neighbours",
        tried=len(rows),
        violations=sum(not row["neighbour_error"] < TOLD for row in rows),
        worst=f"largest error {worst:.2f}, threshold {TOLD:g}",
    )


def _thin(records: Records, encoding: str) -> Finding:
    rows = _tables(records, encoding)
    worst = max((row["local_rank"] for row in rows), default=np.nan)
    return universal(
        f"{encoding}: {WINDOW} neighbours need few dimensions, and all positions need more",
        tried=len(rows),
        violations=sum(not row["local_rank"] <= min(THIN, row["rank"] - 1) for row in rows),
        worst=f"at most {worst:.2f} of {WINDOW - 1}, threshold {THIN:g}",
    )


def _learned(records: Records, state: str, field: str = "neighbour_error") -> list[float]:
    """One number per model with a learned table."""
    found: Sequence[Record] = [run.get(f"learned {state}", {}) for run in records.get("heads", ())]
    return [each["curve"][field] for each in found if "curve" in each]


def _stated(records: Records) -> list[Finding]:
    ranks = _learned(records, "trained", "local_rank")
    return [
        _told(records, "sinusoidal"),
        _thin(records, "sinusoidal"),
        below("a learned table after training: neighbour error", _learned(records, "trained"), TOLD),
        supporting(below(f"a learned table after training: dimensions of {WINDOW} neighbours", ranks, THIN)),
        supporting(_told(records, "random-fixed")),
    ]


def _corrected(records: Records) -> list[Finding]:
    trained, fresh = (_learned(records, state) for state in ("trained", "untrained"))
    return [
        _told(records, "sinusoidal"),
        _thin(records, "sinusoidal"),
        _untold(records, "random-fixed"),
        _untold(records, "learned"),
        below("a learned table: neighbour error after training − before", difference(trained, fresh), 0.0),
        below("a learned table after training: neighbour error", trained, NOTHING),
    ]


def _untold(records: Records, encoding: str) -> Finding:
    rows = _tables(records, encoding)
    best = min((row["neighbour_error"] for row in rows), default=np.nan)
    return universal(
        f"{encoding}, untrained: neighbours predict a position no better than the mean of all positions",
        tried=len(rows),
        violations=sum(not row["neighbour_error"] >= NOTHING for row in rows),
        worst=f"smallest error {best:.2f}, threshold {NOTHING:g}",
    )


_MEASURES = (
    f"Any points lie on some curve, so two properties are tested. First, a position is predicted by its neighbours "
    f"with an error below {TOLD:g} of its distance from the mean (three quarters of the variance; unordered points "
    f"have 1.22, and the mean of all positions has {NOTHING:g}). Second, {WINDOW} neighbours need at most {THIN:g} "
    f"dimensions for 99% of their variance, half of that of unordered points, and fewer than all positions."
)

CLAIMS: tuple[Claim[Records], ...] = (
    Claim(
        "c4-manifold",
        _SOURCE,
        "The position component in the token comes from manifold embedding rather than subspace decomposition: "
        "absolute position encoding is f(g(i)), a continuous curve.",
        f"{_MEASURES} Essential: the sinusoid has both, and the learned table of trained models has the first. {RULE}",
        _stated,
    ),
    Claim(
        "c4-manifold-corrected",
        f"{_SOURCE}, corrected",
        "The sinusoid is such a curve; random vectors and an untrained learned table are not. Training moves the "
        "neighbours of a learned table together, so they predict a position better than the mean of all positions.",
        f"{_MEASURES} {UNIVERSAL} {RULE}",
        _corrected,
    ),
)
