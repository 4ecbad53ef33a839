"""A rotary encoding, identified from queries and keys before and after it, and from the model's table of cosines."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from toeplens.encodings.rotary import Pairing
from toeplens.ground.machine import out_of_memory
from toeplens.lens.kit.terms import NoForm, index_of
from toeplens.sources.huggingface.model import AttentionInputs, Observer, observing, tolerance
from toeplens.sources.huggingface.trace import Followed, Products, four

_TRIED = 32  # positions on which pairings of dimensions are tested
_GLANCED = 3  # positions on which most pairings are ruled out
_ROUNDED = 4  # number of roundings, each by one unit, of a multiplied number

Layout = tuple[Pairing, Int[Tensor, "n 2"], Int[Tensor, "n 2"]]
Both = list[tuple[Float[Tensor, "B _H N d"], Float[Tensor, "B _H N d"]]]  # queries and keys, before and after


def layouts_of(both: Both, allowed: float, count: int | None = None) -> Iterator[Layout]:
    """Pairings, and the dimensions of each pair before and after, that fit where most is rotated; likeliest first.

    Dimensions that are 0 in all queries and keys do not change, but may still be rotated. So the rotated part is any
    range in which the changed dimensions form pairs, with as few nonzero unchanged dimensions as possible. Rotated
    numbers may differ by ``allowed`` of the largest. Raises `NoForm` if nothing changes.
    """
    moved = torch.stack([(before != after).flatten(0, -2).any(0) for before, after in both]).any(0)
    if not bool(moved.any()):
        raise NoForm("rotation: it does not change queries and keys.")
    alive = torch.stack([(x != 0).flatten(0, -2).any(0) for each in both for x in each]).any(0)
    parts = [[(b[:, :, -few:], a[:, :, -few:]) for b, a in both] for few in (_GLANCED, _TRIED)]
    for name, start, number in _candidates(moved, alive):
        if count in (None, number):
            half = start + torch.arange(2 * number, device=moved.device).view(2, -1).T
            beside = start + torch.arange(2 * number, device=moved.device).view(-1, 2)
            # half apart, adjacent, or adjacent before and half apart after
            pairs, out = half if name == "half" else beside, beside if name == "beside" else half
            for few in parts:  # the best rotation of each pair at each position, equal for all heads
                each = [(as_complex(before, pairs), as_complex(after, out)) for before, after in few]
                wrong = max(float((ratio(each) * x - y).abs().max()) for x, y in each)
                if not wrong / max(float(y.abs().max()) for _, y in each) <= allowed:
                    break
            else:
                yield "half" if name == "half" else "interleaved", pairs, out


def _candidates(moved: Bool[Tensor, "d"], alive: Bool[Tensor, "d"]) -> list[tuple[str, int, int]]:
    """Layout, first dimension and number of pairs, likeliest first; more dimensions may be rotated than changed, as in
    low precision the slowest pairs may not show."""
    at, width = moved.nonzero().flatten().tolist(), len(moved)
    first, end = at[0], at[-1] + 1
    lowest = 1 + max([-1, *alive[:first].nonzero().flatten().tolist()])
    still = [0, *(alive & ~moved).cumsum(0).tolist()]  # number of nonzero unchanged dimensions before this one
    found = []
    for start in range(first, lowest - 1, -1):
        for count in range((end - start + 1) // 2, (width - start) // 2 + 1):
            edges = (start == 0) + (start + 2 * count == width)
            rank = (still[start + 2 * count] - still[start], -edges, first - start, count)
            found.append((rank, start, count))
    return [(name, start, count) for _, start, count in sorted(found) for name in ("half", "beside", "sorted")]


def ratio(parts: list[tuple[Tensor, Tensor]]) -> Complex[Tensor, "B 1 N n"]:
    """The factor of each pair at each position, by least squares over the heads of queries and keys."""
    size = torch.stack([x.abs().square().sum(1, keepdim=True) for x, _ in parts]).sum(0)
    product = torch.stack([(y * x.conj()).sum(1, keepdim=True) for x, y in parts]).sum(0)
    return product / size.clamp_min(torch.finfo(torch.float64).tiny)


def as_complex(x: Float[Tensor, "*B d"], pairs: Int[Tensor, "n 2"]) -> Complex[Tensor, "*B n"]:
    """Each pair as a complex number."""
    first, second = (x[..., index_of(dimensions)] for dimensions in pairs.unbind(-1))
    return torch.complex(first, second)


def before_rotation(final: Tensor, turned: list[tuple[Tensor, Tensor]]) -> Tensor | None:
    """Queries or keys with one of these rotations of some of their dimensions undone; None if they contain none.

    The rotated tensor may have been multiplied afterwards by a number per token and head, as by a norm without weights.
    Such a factor commutes with the rotation, so it is applied to the result.
    """
    heads, tokens, full = final.shape[1:]
    places = torch.arange(heads, device=final.device)
    tried = [(x, y) for x, y in reversed(turned) if y.ndim == 4 and y.numel()]
    tried = [(x.transpose(1, axis), y.transpose(1, axis)) for x, y in tried for axis in (1, 2)]
    for exact in (True, False):
        for x, y in tried:
            groups, width = y.shape[1], y.shape[-1]
            if y.shape[::2] != (len(final), tokens) or heads % groups or width > full:
                continue
            # which rotated head each head may have: one after another, or each several times in a row
            orders = [places % groups, *([] if groups in (1, heads) else [places // (heads // groups)])]
            for start, order in product(dict.fromkeys((0, full - width)), orders):
                if (factor := _factor(final[..., start : start + width], y[:, order], exact)) is not None:
                    whole = final.clone()
                    whole[..., start : start + width] = x[:, order] if exact else factor * x[:, order]
                    return whole
    return None


def _factor(part: Tensor, turned: Tensor, exact: bool) -> Tensor | float | None:
    """The number per token and head that maps the second to the first; None if the rest is more than rounding."""
    if exact:
        return 1.0 if torch.equal(part, turned.to(part.dtype)) else None
    x, y = part.double(), turned.double()
    factor = (x * y).sum(-1, keepdim=True) / y.square().sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    missed = (factor * y - x).abs().amax(-1)
    return factor if bool((missed <= _ROUNDED * torch.finfo(part.dtype).eps * x.abs().amax(-1)).all()) else None


_ANGLE = 2.0**-23  # models compute their angles in float32, whatever their own dtype
_READ = 256  # tokens of a long sequence used to determine a rotation
_SIZES = 0.05  # relative spread of numbers of equal size, rounded in any precision
_ALIKE = 1e-3  # allowed relative difference of two estimates of a frequency, besides rounding


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
    others: Iterable[Tensor] = (),
) -> Rotation:
    """The rotation that maps the first of each two tensors to the second.

    For long sequences it is determined from some tokens and then tested on all.

    Arguments
        q, k       before and after the rotation
        positions  of the tokens, for all sequences or for each
        rounding   a coarser dtype that queries and keys were rounded to before, if any
        others     other inputs of the rotation; the model's table of e^(iota angle) per token among them (`_tables`) is
                   used if it has the measured frequencies

    Raises `NoForm` if they are not related by one angle per position for each pair of dimensions.
    """
    tokens = q[0].shape[2]
    if tokens < 2:
        raise NoForm(f"rotation: it needs at least 2 tokens, got {tokens}.")
    positions = positions.expand(q[0].shape[0], -1)
    rounded = max(tolerance(q[1].dtype), tolerance(rounding))
    some, near = torch.arange(tokens, device=positions.device), _READ // 2
    if tokens > 2 * _READ and bool((positions[:, :near].diff(dim=1) == 1).all()):  # the first ones, others to the last
        far = torch.linspace(near, tokens - 1, _READ - near, dtype=torch.float64, device=positions.device).long()
        some = torch.cat((some[:near], far))
    both = [(before[:, :, some].double(), after[:, :, some].double()) for before, after in (q, k)]
    found, allowed = None, rounded
    tables = [table[:, some] for table in _tables(others, tokens)]
    for read, table in _readings(both, tables, positions[:, some], rounded):
        found = read.rotation(table, both if len(some) == tokens else [q, k], positions)
        allowed = rounded + _ANGLE * float((positions.max() * found.frequencies.abs()).max())
        if found.error <= allowed:
            return found
    if found is None:
        raise NoForm("rotation: it rotates neither adjacent pairs of dimensions nor pairs half apart.")
    far = f"{found.error:.1e} of the largest query or key, but rounding explains only {allowed:.1e}"
    raise NoForm(f"rotation: it is not one angle per position and pair of dimensions. The error is {far}.")


@dataclass(frozen=True)
class _Angles:
    """Frequency, start angle of each sequence, and magnitude, for each pair."""

    frequencies: Float[Tensor, "n"]
    starts: Float[Tensor, "B n"]
    magnitudes: Float[Tensor, "n"]

    @classmethod
    def of(cls, factors: Complex[Tensor, "B N n"], positions: Int[Tensor, "B N"]) -> _Angles:
        """From the factors of each pair; 0 where they are not known, as queries and keys are 0."""
        frequencies, starts = line(factors, positions)
        back = turn(-positions.unsqueeze(-1) * frequencies - starts.unsqueeze(1))
        known = (factors != 0).sum((0, 1)).clamp_min(1)
        return cls(frequencies, starts, (factors * back).real.sum((0, 1)) / known)


class _Reading:
    """What queries and keys before and after show for a layout: their angles, and which pairs changed."""

    def __init__(self, both: Both, layout: Layout, positions: Int[Tensor, "B N"]) -> None:
        self.pairing: Pairing = layout[0]
        _, self.pairs, self.out = layout
        self.parts = [(as_complex(before, self.pairs), as_complex(after, self.out)) for before, after in both]
        self.angles = _Angles.of(ratio(self.parts).squeeze(1), positions)
        self.moved = torch.stack([(x != y).flatten(0, -2).any(0) for x, y in self.parts]).any(0)

    def believed(
        self, table: Complex[Tensor, "_B N n"], positions: Int[Tensor, "B N"], rounded: float
    ) -> _Angles | None:
        """A table's values for each pair, if it agrees with the measured values of those that changed."""
        if len(table) not in (1, len(positions)):
            return None
        table = table.to(positions.device).expand(len(positions), -1, -1)
        for found in (_Angles.of(factors, positions) for factors in (table, table.conj())):
            apart = turn(found.frequencies - self.angles.frequencies).angle().abs()
            wrong = torch.maximum(apart, (found.magnitudes - self.angles.magnitudes).abs())
            if bool((wrong <= rounded + _ALIKE * self.angles.frequencies.abs())[self.moved].all()):
                return found
        return None

    def rotation(self, table: _Angles | None, both: Both, positions: Int[Tensor, "B N"]) -> Rotation:
        """The rotation, tested on all tokens, with a table's values for unchanged pairs; without one, only pairs that
        are not 0."""
        dtype = torch.promote_types(both[0][0].dtype, torch.float32)
        parts = [(as_complex(x.to(dtype), self.pairs), as_complex(y.to(dtype), self.out)) for x, y in both]
        nothing = torch.stack([((x == 0) & (y == 0)).flatten(0, -2).all(0) for x, y in parts])
        unseen = torch.zeros_like(self.moved) if table is None else ~self.moved
        own = vars(self.angles) if table is None else vars(table)
        found = _Angles(*(torch.where(unseen, own[name], x) for name, x in vars(self.angles).items()))
        turns = found.magnitudes * turn(positions.unsqueeze(-1) * found.frequencies + found.starts.unsqueeze(1))
        turns = turns.to(dtype.to_complex()).unsqueeze(1)
        wrong = max(float((turns * x - y).abs().max()) for x, y in parts)
        here = ~nothing.all(0) if table is None else torch.ones_like(self.moved)
        return Rotation(
            pairing=self.pairing,
            pairs=self.pairs[here],
            after=self.out[here],
            frequencies=found.frequencies[here],
            magnitudes=found.magnitudes[here],
            dead=nothing.any(0)[here],
            tabled=(unseen & (nothing.all(0) | (found.frequencies != self.angles.frequencies)))[here],
            error=wrong / max(float(y.abs().max()) for _, y in both),
        )


