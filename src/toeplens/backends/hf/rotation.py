"""A rotary encoding, identified from queries and keys before and after it, and from the model's table of cosines."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, permutations, product
from typing import Any

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from toeplens.backends.hf.model import InterfaceCall, Observer, observing, tolerance
from toeplens.backends.hf.trace import ProductTracer, TracedTensor, split_heads
from toeplens.encodings.rotary import Pairing
from toeplens.lens.kit.terms import NotSeparable, index_of
from toeplens.utils.machine import is_out_of_memory

_TEST_POSITIONS = 32  # positions on which pairings of dimensions are tested
_SCREEN_POSITIONS = 3  # positions on which most pairings are ruled out
_ROUNDINGS = 4  # number of roundings, each by one unit, of a multiplied number

Layout = tuple[Pairing, Int[Tensor, "n 2"], Int[Tensor, "n 2"]]
BeforeAfter = list[tuple[Float[Tensor, "B _H N d"], Float[Tensor, "B _H N d"]]]  # queries and keys, before and after


def find_layouts(qk: BeforeAfter, allowed: float, count: int | None = None) -> Iterator[Layout]:
    """Pairings, and the dimensions of each pair before and after, that fit where most is rotated; likeliest first.

    Dimensions that are 0 in all queries and keys do not change, but may still be rotated. So the rotated part is any
    range in which the changed dimensions form pairs, with as few nonzero unchanged dimensions as possible. Rotated
    numbers may differ by ``allowed`` of the largest. Raises `NotSeparable` if nothing changes.
    """
    is_changed = _is_nonzero(*(before - after for before, after in qk))
    if not bool(is_changed.any()):
        raise NotSeparable("rotation: it does not change queries and keys.")
    is_nonzero = _is_nonzero(*(x for before_after in qk for x in before_after))
    sizes = (_SCREEN_POSITIONS, _TEST_POSITIONS)
    parts = [[(b[:, :, -size:].double(), a[:, :, -size:].double()) for b, a in qk] for size in sizes]
    for name, start, number in _candidates(is_changed, is_nonzero):
        if count in (None, number):
            half = start + torch.arange(2 * number, device=is_changed.device).view(2, -1).T
            adjacent = start + torch.arange(2 * number, device=is_changed.device).view(-1, 2)
            # half apart, adjacent, or adjacent before and half apart after
            pairs, pairs_after = half if name == "half" else adjacent, adjacent if name == "adjacent" else half
            for sample in parts:  # the best rotation of each pair at each position, equal for all heads
                before_after = [(_split(before, pairs), _split(after, pairs_after)) for before, after in sample]
                largest = max(float(c.square().addcmul(d, d).max()) for _, (c, d) in before_after) ** 0.5
                if not _error(ratio(before_after), before_after) / largest <= allowed:
                    break
            else:
                yield "half" if name == "half" else "interleaved", pairs, pairs_after


def _candidates(is_changed: Bool[Tensor, "d"], is_nonzero: Bool[Tensor, "d"]) -> list[tuple[str, int, int]]:
    """Layout, first dimension and number of pairs, likeliest first; more dimensions may be rotated than changed, as in
    low precision the slowest pairs may not show."""
    indices, width = is_changed.nonzero().flatten().tolist(), len(is_changed)
    first, end = indices[0], indices[-1] + 1
    lowest = 1 + max([-1, *is_nonzero[:first].nonzero().flatten().tolist()])
    unchanged = [0, *(is_nonzero & ~is_changed).cumsum(0).tolist()]  # nonzero unchanged dimensions before this one
    ranked = []
    for start in range(first, lowest - 1, -1):
        for count in range((end - start + 1) // 2, (width - start) // 2 + 1):
            edges = (start == 0) + (start + 2 * count == width)
            rank = (unchanged[start + 2 * count] - unchanged[start], -edges, first - start, count)
            ranked.append((rank, start, count))
    return [(name, start, count) for _, start, count in sorted(ranked) for name in ("half", "adjacent", "sorted")]


def _is_nonzero(*parts: Float[Tensor, "*B d"]) -> Bool[Tensor, "d"]:
    """Which dimensions are not 0 everywhere."""
    return torch.stack([x.abs().flatten(0, -2).amax(0) != 0 for x in parts]).any(0)


Split = tuple[Float[Tensor, "B H N n"], Float[Tensor, "B H N n"]]  # the first and the second dimension of each pair


def _split(x: Float[Tensor, "B H N d"], pairs: Int[Tensor, "n 2"]) -> Split:
    """The first and the second dimension of each pair; views if they are evenly spaced."""
    first, second = (x[..., index_of(dimensions)] for dimensions in pairs.unbind(-1))
    return first, second


def ratio(parts: list[tuple[Split, Split]]) -> Complex[Tensor, "B 1 N n"]:
    """The factor of each pair at each position, by least squares over the heads of queries and keys."""
    sums = []
    for (a, b), (c, d) in parts:
        terms = (a.square().addcmul_(b, b), (a * c).addcmul_(b, d), (a * d).addcmul_(b, c, value=-1))
        sums.append(torch.stack([x.sum(1, keepdim=True) for x in terms]).double())
    size, real, imaginary = torch.stack(sums).sum(0)
    return torch.complex(real, imaginary) / size.clamp_min(torch.finfo(torch.float64).tiny)


def _error(factors: Complex[Tensor, "B 1 N n"], parts: list[tuple[Split, Split]]) -> float:
    """The largest difference of factors times the pairs before from those after."""
    errors = []
    for (a, b), (c, d) in parts:
        cos, sin = factors.real.to(a.dtype), factors.imag.to(a.dtype)
        first = torch.addcmul(c, a, cos, value=-1).addcmul_(b, sin)
        second = torch.addcmul(d, a, sin, value=-1).addcmul_(b, cos, value=-1)
        errors.append(first.square_().addcmul_(second, second).max())
    return float(torch.stack(errors).max().sqrt())


def as_complex(x: Float[Tensor, "*B d"], pairs: Int[Tensor, "n 2"]) -> Complex[Tensor, "*B n"]:
    """Each pair as a complex number."""
    first, second = (x[..., index_of(dimensions)] for dimensions in pairs.unbind(-1))
    return torch.complex(first, second)


def undo_rotation(final: Tensor, rotations: list[tuple[Tensor, Tensor]]) -> Tensor | None:
    """Queries or keys with one of these rotations of some of their dimensions undone; None if they contain none.

    The rotated tensor may have been multiplied afterwards by a number per token and head, as by a norm without weights.
    Such a factor commutes with the rotation, so it is applied to the result.
    """
    heads, tokens, full = final.shape[1:]
    candidates = [(x, y) for x, y in reversed(rotations) if y.ndim == 4 and y.numel()]
    candidates = [(x.transpose(1, axis), y.transpose(1, axis)) for x, y in candidates for axis in (1, 2)]
    for exact in (True, False):
        for x, y in candidates:
            groups, width = y.shape[1], y.shape[-1]
            if y.shape[::2] != (len(final), tokens) or heads % groups or width > full:
                continue
            # which rotated head each head may have: one after another, or each several times in a row
            index = torch.arange(heads, device=final.device)
            orders: list[Any] = [index % groups, *([] if groups == 1 else [index // (heads // groups)])]
            orders = [slice(None)] if groups == heads else orders
            for start, order in product(dict.fromkeys((0, full - width)), orders):
                if (factor := _factor(final[..., start : start + width], y[:, order], exact)) is not None:
                    restored = final.clone()
                    restored[..., start : start + width] = x[:, order] if exact else factor * x[:, order]
                    return restored
    return None


def _factor(final: Tensor, rotated: Tensor, exact: bool) -> Tensor | float | None:
    """The number per token and head that maps the second to the first; None if the rest is more than rounding."""
    if exact:
        return 1.0 if torch.equal(final, rotated.to(final.dtype)) else None
    x, y = final.double(), rotated.double()
    factor = (x * y).sum(-1, keepdim=True) / y.square().sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    error = (factor * y - x).abs().amax(-1)
    return factor if bool((error <= _ROUNDINGS * torch.finfo(final.dtype).eps * x.abs().amax(-1)).all()) else None


_ANGLE_ROUNDING = 2.0**-23  # models compute their angles in float32, whatever their own dtype
_MAX_TOKENS = 256  # tokens of a long sequence used to determine a rotation
_MAGNITUDE_SPREAD = 0.05  # relative spread of numbers of equal size, rounded in any precision
_FREQUENCY_TOLERANCE = 1e-3  # allowed relative difference of two estimates of a frequency, besides rounding


@dataclass(frozen=True)
class Rotation:
    """A rotation R_i of pairs of dimensions, by an angle linear in the position i: R_i R_j^H depends only on i - j.

    A pair, as a complex number x, becomes m e^(iota (i theta + c)) x; c is equal for queries and keys, so it cancels in
    their products.

    In some models all queries or all keys are 0 in some pairs, so nothing can be measured there. Such a pair has the
    values of the model's own table of cosines; without a table it is left out, as it does not contribute to the logits.

    pairing      ``interleaved`` or ``half``: how the pairs are arranged in the rotated part
    pairs        [n, 2] the dimensions of each pair, before the rotation
    after        [n, 2] the dimensions after it; equal except for models that reorder while they rotate
    frequencies  [n] theta, radians per position; determined from the angles, so known only modulo 2 pi
    magnitudes   [n] m; 1 unless the model scales while it rotates
    dead         [n] whether the pair does not contribute to logits: all its queries are 0, or all its keys
    tabled       [n] whether frequency and magnitude are from the model's table, as the pair is 0, or in low precision
                 too slow to change
    error        largest difference of this rotation's output from the model's own queries and keys, relative to the
                 largest of those
    """

    pairing: Pairing
    pairs: Int[Tensor, "n 2"]
    after: Int[Tensor, "n 2"]
    frequencies: Float[Tensor, "n"]
    magnitudes: Float[Tensor, "n"]
    dead: Bool[Tensor, "n"]
    tabled: Bool[Tensor, "n"]
    error: float


def find_rotation(
    q: tuple[Float[Tensor, "B H N d"], Float[Tensor, "B H N d"]],
    k: tuple[Float[Tensor, "B G N d"], Float[Tensor, "B G N d"]],
    positions: Int[Tensor, "_B N"],
    rounding: torch.dtype = torch.float64,
    other_inputs: Iterable[Tensor] = (),
) -> Rotation:
    """The rotation that maps the first of each two tensors to the second.

    For long sequences it is determined from some tokens and then tested on all.

    Arguments
        q, k          before and after the rotation
        positions     of the tokens, for all sequences or for each
        rounding      a coarser dtype that queries and keys were rounded to before, if any
        other_inputs  of the rotation; the model's table of e^(iota angle) per token among them (`_tables`) is used if
                      it has the measured frequencies

    Raises `NotSeparable` if they are not related by one angle per position for each pair of dimensions.
    """
    tokens = q[0].shape[2]
    if tokens < 2:
        raise NotSeparable(f"rotation: it needs at least 2 tokens, got {tokens}.")
    rounding_error = max(tolerance(q[1].dtype), tolerance(rounding))
    sample, near = torch.arange(tokens, device=positions.device), _MAX_TOKENS // 2
    if tokens > 2 * _MAX_TOKENS and bool((positions[:, :near].diff(dim=1) == 1).all()):
        later = torch.linspace(near, tokens - 1, _MAX_TOKENS - near, dtype=torch.float64, device=positions.device)
        sample = torch.cat((sample[:near], later.long()))  # the first ones, others to the last
    dtype = torch.promote_types(q[0].dtype, torch.float32)
    whole = [(before.to(dtype), after.to(dtype)) for before, after in (q, k)]
    qk = whole if len(sample) == tokens else [(before[:, :, sample], after[:, :, sample]) for before, after in whole]
    rotation, allowed = None, rounding_error
    tables = [table[:, sample] for table in _tables(other_inputs, tokens)]
    for reading, table in _readings(qk, tables, positions[:, sample], rounding_error):
        rotation = reading.rotation(table, whole, positions)
        allowed = rounding_error + _ANGLE_ROUNDING * float((positions.max() * rotation.frequencies.abs()).max())
        if rotation.error <= allowed:
            return rotation
    if rotation is None:
        raise NotSeparable("rotation: it rotates neither adjacent pairs of dimensions nor pairs half apart.")
    later = f"{rotation.error:.1e} of the largest query or key, but rounding explains only {allowed:.1e}"
    raise NotSeparable(f"rotation: it is not one angle per position and pair of dimensions. The error is {later}.")


@dataclass(frozen=True)
class _Angles:
    """Frequency, start angle of each sequence, and magnitude, for each pair."""

    frequencies: Float[Tensor, "n"]
    starts: Float[Tensor, "B n"]
    magnitudes: Float[Tensor, "n"]

    @classmethod
    def of(cls, factors: Complex[Tensor, "B N n"], positions: Int[Tensor, "B N"]) -> _Angles:
        """From the factors of each pair; 0 where they are not known, as queries and keys are 0."""
        frequencies, starts = fit_angles(factors, positions)
        inverse = phasor(-positions.unsqueeze(-1) * frequencies - starts.unsqueeze(1))
        count = (factors != 0).sum((0, 1)).clamp_min(1)
        return cls(frequencies, starts, (factors * inverse).real.sum((0, 1)) / count)


class _LayoutReading:
    """What queries and keys before and after show for a layout: their angles, and which pairs changed."""

    def __init__(self, qk: BeforeAfter, layout: Layout, positions: Int[Tensor, "B N"]) -> None:
        self.pairing: Pairing = layout[0]
        _, self.pairs, self.pairs_after = layout
        self.angles = _Angles.of(ratio(self._split(qk)).squeeze(1), positions)
        before, after = (index_of(pairs.T.flatten()) for pairs in (self.pairs, self.pairs_after))
        self.is_changed = _is_nonzero(*(y[..., after] - x[..., before] for x, y in qk)).view(2, -1).any(0)

    def _split(self, qk: BeforeAfter) -> list[tuple[Split, Split]]:
        return [(_split(before, self.pairs), _split(after, self.pairs_after)) for before, after in qk]

    def agreeing_angles(
        self, table: Complex[Tensor, "_B N n"], positions: Int[Tensor, "B N"], rounding_error: float
    ) -> _Angles | None:
        """A table's values for each pair, if it agrees with the measured values of those that changed."""
        if len(table) not in (1, len(self.angles.starts)):
            return None
        table = table.to(positions.device)
        for angles in (_Angles.of(factors, positions) for factors in (table, table.conj())):
            difference = phasor(angles.frequencies - self.angles.frequencies).angle().abs()
            error = torch.maximum(difference, (angles.magnitudes - self.angles.magnitudes).abs())
            allowed = rounding_error + _FREQUENCY_TOLERANCE * self.angles.frequencies.abs()
            if bool((error <= allowed)[self.is_changed].all()):
                return angles
        return None

    def rotation(self, table: _Angles | None, qk: BeforeAfter, positions: Int[Tensor, "B N"]) -> Rotation:
        """The rotation, tested on all tokens, with a table's values for unchanged pairs; without one, only pairs that
        are not 0."""
        parts = self._split(qk)
        is_zero = ~torch.stack(
            [_is_nonzero(x)[self.pairs].any(-1) | _is_nonzero(y)[self.pairs_after].any(-1) for x, y in qk]
        )
        is_tabled = torch.zeros_like(self.is_changed) if table is None else ~self.is_changed
        source = vars(self.angles) if table is None else vars(table)
        angles = _Angles(*(torch.where(is_tabled, source[name], x) for name, x in vars(self.angles).items()))
        factors = angles.magnitudes * phasor(positions.unsqueeze(-1) * angles.frequencies + angles.starts.unsqueeze(1))
        kept_pairs = ~is_zero.all(0) if table is None else torch.ones_like(self.is_changed)
        return Rotation(
            pairing=self.pairing,
            pairs=self.pairs[kept_pairs],
            after=self.pairs_after[kept_pairs],
            frequencies=angles.frequencies[kept_pairs],
            magnitudes=angles.magnitudes[kept_pairs],
            dead=is_zero.any(0)[kept_pairs],
            tabled=(is_tabled & (is_zero.all(0) | (angles.frequencies != self.angles.frequencies)))[kept_pairs],
            error=_error(factors.unsqueeze(1), parts) / max(float(y.abs().max()) for _, y in qk),
        )


