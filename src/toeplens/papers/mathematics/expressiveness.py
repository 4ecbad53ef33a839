"""Is RoPE's logit form more expressive than the additive one? (arXiv 2505.13027, Proposition B.2; theory section 6)

In the proposition, wanted and unwanted contents have the same offset, so the same beta_delta and the same rotation.
Then beta_delta cancels, and the free vectors absorb the rotation, an orthogonal map: both forms are equivalent. If the
signs also depend on the offset, they differ, and neither contains the other. Over all 2^M tables of signs on M places,
the solution sets of a form partition its parameter space (except for ties), so their mean volume is 2^-M for every
form. Only the number of tables with any solution can differ; it is counted here, by feasibility.

An instance is a table Y of signs, Y[a, b, delta] in {+1, -1, 0}: the logit of query content a and key content b at
offset delta = i - j must be high, must be low, or is free. C1 > C2 of the paper are a threshold c and a margin: a form
of the logit satisfies an instance if Y (L + c) > 0 wherever Y is not 0, for some parameters of the form. The additive
form is that of the proposition, without the cross terms of content and absolute position of equation 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.random import Generator, Philox
from scipy.optimize import linprog
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from toeplens.encodings.kit import rotary_frequencies
from toeplens.lens import bootstrap_means
from toeplens.papers.mathematics.statements import Experiment, Record, Records, Sizes, universal_finding
from toeplens.studies.kit.verdicts import Finding, above, below

BASE = 10000.0
TOLERANCE = 1e-7  # the solver's own tolerance: a margin up to this share of the largest coefficient is taken to be none
LEARNING_RATE = 0.05

Signs = Int[np.ndarray, "I V V D"]  # instances, query contents, key contents, offsets 0 to D - 1


def random_signs(rng: Generator, count: int, num_signs: int, *, vocabulary: int, offsets: int) -> Signs:
    """``count`` instances with random signs on ``num_signs`` random places of the table."""
    shape = (count, vocabulary, vocabulary, offsets)
    order = rng.permuted(np.tile(np.arange(vocabulary**2 * offsets), (count, 1)), axis=1).reshape(shape)
    return np.where(order < num_signs, rng.choice([-1, 1], shape), 0)


def wanted_signs(rng: Generator, count: int, pairs: int, *, vocabulary: int, offsets: int) -> Signs:
    """``pairs`` random pairs of contents are wanted, each at one random offset, and nothing else in the whole table.

    One pair is Task 1 for one head and one distance.
    """
    signs = np.full((count, vocabulary**2, offsets), -1)
    for table in signs:
        table[rng.choice(len(table), pairs, replace=False), rng.integers(0, offsets, pairs)] = 1
    return signs.reshape(count, vocabulary, vocabulary, offsets)


def additive_signs(
    rng: Generator, count: int, kind: Literal["offset", "sum", "decay"], *, vocabulary: int, offsets: int
) -> Signs:
    """The signs of an additive form, on the whole table.

    ``offset`` is beta_delta alone, ``sum`` C_ab + beta_delta, all standard normal. ``decay`` has a beta_delta that
    falls evenly from 2 to -2, as in ALiBi: each pair of contents is wanted up to a distance of its own.
    """
    contents = rng.normal(size=(count, vocabulary, vocabulary, 1)) * (kind != "offset")
    slopes = np.linspace(2, -2, offsets).reshape(1, 1, 1, -1)
    beta = slopes if kind == "decay" else rng.normal(size=(count, 1, 1, offsets))
    return np.where(contents + beta > 0, 1, -1)


@dataclass(frozen=True)
class LogitForm:
    """A form of the logit: L[a, b, delta] = Re sum over t of u_at conj(v_bt) e^(i delta theta_t), + beta_delta.

    frequencies  theta_t, one a pair of dimensions (the width is twice their number); 0 for a pair that does not turn
    bias         whether there is a free beta_delta; all frequencies 0 and a bias is the additive form
    """

    frequencies: tuple[float, ...]
    bias: bool = False

    @property
    def width(self) -> int:
        """Dimensions of a content vector."""
        return 2 * len(self.frequencies)


def additive_form(width: int) -> LogitForm:
    """<u_a, v_b> + beta_delta: the paper's relative position encoding (equation 8 with only the bias)."""
    return LogitForm((0.0,) * (width // 2), bias=True)


def rotary_form(width: int) -> LogitForm:
    """RoPE of this width, base 10000, without a bias (the paper's equation 9)."""
    return LogitForm(tuple(rotary_frequencies(width, BASE).tolist()))


def one_angle_form(width: int) -> LogitForm:
    """RoPE in which only the pair of the highest frequency (1 radian per token) rotates; the others are frozen."""
    return LogitForm((1.0,) + (0.0,) * (width // 2 - 1))


def logit_table(
    form: LogitForm, u: Float[Tensor, "*B V d"], v: Float[Tensor, "*B V d"], offsets: int
) -> Float[Tensor, "*B V V D"]:
    """The table L of content vectors ``u`` (queries) and ``v`` (keys), at offsets 0 to ``offsets`` - 1, without bias.

    The first half of a vector's d dimensions holds the real parts of its n pairs, the second the imaginary parts.
    """
    cos, sin = _cos_sin(form.frequencies, offsets, u.dtype)
    a, b = (half.unsqueeze(-2) for half in u.chunk(2, dim=-1))
    rotated = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)  # [*B, V, D, d]
    table = rotated.flatten(-3, -2) @ v.transpose(-1, -2)
    return table.unflatten(-2, (-1, offsets)).transpose(-1, -2)


@lru_cache
def _cos_sin(frequencies: tuple[float, ...], offsets: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [D, n] of all angles."""
    angles = torch.outer(torch.arange(offsets, dtype=torch.float64), torch.tensor(frequencies, dtype=torch.float64))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def best_margins(form: LogitForm, signs: Signs, *, restarts: int, steps: int, seed: int) -> Float[np.ndarray, "I"]:
    """Search for parameters that satisfy each instance: Adam on the squared hinge loss, several random starts at once.

    The content vectors are free, and so are the threshold and, in a form with a bias, beta_delta. Returns, of the best
    start, the least Y (L + c) over the root mean square of L + c, both over the instance's signs, in float64: a
    witness, so a number above 0 is certain; 0 says that no parameters were found.

    Arguments
        signs     [I, V, V, D] instances
        restarts  starts an instance
        steps     of the optimiser
        seed      of the starts
    """
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.from_numpy(signs).unsqueeze(1)
    y, mask = wanted.float(), wanted != 0
    count, size, _, offsets = signs.shape
    shape = (count, restarts, size, form.width)
    u, v = (torch.randn(shape, generator=generator).div_(form.width**0.25).requires_grad_() for _ in range(2))
    threshold = torch.zeros(count, restarts, 1, 1, 1, requires_grad=True)
    beta = torch.zeros(count, restarts, 1, 1, offsets, requires_grad=form.bias)
    optimiser = torch.optim.Adam([u, v, threshold, *([beta] if form.bias else [])], lr=LEARNING_RATE)
    for _ in range(steps):
        optimiser.zero_grad()
        shortfall = torch.relu(1 - y * (logit_table(form, u, v, offsets) + beta + threshold)) * mask
        shortfall.square().sum().backward()
        optimiser.step()
    with torch.no_grad():
        table = logit_table(form, u.double(), v.double(), offsets) + beta.double() + threshold.double()
        least = torch.where(mask, wanted * table, torch.inf).flatten(2).amin(-1)
        energy = (table.square() * mask).flatten(2).sum(-1) / mask.flatten(2).sum(-1)
        best = (least / energy.sqrt()).amax(1).numpy()
    return np.where(best > TOLERANCE, best, 0.0)


def is_additive_possible(signs: Int[np.ndarray, "V V D"]) -> bool:
    """Whether any additive form of any width satisfies the instance. Exact.

    With a content table C of full rank, C_ab + c > -beta_delta where the sign is +, and < where it is -: an order
    between the pairs (a, b) and the offsets. Numbers that keep it exist if and only if it has no cycle.
    """
    flat = signs.reshape(-1, signs.shape[-1])
    pair, offset = np.nonzero(flat)
    up = flat[pair, offset] > 0
    nodes = sum(flat.shape)
    source, target = np.where(up, len(flat) + offset, pair), np.where(up, pair, len(flat) + offset)
    graph = coo_array((np.ones(len(pair)), (source, target)), shape=(nodes, nodes))
    return connected_components(graph, directed=True, connection="strong", return_labels=False) == nodes


def is_rotary_possible(form: LogitForm, signs: Int[np.ndarray, "V V D"]) -> bool:
    """Whether a form without bias could satisfy the instance if each pair (a, b) had its own free coefficients z_t.

    Re sum of z_t e^(i delta theta_t) in place of z_t = u_at conj(v_bt): the ranks are dropped, so that False is a proof
    (up to `TOLERANCE`) that the form cannot meet the instance. True says nothing; it is also the answer where the waves
    are so nearly dependent that double precision loses their span.
    """
    flat = signs.reshape(-1, signs.shape[-1])
    angles = np.outer(np.arange(flat.shape[1]), form.frequencies)
    waves = np.concatenate((np.cos(angles), np.sin(angles)), axis=1)
    if np.linalg.cond(waves) * np.finfo(float).eps > TOLERANCE:
        return True
    waves = np.linalg.qr(waves)[0]
    pair, offset = np.nonzero(flat)
    rows = np.zeros((len(pair), len(flat), waves.shape[1]))
    rows[np.arange(len(pair)), pair] = waves[offset]
    rows = np.concatenate((rows.reshape(len(pair), -1), np.ones((len(pair), 1))), axis=1)
    return is_separable(rows * flat[pair, offset][:, None])


def is_separable(rows: Float[np.ndarray, "m p"]) -> bool:
    """Whether some w has rows @ w > 0 in all rows: the best margin of scaled rows, |w_k| <= 1, is over `TOLERANCE`."""
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    count, size = rows.shape
    solution = linprog(
        np.append(np.zeros(size), -1.0),
        A_ub=np.concatenate((-rows, np.ones((count, 1))), axis=1),
        b_ub=np.zeros(count),
        bounds=[(-1, 1)] * size + [(0, 1)],
    )
    if not solution.success:
        raise ArithmeticError(f"The linear program was not solved: {solution.message}")
    return bool(solution.x[-1] > TOLERANCE)


# ---- the experiment -------------------------------------------------------------------------------------------------

COUPLED_SHAPE = {"vocabulary": 5, "offsets": 6}  # instances that need content and offset together
RANDOM_SIZES = (10, 20, 30, 45, 60, 90, 120)  # places with a sign, of 150
WANTED_SIZES = (1, 2, 4, 6)  # pairs of contents that are wanted
PLANTED_SHAPE = {"vocabulary": 4, "offsets": 16}  # instances made from an additive form
STATED_SHAPE = {"vocabulary": 6, "offsets": 1}  # free contents at one offset, which is one of 1 to MAX_OFFSET
STATED_WIDTH, FREE_WIDTH, MAX_OFFSET = 4, 2, 5
FIXED_SIZES, FREE_SIZES, DRAW_SIZES = (100, 200, 400, 800), (24, 28, 32, 36), (1, 3, 7)


def _run_experiment(
    seed: int,
    *,
    instances: int = 12,
    widths: Sizes = (2, 4, 8, 16),
    restarts: int = 3,
    steps: int = 300,
    fixed: Sizes = FIXED_SIZES,
    draws: int = 20000,
) -> Record:
    """Which instances each form of the logit can satisfy: ``instances`` of each size of each family.

    Returns the arguments and
        stated  rows of the same-offset form: ``test`` (``fixed``: given token vectors and any bilinear form, by linear
                programming; ``free``: free content vectors; ``draws``: share of random vectors at which the wanted
                pair is above all others), ``size`` (the number of other pairs, or of signs), and the share of instances
                met by ``relative`` and by ``rotary``
        rows    one for each family, size and width: `_search_rows`
    """
    rng = Generator(Philox(seed))
    options = {"restarts": restarts, "steps": steps, "seed": seed}
    stated = _same_offset(rng, instances, options, fixed, draws)
    coupled = [("random", size, random_signs(rng, instances, size, **COUPLED_SHAPE)) for size in RANDOM_SIZES]
    coupled += [("wanted", size, wanted_signs(rng, instances, size, **COUPLED_SHAPE)) for size in WANTED_SIZES]
    kinds: tuple[Literal["offset", "sum", "decay"], ...] = ("offset", "sum", "decay")
    shape = PLANTED_SHAPE
    planted = [(kind, shape["offsets"], additive_signs(rng, instances, kind, **shape)) for kind in kinds]
    rows = []
    for width in widths:
        forms = {"additive": additive_form(width), "rotary": rotary_form(width)}
        rows += _search_rows(coupled, {**forms, "one_angle": one_angle_form(width)}, options)
        rows += _search_rows(planted, forms, options)
    return {"instances": instances, **options, "widths": list(widths), "stated": stated, "rows": rows}


def _search_rows(
    groups: Sequence[tuple[str, int, Signs]], forms: dict[str, LogitForm], options: dict[str, int]
) -> list[dict[str, Any]]:
    """Search all instances of the groups, which have one shape, as one batch, and split the results by group.

    ``constraints`` is the mean number of signs. ``means``, by name [mean over the instances, low, high] (95% paired
    bootstrap): ``bound`` (1 where some additive form of any width meets the instance, exact), ``additive``, ``rotary``,
    ``one_angle`` (1 where the search found parameters), their ``_margin``, ``possible`` (0 where RoPE cannot, proved),
    ``gain`` (rotary - bound). Counts: ``additive_met``, of these ``impossible`` (RoPE of the same width is proved
    unable) and ``open`` (neither found nor proved impossible).
    """
    signs = np.concatenate([group for _, _, group in groups])
    by_form = {name: best_margins(form, signs, **options) for name, form in forms.items()}
    satisfied = {name: margin > 0 for name, margin in by_form.items()}
    bound = np.array([is_additive_possible(table) for table in signs])
    possible = satisfied["rotary"].copy()
    for index in np.flatnonzero(~possible):
        possible[index] = is_rotary_possible(forms["rotary"], signs[index])
    lost = satisfied["additive"] & ~satisfied["rotary"]
    columns = {
        "bound": bound,
        "possible": possible,
        **satisfied,
        **{f"{name}_margin": per_instance for name, per_instance in by_form.items()},
    }
    columns["gain"] = satisfied["rotary"].astype(float) - bound
    values = np.stack([column.astype(float) for column in columns.values()], axis=1)
    rows, start = [], 0
    for family, size, group in groups:
        block = slice(start, start := start + len(group))
        low, high = bootstrap_means(values[block])
        triples = np.stack((values[block].mean(0), low, high), axis=1).tolist()
        rows.append(
            {
                "family": family,
                "size": size,
                "width": forms["rotary"].width,
                "constraints": float(np.abs(group).sum((1, 2, 3)).mean()),
                "means": dict(zip(columns, triples, strict=True)),
                "additive_met": int(satisfied["additive"][block].sum()),
                "impossible": int((lost & ~possible)[block].sum()),
                "open": int((lost & possible)[block].sum()),
            }
        )
    return rows


def _same_offset(rng: Generator, count: int, options: dict[str, int], sizes: Sizes, draws: int) -> list[dict[str, Any]]:
    """The rows of the same-offset form; R is the rotation of the instance's offset or, for the relative form, none."""
    angles = np.array(rotary_form(STATED_WIDTH).frequencies)
    rows: list[tuple[str, int, Any]] = []
    for num_others in sizes:  # is there a matrix A with x_0^T A R y_0 above x_m^T A R y_m for all m?
        satisfied = np.zeros((2, count), dtype=bool)
        for index in range(count):
            x, y = rng.normal(size=(2, num_others + 1, STATED_WIDTH))
            rotated = (y[:, ::2] + 1j * y[:, 1::2]) * np.exp(1j * rng.integers(1, MAX_OFFSET + 1) * angles)
            for form, keys in enumerate((y, np.concatenate((rotated.real, rotated.imag), axis=1))):
                products = (x[:, :, None] * keys[:, None, :]).reshape(num_others + 1, -1)
                satisfied[form, index] = is_separable(products[0] - products[1:])
        rows.append(("fixed", num_others, satisfied))
    flat = np.concatenate([random_signs(rng, count, num_signs, **STATED_SHAPE) for num_signs in FREE_SIZES])
    signs = np.zeros((*flat.shape[:-1], MAX_OFFSET + 1), dtype=int)
    np.put_along_axis(signs, rng.integers(1, MAX_OFFSET + 1, (len(flat), 1, 1, 1)), flat, axis=-1)
    forms = (additive_form(FREE_WIDTH), rotary_form(FREE_WIDTH))
    satisfied = np.stack([best_margins(form, signs, **options) > 0 for form in forms])
    rows += [
        ("free", num_signs, satisfied)
        for num_signs, satisfied in zip(FREE_SIZES, np.split(satisfied, len(FREE_SIZES), axis=1), strict=True)
    ]
    for num_others in DRAW_SIZES:  # normal content vectors: how often is the wanted pair above all others?
        normals = rng.normal(size=(2, 2, draws, num_others + 1, STATED_WIDTH // 2))
        products = (normals[0, 0] + 1j * normals[0, 1]) * (normals[1, 0] - 1j * normals[1, 1])
        phases = np.exp(1j * rng.integers(1, MAX_OFFSET + 1, (draws, 1, 1)) * angles)
        tables = np.stack((products.sum(-1).real, (products * phases).sum(-1).real))
        rows.append(("draws", num_others, tables.argmax(2) == 0))
    return [
        {"test": test, "size": size, "relative": float(satisfied[0].mean()), "rotary": float(satisfied[1].mean())}
        for test, size, satisfied in rows
    ]


# ---- its claims -----------------------------------------------------------------------------------------------------

LARGE_GAP = 0.1  # of the instances: the minimum for "much larger", and the margin for what the search misses
COUPLED_FAMILIES = {"random": "random signs", "wanted": "wanted pairs at separate offsets"}
TESTS = {
    "fixed": "given token vectors, any bilinear form",
    "free": "free content vectors",
    "draws": "share of random vectors that are a solution",
}


def _stated_gap(records: Records) -> list[Finding]:
    def difference(record: Record, test: str) -> float:
        return float(np.mean([row["rotary"] - row["relative"] for row in record["stated"] if row["test"] == test]))

    data = records["expressiveness"]
    return [
        above(f"{text}: RoPE − relative", [difference(record, test) for record in data], LARGE_GAP)
        for test, text in TESTS.items()
    ]


def _by_width(
    records: Records, family: str, narrowest: int, text: str, test: Callable[..., Finding], limit: float, *means: str
) -> list[Finding]:
    """For each width: is one mean (less another) over the sizes of a family, per seed, on the right side of a limit?"""

    def value(record: Record, width: int) -> float:
        rows = [row["means"] for row in record["rows"] if (row["family"], row["width"]) == (family, width)]
        return float(np.mean([entry[means[0]][0] - (entry[means[1]][0] if means[1:] else 0.0) for entry in rows]))

    data = records["expressiveness"]
    return [
        test(f"{text}: {COUPLED_FAMILIES[family]}, width {width}", [value(record, width) for record in data], limit)
        for width in (data[0]["widths"] if data else ())
        if width >= narrowest
    ]


def _gain(records: Records) -> list[Finding]:
    text = "RoPE (found) − additive (bound)"
    return [part for family in COUPLED_FAMILIES for part in _by_width(records, family, 4, text, above, 0.0, "gain")]


def _superset(records: Records) -> list[Finding]:
    rows = [row for record in records["expressiveness"] for row in record["rows"]]
    names = ("additive_met", "impossible", "open")
    tried, num_impossible, num_open = (sum(row[name] for row in rows) for name in names)
    widths = sorted({row["width"] for row in rows if row["impossible"]})
    statement = "RoPE satisfies every instance that the additive form of its width satisfies"
    if num_open and not num_impossible:
        return [Finding("undecided", f"{statement}: {num_open} of {tried} instances neither found nor excluded")]
    width_text = ", ".join(map(str, widths)) or "none"
    worst = f"proved impossible at widths {width_text}; {num_open} more neither found nor excluded"
    return [universal_finding(statement, tried=tried, violations=num_impossible, worst=worst)]


def _angle(family: str, records: Records) -> list[Finding]:
    gain_text, loss_text = "one angle (found) − additive (bound)", "all angles − one angle"
    return [
        *_by_width(records, family, 2, gain_text, above, 0.0, "one_angle", "bound"),
        *_by_width(records, family, 4, loss_text, below, LARGE_GAP, "rotary", "one_angle"),
    ]


expressiveness = Experiment(
    "expressiveness",
    _run_experiment,
    {
        "stated": _stated_gap,
        "gain": _gain,
        "superset": _superset,
        "angle-wanted": partial(_angle, "wanted"),  # the paper's conditions are those of Task 1
        "angle-random": partial(_angle, "random"),
    },
)