def _readings(
    both: Both, tables: Sequence[Complex[Tensor, "_B N n"]], positions: Int[Tensor, "B N"], rounded: float
) -> Iterator[tuple[_Reading, _Angles | None]]:
    """The measurements for each layout with each table that agrees; the last one without a table."""
    for table in (*tables, None):
        for layout in layouts_of(both, rounded, None if table is None else table.shape[-1]):
            read = _Reading(both, layout, positions)
            believed = None if table is None else read.believed(table, positions, rounded)
            if table is None or believed is not None:
                yield read, believed
                break


def _tables(given: Iterable[Tensor], tokens: int) -> list[Complex[Tensor, "_B N n"]]:
    """Candidates for tables of e^(iota angle) per token and pair: complex ones, two real ones, the halves of one."""
    rows = [each for x in given if (each := _rows(x, tokens)) is not None]
    real = [x.double() for x in rows if x.is_floating_point()]
    found = [x.to(torch.complex128) for x in rows if x.is_complex()]
    found += [torch.complex(x, y) for x, y in permutations(real, 2) if x.shape == y.shape]
    found += [torch.complex(*pair) for x in real if x.shape[-1] % 2 == 0 for pair in permutations(x.chunk(2, -1))]
    sizes = [x.abs().flatten(0, 1).aminmax(dim=0) for x in found]  # each column has constant magnitude
    found = [x for x, (low, high) in zip(found, sizes, strict=True) if bool((high - low <= _SIZES * high).all())]
    for number, x in enumerate(found):  # one column per pair, not per dimension
        halves = [x.chunk(2, -1), (x[..., ::2], x[..., 1::2])] if x.shape[-1] % 2 == 0 else []
        found[number] = next((one for one, other in halves if torch.equal(one, other)), x)
    return found