def _readings(
    qk: BeforeAfter, tables: Sequence[Complex[Tensor, "_B N n"]], positions: Int[Tensor, "B N"], rounding_error: float
) -> Iterator[tuple[_LayoutReading, _Angles | None]]:
    """The measurements for each layout with each table that agrees; the last one without a table."""
    for table in (*tables, None):
        for layout in find_layouts(qk, rounding_error, None if table is None else table.shape[-1]):
            reading = _LayoutReading(qk, layout, positions)
            agreeing = None if table is None else reading.agreeing_angles(table, positions, rounding_error)
            if table is None or agreeing is not None:
                yield reading, agreeing
                break


def _tables(tensors: Iterable[Tensor], tokens: int) -> list[Complex[Tensor, "_B N n"]]:
    """Candidates for tables of e^(iota angle) per token and pair: complex ones, two real ones, the halves of one."""
    rows = [table for x in tensors if (table := _rows(x, tokens)) is not None]
    real = [x.double() for x in rows if x.is_floating_point()]
    tables = [x.to(torch.complex128) for x in rows if x.is_complex()]
    tables += [torch.complex(x, y) for x, y in permutations(real, 2) if x.shape == y.shape]
    tables += [torch.complex(*pair) for x in real if x.shape[-1] % 2 == 0 for pair in permutations(x.chunk(2, -1))]
    sizes = [x.abs().flatten(0, 1).aminmax(dim=0) for x in tables]  # each column has constant magnitude
    is_constant = [bool((high - low <= _MAGNITUDE_SPREAD * high).all()) for low, high in sizes]
    tables = list(compress(tables, is_constant))
    for number, x in enumerate(tables):  # one column per pair, not per dimension
        halves = [x.chunk(2, -1), (x[..., ::2], x[..., 1::2])] if x.shape[-1] % 2 == 0 else []
        tables[number] = next((half for half, other_half in halves if torch.equal(half, other_half)), x)
    return tables


