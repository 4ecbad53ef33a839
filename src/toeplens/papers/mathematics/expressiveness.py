"""Is RoPE's logit form more expressive than the additive one? Proposition B.2, tested by feasibility.

In the proposition, wanted and unwanted contents have the same offset, so the same beta_delta and the same rotation.
Then beta_delta cancels, and the free vectors absorb the rotation, an orthogonal map: both forms are equivalent. If the
signs also depend on the offset, they differ, and neither contains the other. Over all 2^M tables of signs on M places,
the solution sets of a form partition its parameter space (except for ties), so their mean volume is 2^-M for every
form. Only the number of tables with any solution can differ; it is counted here.

The additive form is that of the proposition, without the cross terms of content and absolute position of equation 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool

from toeplens.ground import invalid
from toeplens.lens import bootstrap_means
from toeplens.papers.mathematics.feasibility import (
    Form,
    Signs,
    additive,
    additive_possible,
    additive_signs,
    one_angle,
    random_signs,
    rotary,
    rotary_possible,
    search,
    separable,
    wanted_signs,
)
from toeplens.papers.mathematics.records import UNIVERSAL, Record, Records, universal
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.verdicts import Finding, above, below, supporting

COUPLED = {"vocabulary": 5, "offsets": 6}  # instances that need content and offset together
RANDOM = (10, 20, 30, 45, 60, 90, 120)  # places with a sign, of 150
WANTED = (1, 2, 4, 6)  # pairs of contents that are wanted
PLANTED = {"vocabulary": 4, "offsets": 16}  # instances made from an additive form
STATED = {"vocabulary": 6, "offsets": 1}  # free contents at one offset, which is one of 1 to TURNS
STATED_WIDTH, FREE_WIDTH, TURNS = 4, 2, 5
FIXED, FREE, DRAWN = (100, 200, 400, 800), (24, 28, 32, 36), (1, 3, 7)
DRAWS = 20000
MUCH = 0.1  # of the instances: the minimum for "much larger", and the margin for what the search misses
NEED_BOTH = {"random": "random signs", "wanted": "wanted pairs at separate offsets"}


def expressiveness(
    seed: int, *, instances: int = 12, widths: Sequence[int] = (2, 4, 8, 16), restarts: int = 3, steps: int = 300
) -> dict[str, Any]:
    """Which instances each form of the logit can satisfy (Proposition B.2; theory section 6).

    Arguments
        seed       of the instances and of the starts
        instances  of each size of each family
        widths     dimensions of the content vectors; 2 is RoPE with one pair
        restarts   starts of the search for each instance
        steps      of each search

    Returns the arguments and
        stated  rows of the same-offset form: ``test`` (``fixed``: given token vectors and any bilinear form, by linear
                programming; ``free``: free content vectors; ``draws``: share of random vectors at which the wanted
                pair is above all others), ``size`` (the number of other pairs, or of signs), and the share of instances
                met by ``relative`` and by ``rotary``
        rows    one for each family, size and width: ``constraints`` (mean number of signs) and ``means``, by name
                [mean over the instances, low, high] (95% paired bootstrap): ``bound`` (1 where some additive form of
                any width meets the instance, exact), ``additive``, ``rotary``, ``one_angle`` (1 where the search found
                parameters; all angles but one stopped in the last), their ``_margin`` (0 where none were found),
                ``possible`` (0 where RoPE is proved unable), ``gain`` (rotary - bound); and counts: ``additive_met``,
                of these ``impossible`` (RoPE of the same width is proved unable) and ``open`` (neither found nor
                proved impossible)
    """
    for field, value in (("instances", instances), ("restarts", restarts), ("steps", steps)):
        if value < 1:
            raise invalid(field, "be at least 1", value)
    rng = np.random.Generator(np.random.Philox(seed))
    options = {"restarts": restarts, "steps": steps, "seed": seed}
    stated = [*_fixed(rng, instances), *_free(rng, instances, options), *_draws(rng)]
    coupled = [("random", size, random_signs(rng, instances, size, **COUPLED)) for size in RANDOM]
    coupled += [("wanted", size, wanted_signs(rng, instances, size, **COUPLED)) for size in WANTED]
    kinds: tuple[Literal["offset", "sum", "decay"], ...] = ("offset", "sum", "decay")
    planted = [(kind, PLANTED["offsets"], additive_signs(rng, instances, kind, **PLANTED)) for kind in kinds]
    rows = [
        row
        for width in widths
        for groups, forms in (
            (coupled, {"additive": additive, "rotary": rotary, "one_angle": one_angle}),
            (planted, {"additive": additive, "rotary": rotary}),
        )
        for row in _rows(groups, {name: form(width) for name, form in forms.items()}, options)
    ]
    return {"instances": instances, **options, "widths": list(widths), "stated": stated, "rows": rows}


def _rows(
    groups: Sequence[tuple[str, int, Signs]], forms: dict[str, Form], options: dict[str, int]
) -> list[dict[str, Any]]:
    """Search all instances of the groups, which have one shape, as one batch, and split the results by group."""
    signs = np.concatenate([group for _, _, group in groups])
    found = {name: search(form, signs, **options) for name, form in forms.items()}
    bound = np.array([additive_possible(table) for table in signs])
    possible = found["rotary"].met.copy()
    for index in np.flatnonzero(~possible):
        possible[index] = rotary_possible(forms["rotary"], signs[index])
    met = found["additive"].met
    lost = met & ~found["rotary"].met
    columns = {"bound": bound, "possible": possible} | {name: each.met.astype(float) for name, each in found.items()}
    columns |= {f"{name}_margin": each.margin for name, each in found.items()}
    columns["gain"] = columns["rotary"] - bound
    values = np.stack([column.astype(float) for column in columns.values()], axis=1)
    rows, start = [], 0
    for family, size, group in groups:
        part = slice(start, start := start + len(group))
        low, high = bootstrap_means(values[part])
        triples = np.stack((values[part].mean(0), low, high), axis=1).tolist()
        rows.append(
            {
                "family": family,
                "size": size,
                "width": forms["rotary"].width,
                "constraints": float(np.abs(group).sum((1, 2, 3)).mean()),
                "means": dict(zip(columns, triples, strict=True)),
                "additive_met": int(met[part].sum()),
                "impossible": int((lost & ~possible)[part].sum()),
                "open": int((lost & possible)[part].sum()),
            }
        )
    return rows


def _stated(test: str, size: int, relative: Bool[np.ndarray, "I"], turned: Bool[np.ndarray, "I"]) -> dict[str, Any]:
    return {"test": test, "size": size, "relative": float(relative.mean()), "rotary": float(turned.mean())}


def _fixed(rng: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """Given token vectors x, y: is there a matrix A with x_0^T A R y_0 above x_m^T A R y_m for all m, R the rotation
    of the instance's offset or, for the relative form, none?"""
    rows = []
    angles = np.array(rotary(STATED_WIDTH).frequencies)
    for others in FIXED:
        met = np.zeros((2, count), dtype=bool)
        for index in range(count):
            x, y = rng.normal(size=(2, others + 1, STATED_WIDTH))
            turned = (y[:, ::2] + 1j * y[:, 1::2]) * np.exp(1j * rng.integers(1, TURNS + 1) * angles)
            for form, keys in enumerate((y, np.concatenate((turned.real, turned.imag), axis=1))):
                products = (x[:, :, None] * keys[:, None, :]).reshape(others + 1, -1)
                met[form, index] = separable(products[0] - products[1:])
        rows.append(_stated("fixed", others, *met))
    return rows


