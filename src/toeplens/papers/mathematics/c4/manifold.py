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
from toeplens.lens.stream.subspace import curve_dimension, neighbour_error
from toeplens.papers.mathematics.records import UNIVERSAL, Record, Records, short, universal
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.contrasts import difference
from toeplens.studies.kit.verdicts import RULE, Finding, below, supporting

ENCODINGS = ("sinusoidal", "learned", "random-fixed")
WIDTHS, LENGTHS = (16, 64, 256), (24, 128, 512)
WINDOW = 8
TOLD = 0.5  # the neighbours' error below which they tell three quarters of a position's variance
NOTHING = 1.0  # the error at which they tell no more than the mean of all positions does
THIN = (WINDOW - 1) / 2  # dimensions: points in no order need WINDOW - 1
_SOURCE = "arXiv 2505.13027 v1, Appendix C.4"


def curve(p: Float[np.ndarray, "N D"]) -> dict[str, Any]:
    """What is asked of a table of positions: ``neighbour_error``, ``local_rank`` (of `WINDOW` positions), ``rank``."""
    found = curve_dimension(p, window=WINDOW)
    return {"neighbour_error": short(neighbour_error(p)), "local_rank": short(found.local_rank), "rank": found.rank}


def manifold(seed: int) -> dict[str, Any]:
    """The tables of `ENCODINGS` as they are drawn: ``tables``, a row for each encoding, width and length."""
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
        f"{encoding}: a position's neighbours tell it",
        tried=len(rows),
        violations=sum(not row["neighbour_error"] < TOLD for row in rows),
        worst=f"error up to {worst:.2f}, bar {TOLD:g}",
    )


def _thin(records: Records, encoding: str) -> Finding:
    rows = _tables(records, encoding)
    worst = max((row["local_rank"] for row in rows), default=np.nan)
    return universal(
        f"{encoding}: {WINDOW} neighbours need few dimensions, and all positions more",
        tried=len(rows),
        violations=sum(not row["local_rank"] <= min(THIN, row["rank"] - 1) for row in rows),
        worst=f"up to {worst:.2f} of {WINDOW - 1}, bar {THIN:g}",
    )


def _learned(records: Records, state: str, field: str = "neighbour_error") -> list[float]:
    """A number a model with a learned table."""
    found: Sequence[Record] = [run.get(f"learned {state}", {}) for run in records.get("heads", ())]
    return [each["curve"][field] for each in found if "curve" in each]


def _stated(records: Records) -> list[Finding]:
    ranks = _learned(records, "trained", "local_rank")
    return [
        _told(records, "sinusoidal"),
        _thin(records, "sinusoidal"),
        below("a learned table after training: the neighbours' error", _learned(records, "trained"), TOLD),
        supporting(below(f"it: dimensions that {WINDOW} neighbours need", ranks, THIN)),
        supporting(_told(records, "random-fixed")),
    ]


def _corrected(records: Records) -> list[Finding]:
    trained, fresh = (_learned(records, state) for state in ("trained", "untrained"))
    return [
        _told(records, "sinusoidal"),
        _thin(records, "sinusoidal"),
        _untold(records, "random-fixed"),
        _untold(records, "learned"),
        below("a learned table: the neighbours' error after training, less before", difference(trained, fresh), 0.0),
        below("a learned table after training: the neighbours' error", trained, NOTHING),
    ]


def _untold(records: Records, encoding: str) -> Finding:
    rows = _tables(records, encoding)
    best = min((row["neighbour_error"] for row in rows), default=np.nan)
    return universal(
        f"{encoding}, as drawn: a position's neighbours tell no more of it than the mean of all",
        tried=len(rows),
        violations=sum(not row["neighbour_error"] >= NOTHING for row in rows),
        worst=f"error from {best:.2f} on, bar {NOTHING:g}",
    )


_MEASURES = (
    f"Any points lie on some curve; asked is whether neighbours tell a position, with an error below {TOLD:g} of its "
    f"distance from the mean (three quarters of the variance; points in no order have 1.22, and {NOTHING:g} is no more "
    f"than the mean tells), and whether {WINDOW} neighbours need at most {THIN:g} dimensions for 99% of their "
    f"variance, half of what points in no order do, and fewer than all positions."
)

CLAIMS: tuple[Claim[Records], ...] = (
    Claim(
        "c4-manifold",
        _SOURCE,
        "The position component in the token comes from manifold embedding rather than subspace decomposition: "
        "absolute position encoding is f(g(i)), a continuous curve.",
        f"{_MEASURES} Essential are the sinusoid, by both, and the table that models learn, by the first. {RULE}",
        _stated,
    ),
    Claim(
        "c4-manifold-corrected",
        f"{_SOURCE}, corrected",
        "The sinusoid is such a curve; random vectors, and a learned table as it is drawn, are none. Training draws a "
        "learned table's neighbours together, so that they tell more of a position than the mean does.",
        f"{_MEASURES} {UNIVERSAL} {RULE}",
        _corrected,
    ),
)