def _rows(x: Tensor, tokens: int) -> Tensor | None:
    """[B or 1, N, m] from a tensor with such rows, whatever its dimensions of size 1."""
    lead = [size for size in x.shape[:-1] if size != 1]
    if x.ndim < 2 or x.shape[-1] == 0 or lead[-1:] != [tokens] or len(lead) > 2:
        return None
    return x.detach().reshape(-1, tokens, x.shape[-1])


def fit_angles(
    ratio: Complex[Tensor, "B N n"], positions: Int[Tensor, "B N"]
) -> tuple[Float[Tensor, "n"], Float[Tensor, "B n"]]:
    """Slope and start of each sequence, of the angles as a function of position; a ratio of 0 has no angle."""
    is_next = (positions.diff(dim=1) == 1).unsqueeze(-1)
    if not is_next.any():
        raise NotSeparable("rotation: no two consecutive tokens are one position apart.")
    slope = ((ratio[:, 1:] * ratio[:, :-1].conj()) * is_next).sum((0, 1)).angle()
    # neighbours give the angle up to rounding; refine by least squares over distances that double each time
    distance = (positions - positions[:, :1]).abs().amax(0)
    reach = 2 * max(1, int((distance.diff() == 1).sum()))
    while reach < int(distance.max()):
        is_near = distance <= reach
        if int(is_near.sum()) > 1:
            slope = slope + _fit_residual(ratio[:, is_near], positions[:, is_near], slope)[0]
        reach *= 2
    correction, start = _fit_residual(ratio, positions, slope)
    return slope + correction, start