def _free(rng: np.random.Generator, count: int, options: dict[str, int]) -> list[dict[str, Any]]:
    """Free content vectors, random signs at one offset, the same in both forms."""
    flat = np.concatenate([random_signs(rng, count, places, **STATED) for places in FREE])
    signs = np.zeros((*flat.shape[:-1], TURNS + 1), dtype=int)
    np.put_along_axis(signs, rng.integers(1, TURNS + 1, (len(flat), 1, 1, 1)), flat, axis=-1)
    found = [search(form(FREE_WIDTH), signs, **options).met.reshape(len(FREE), count) for form in (additive, rotary)]
    return [_stated("free", places, *met) for places, *met in zip(FREE, *found, strict=True)]


def _draws(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Normal content vectors, the same for both forms: how often is the wanted pair above all others at its offset?"""
    rows = []
    angles = np.array(rotary(STATED_WIDTH).frequencies)
    for others in DRAWN:
        parts = rng.normal(size=(2, 2, DRAWS, others + 1, STATED_WIDTH // 2))
        products = (parts[0, 0] + 1j * parts[0, 1]) * (parts[1, 0] - 1j * parts[1, 1])
        turns = np.exp(1j * rng.integers(1, TURNS + 1, (DRAWS, 1, 1)) * angles)
        tables = (products.sum(-1).real, (products * turns).sum(-1).real)
        rows.append(_stated("draws", others, *(table.argmax(1) == 0 for table in tables)))
    return rows


def _stated_findings(records: Records) -> list[Finding]:
    what = {
        "fixed": "given token vectors, any bilinear form",
        "free": "free content vectors",
        "draws": "share of random vectors that are a solution",
    }
    return [
        above(
            f"{text}: RoPE − relative",
            [_difference(record, test) for record in records.get("expressiveness", ())],
            MUCH,
        )
        for test, text in what.items()
    ]


def _difference(record: Record, test: str) -> float:
    return float(np.mean([row["rotary"] - row["relative"] for row in record["stated"] if row["test"] == test]))


def _by_width(records: Records, value: Callable[[Record], float], *, narrowest: int) -> list[tuple[str, list[float]]]:
    """For each family that needs both and each width: a description, and the mean over sizes per seed."""
    data = records.get("expressiveness", ())
    widths = sorted(set.intersection(*(set(record["widths"]) for record in data))) if data else []
    return [
        (
            f"{text}, width {width}",
            [
                float(np.mean([value(r) for r in record["rows"] if (r["family"], r["width"]) == (family, width)]))
                for record in data
            ],
        )
        for family, text in NEED_BOTH.items()
        for width in widths
        if width >= narrowest
    ]


def _mean(row: Record, name: str) -> float:
    return row["means"][name][0]


def _task_findings(records: Records) -> list[Finding]:
    return [
        above(f"RoPE (found) − additive (bound): {text}", values, 0.0)
        for text, values in _by_width(records, lambda row: _mean(row, "gain"), narrowest=4)
    ]


def _superset_findings(records: Records) -> list[Finding]:
    data = records.get("expressiveness", ())
    rows = [row for record in data for row in record["rows"]]
    tried, lost, left = (sum(row[name] for row in rows) for name in ("additive_met", "impossible", "open"))
    widths = sorted({row["width"] for row in rows if row["impossible"]})
    what = "RoPE satisfies every instance that the additive form of its width satisfies"
    worst = (
        f"proved impossible at widths {', '.join(map(str, widths)) or 'none'}; {left} more neither found nor excluded"
    )
    if left and not lost:
        return [Finding("undecided", f"{what}: {left} of {tried} instances neither found nor excluded")]
    return [universal(what, tried=tried, violations=lost, worst=worst)]


def _angle_findings(records: Records) -> list[Finding]:
    more = _by_width(records, lambda row: _mean(row, "one_angle") - _mean(row, "bound"), narrowest=2)
    less = _by_width(records, lambda row: _mean(row, "rotary") - _mean(row, "one_angle"), narrowest=4)
    found = [
        *((text, above(f"one angle (found) − additive (bound): {text}", values, 0.0)) for text, values in more),
        *((text, below(f"all angles − one angle: {text}", values, MUCH)) for text, values in less),
    ]
    task = NEED_BOTH["wanted"]  # the paper's conditions are Task 1's
    return [
        *(finding for text, finding in found if text.startswith(task)),
        *(supporting(finding) for text, finding in found if not text.startswith(task)),
    ]


_SOURCE = "arXiv 2505.13027 v1, Proposition B.2"

CLAIMS: tuple[Claim[Records], ...] = (
    Claim(
        "expressiveness-as-stated",
        _SOURCE,
        "With wanted and unwanted pairs at the same offset, the solution space of RoPE is much larger than that of "
        "relative position encoding.",
        f"RoPE's share of satisfied instances, or of random vectors that are a solution, exceeds the relative form's "
        f"by more than {MUCH:g}, mean over the sizes.",
        _stated_findings,
    ),
    Claim(
        "expressiveness-task",
        _SOURCE,
        "If the wanted signs depend on content and offset together, as in Task 1, RoPE satisfies more instances than "
        "the additive form.",
        "The share of instances for which a RoPE solution was found, minus the share that an additive form of any "
        "width can satisfy, mean over the sizes, is above 0 for each family and each width from 4 (width 2 has one "
        "pair and is another claim).",
        _task_findings,
    ),
    Claim(
        "expressiveness-superset",
        _SOURCE,
        "RoPE can satisfy every instance that the additive form of the same width can satisfy.",
        UNIVERSAL + " A counterexample is an instance with a solution of the additive form and a proof that RoPE has "
        "none. Without a counterexample, an instance that is neither found nor excluded leaves the claim undecided.",
        _superset_findings,
    ),
    Claim(
        "expressiveness-one-angle",
        _SOURCE,
        "RoPE only needs one significant angle to meet the conditions.",
        f"With all frequencies but the highest frozen, the share of instances with a solution is above that of any "
        f"additive form, and at most {MUCH:g} below that of all frequencies, for each width (width 2 has only one "
        f"frequency), for wanted pairs as in Task 1. Supporting: the same for random signs.",
        _angle_findings,
    ),
)