def _rows(x: Tensor, tokens: int) -> Tensor | None:
    """[B or 1, N, m] from a tensor with such rows, whatever its dimensions of size 1."""
    lead = [size for size in x.shape[:-1] if size != 1]
    if x.ndim < 2 or x.shape[-1] == 0 or lead[-1:] != [tokens] or len(lead) > 2:
        return None
    return x.detach().reshape(-1, tokens, x.shape[-1])


def line(
    ratio: Complex[Tensor, "B N n"], positions: Int[Tensor, "B N"]
) -> tuple[Float[Tensor, "n"], Float[Tensor, "B n"]]:
    """Slope and start of each sequence, of the angles as a function of position; a ratio of 0 has no angle."""
    beside = (positions.diff(dim=1) == 1).unsqueeze(-1)
    if not beside.any():
        raise NoForm("rotation: no two consecutive tokens are one position apart.")
    slope = ((ratio[:, 1:] * ratio[:, :-1].conj()) * beside).sum((0, 1)).angle()
    # neighbours give the angle up to rounding; refine by least squares over distances that double each time
    away = (positions - positions[:, :1]).abs().amax(0)
    reach = 2 * max(1, int((away.diff() == 1).sum()))
    while reach < int(away.max()):
        near = away <= reach
        if int(near.sum()) > 1:
            slope = slope + _left(ratio[:, near], positions[:, near], slope)[0]
        reach *= 2
    correction, start = _left(ratio, positions, slope)
    return slope + correction, start