def _fit_residual(
    ratio: Complex[Tensor, "B N n"], positions: Int[Tensor, "B N"], slope: Float[Tensor, "n"]
) -> tuple[Float[Tensor, "n"], Float[Tensor, "B n"]]:
    """The least-squares correction of a slope, if less than half a turn over all positions; and the starts."""
    is_known = (ratio != 0).double()
    count = is_known.sum(1, keepdim=True).clamp_min(1)
    centres = positions.double().unsqueeze(-1)
    mean = (is_known * centres).sum(1, keepdim=True) / count
    residual = ratio * phasor(-centres * slope)
    start = residual.sum(1, keepdim=True).angle()
    residual_angles = is_known * (residual * phasor(-start)).angle()
    distance = is_known * (centres - mean)
    correction = (distance * residual_angles).sum((0, 1)) / distance.square().sum((0, 1)).clamp_min(1e-300)
    start = start + residual_angles.sum(1, keepdim=True) / count - correction * mean
    return correction, start.squeeze(1)


def phasor(angles: Float[Tensor, "*B"]) -> Complex[Tensor, "*B"]:
    """e^(iota angle)."""
    return torch.polar(torch.ones_like(angles), angles)


@dataclass(eq=False)
class _QueryKeyCapture(Observer):
    """Captures queries and keys of the first sequence, then stops the module."""

    joins_calls = True
    batch: int
    queries_keys: tuple[Tensor, Tensor] | None = None

    def attend(self, call: InterfaceCall) -> Any:
        self._capture(call.q, call.k)

    def on_traced_attention(self, traced: TracedTensor, values: Tensor, out: Tensor) -> None:
        self._capture(split_heads(traced.left, self.batch), split_heads(traced.right, self.batch).transpose(-2, -1))

    def _capture(self, q: Tensor, k: Tensor) -> None:
        self.queries_keys = q[:1].clone(), k[:1].clone()
        raise RuntimeError("queries and keys are captured")