def _left(
    ratio: Complex[Tensor, "B N n"], positions: Int[Tensor, "B N"], slope: Float[Tensor, "n"]
) -> tuple[Float[Tensor, "n"], Float[Tensor, "B n"]]:
    """The least-squares correction of a slope, if less than half a turn over all positions; and the starts."""
    known = (ratio != 0).double()
    count = known.sum(1, keepdim=True).clamp_min(1)
    places = positions.double().unsqueeze(-1)
    middle = (known * places).sum(1, keepdim=True) / count
    rest = ratio * turn(-places * slope)
    start = rest.sum(1, keepdim=True).angle()
    left = known * (rest * turn(-start)).angle()
    away = known * (places - middle)
    correction = (away * left).sum((0, 1)) / away.square().sum((0, 1)).clamp_min(1e-300)
    start = start + left.sum(1, keepdim=True) / count - correction * middle
    return correction, start.squeeze(1)


def turn(angles: Float[Tensor, "*B"]) -> Complex[Tensor, "*B"]:
    """e^(iota angle)."""
    return torch.polar(torch.ones_like(angles), angles)


@dataclass(eq=False)
class _Trial(Observer):
    """Captures queries and keys of the first sequence, then stops the module."""

    pieces = True
    batch: int
    found: tuple[Tensor, Tensor] | None = None

    def attend(self, call: AttentionInputs) -> Any:
        self._keep(call.q, call.k)

    def written_out(self, made: Followed, values: Tensor, out: Tensor) -> None:
        self._keep(four(made.left, self.batch), four(made.right, self.batch).transpose(-2, -1))

    def _keep(self, q: Tensor, k: Tensor) -> None:
        self.found = q[:1].clone(), k[:1].clone()
        raise RuntimeError("queries and keys are captured")


def of_equal_tokens(
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
        some = x.narrow(sequences, 0, min(count, x.shape[sequences]))
        if x.shape[sequences] > 1 and bool((x == x.narrow(sequences, 0, 1)).all()):  # does not come from tokens
            return some
        return some.narrow(axis, x.shape[axis] - 1, 1).expand_as(some).clone()

    def given(x: Any, count: int) -> Any:
        if isinstance(x, Tensor | tuple):
            return tree_map(lambda each: replaced(each, count), x)
        return x if isinstance(x, nn.Module) else copy.deepcopy(x)  # so that the trial does not write to a cache

    for count in dict.fromkeys((1, batch)):  # with fewer sequences than all, other inputs may not fit
        trial = _Trial(count)
        try:
            with observing(trial), torch.random.fork_rng(devices=[]), Products(lambda: True, trial.written_out):
                more = {name: given(x, count) for name, x in kwargs.items()}
                module.forward(*(given(x, count) for x in args), **more)
        except Exception as error:  # a module may raise anything: nothing was captured
            if out_of_memory(error):
                raise
        if trial.found is not None:
            return trial.found
    return None


def stays(
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
        allowed += _ANGLE * float((positions.max() * rotation.frequencies.abs()).max())
        turns = turn(-positions[:1].unsqueeze(-1) * rotation.frequencies).to(dtype.to_complex()).unsqueeze(1)
        for x in (q, k):
            back = as_complex(x, rotation.after) * turns
            x[..., rotation.after[:, 0]], x[..., rotation.after[:, 1]] = back.real, back.imag
    q = torch.nn.functional.normalize(q, dim=-1)
    q = torch.where((q == 0).all(-1, keepdim=True), q[:, :, -1:], q)  # factor 0
    return all(bool((x - x[:, :, -1:]).abs().max() <= allowed * x.abs().max()) for x in (q, k) if x.numel())