def capture_equal_tokens(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], states: Tensor, axis: int, batch: int
) -> tuple[Tensor, Tensor] | None:
    """q [1, H, N, d] and k [1, G, N, d] of the first sequence, as they enter their product; None if there is none.

    Before its own call, the module runs up to its product on the same input, but with the states of the last token at
    every position (along ``axis``). Any difference between positions is then due to position, whatever caused it. Every
    input of that shape is changed alike if it comes from tokens, that is, differs between sequences.
    """
    sequences = 0 if axis else 1

    def replaced(x: Any, count: int) -> Any:
        if not isinstance(x, Tensor) or x.shape != states.shape or not x.is_floating_point():
            return x
        part = x.narrow(sequences, 0, min(count, x.shape[sequences]))
        if x.shape[sequences] > 1 and bool((x == x.narrow(sequences, 0, 1)).all()):  # does not come from tokens
            return part
        return part.narrow(axis, x.shape[axis] - 1, 1).expand_as(part).clone()

    def prepared(x: Any, count: int) -> Any:
        if isinstance(x, Tensor | tuple):
            return tree_map(lambda each: replaced(each, count), x)
        return x if isinstance(x, nn.Module) else copy.deepcopy(x)  # so that the trial does not write to a cache

    for count in dict.fromkeys((1, batch)):  # with fewer sequences than all, other inputs may not fit
        trial = _QueryKeyCapture(count)
        tracer = ProductTracer(lambda: True, trial.on_traced_attention)
        try:
            with observing(trial), torch.random.fork_rng(devices=[]), tracer:
                options = {name: prepared(x, count) for name, x in kwargs.items()}
                module.forward(*(prepared(x, count) for x in args), **options)
        except Exception as error:  # a module may raise anything: nothing was captured
            if is_out_of_memory(error):
                raise
        if trial.queries_keys is not None:
            return trial.queries_keys
    return None


def is_position_free(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B G N d"],
    rotation: Rotation | None,
    positions: Int[Tensor, "_B N"],
    rounding: torch.dtype,
) -> bool:
    """Whether queries and keys of equal tokens are equal at every position, apart from the rotation and factors of
    queries. Compared in their own dtype, float32 at least."""
    allowed = max(tolerance(q.dtype), tolerance(rounding))
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(dtype), k.to(dtype)
    if rotation is not None:
        q, k = q.clone(), k.clone()
        allowed += _ANGLE_ROUNDING * float((positions.max() * rotation.frequencies.abs()).max())
        factors = phasor(-positions[:1].unsqueeze(-1) * rotation.frequencies).to(dtype.to_complex()).unsqueeze(1)
        for x in (q, k):
            unrotated = as_complex(x, rotation.after) * factors
            x[..., rotation.after[:, 0]], x[..., rotation.after[:, 1]] = unrotated.real, unrotated.imag
    q = torch.nn.functional.normalize(q, dim=-1)
    q = torch.where((q == 0).all(-1, keepdim=True), q[:, :, -1:], q)  # factor 0
    return all(bool((x - x[:, :, -1:]).abs().max() <= allowed * x.abs().max()) for x in (q, k) if x.numel())
