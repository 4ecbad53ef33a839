"""Checks of what an encoding does: shapes, declared facts, positions, causality, decoding with a key cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from toeplens.encodings.attention import attend
from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.conformance.specimen import LENGTH, Specimen, apart, declared, logits_of, loses_bias, measure
from toeplens.encodings.seen import Seen
from toeplens.encodings.shapes import Positions, Stream

EXACT = 1e-9  # float64 results that must agree, in the order of their operations' rounding


class Broken(Exception):
    """A check failed; the message says what was seen."""


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


def agree(a: Tensor, b: Tensor, tolerance: float, what: str) -> float:
    difference = apart(a, b)
    demand(difference <= tolerance, f"{what}: relative difference {difference:.1e}, allowed {tolerance:.0e}")
    return difference


def shapes(specimen: Specimen) -> str:
    """Every hook returns the shape and dtype that the contract says, for fewer queries than keys too."""
    encoding, length = specimen.encoding, 10
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        like = specimen.like(dtype)
        p = specimen.positions(length)
        x = specimen.content(2, length, dtype)
        embedded = like.embed(x, p)
        demand(embedded.shape == x.shape, f"embed returned {tuple(embedded.shape)} for {tuple(x.shape)}")
        demand(embedded.dtype == dtype, f"embed returned {embedded.dtype} for {dtype}")
        notes = like.note(x)
        if notes is not None:
            demand(notes.ndim == 4 and notes.shape[0] == 2 and notes.shape[2] == length, f"note: {tuple(notes.shape)}")
        q, k, _ = specimen.project(x)
        late, rows = rows_of(encoding, p, slice(length - 3, length)), torch.arange(length - 3, length)
        seen = Seen(q[..., -3:, :], k, rows, notes, None, True, specimen.scale)
        turned_q, turned_k = like.hook("rotate", seen.q, k, late, p, seen=seen)
        demand(turned_q.shape[:3] == seen.q.shape[:3] and turned_k.shape[:3] == k.shape[:3], "rotate changed a shape")
        demand(turned_q.shape[-1] == turned_k.shape[-1], "rotate returned queries and keys of different width")
        demand(turned_q.dtype == turned_k.dtype == dtype, f"rotate returned {turned_q.dtype} for {dtype}")
        seen = replace(seen, q=turned_q, k=turned_k)
        square = (2, encoding.num_heads, 3, length)
        score = like.hook("score", turned_q, turned_k, late, p, seen=seen)
        demand(score.shape == square, f"score returned {tuple(score.shape)}, wanted {square}")
        bias = like.hook("bias", late, p, seen=seen)
        demand(bias is None or bias.shape in (square, square[1:]), "bias returned a wrong shape")
        for hook in ("transform_logits", "transform_weights"):
            made = like.hook(hook, torch.rand(square).to(dtype), late, p, seen=seen)
            demand(made.shape == square, f"{hook} returned {tuple(made.shape)}, wanted {square}")
        more = like.hook("add_values", torch.rand(square).to(dtype), late, p, seen=seen)
        demand(more is None or more.shape == (*square[:3], encoding.head_dim), "add_values returned a wrong shape")
        out = specimen.attend(x, p, encoding=like)
        demand(bool(out.isfinite().all()), f"attention in {dtype} is not finite")
    return "float64, float32, bfloat16"


def facts(specimen: Specimen) -> str:
    """`coupling`, `data_dependent`, `toeplitz` are what is measured, both ways; `scale` is what `scale_terms` says."""
    encoding = specimen.encoding
    stated, measured = declared(encoding), measure(specimen)
    for name in ("couplings", "data_dependent", "toeplitz"):
        said, found = getattr(stated, name), getattr(measured, name)
        said, found = (sorted(x) if isinstance(x, frozenset) else x for x in (said, found))
        demand(said == found, f"{name}: {said} is declared, {found} was measured")
    demand(encoding.forms_logits or not loses_bias(specimen), "forms_logits: False is declared, but a bias is lost")
    wanted = (encoding.scale_terms * encoding.query_dim) ** -0.5 if encoding.scale_terms else 1.0
    demand(encoding.scale == wanted, f"scale: it is {encoding.scale}; by scale_terms {encoding.scale_terms}, {wanted}")
    demand(bool(encoding.citation.strip()), "citation: none is given")
    demand(bool((type(encoding).__doc__ or "").strip()), "the class has no docstring")
    return f"{', '.join(sorted(measured.couplings))}; data-dependent {measured.data_dependent}; " + (
        f"Toeplitz {measured.toeplitz}"
    )


def kernel(specimen: Specimen) -> str:
    """`kernel` is what the encoding does: a bias itself, the inner products of input vectors, a span of functions."""
    encoding, length = specimen.encoding, 40
    if encoding.axes > 1:
        return "not looked at: positions have several coordinates"
    p = specimen.positions(length)
    offsets = p.unsqueeze(-1) - p
    values = encoding.kernel(offsets.flatten())
    if values is None:
        demand(not encoding.toeplitz or encoding.coupling == "weights", "declared Toeplitz, but it has no kernel")
        return "none"
    values = values.detach().unflatten(-1, offsets.shape)
    if encoding.coupling == "input":
        rows = encoding.embed(torch.zeros(1, length, encoding.d_model, dtype=torch.float64), p)[0]
        return f"Gram matrix, {agree(values[0], rows @ rows.T, 1e-6, 'kernel against p_i . p_j'):.0e}"
    if not values.is_complex():
        demand(
            "bias" not in encoding._seeing,
            "kernel: it must be complex [H, n, D] or None, as the bias reads more than positions (a real kernel is the "
            "whole bias by offset)",
        )
        bias = encoding.bias(p, p)
        bias = torch.zeros_like(values) if bias is None else bias
        return f"bias, {agree(values, bias, 1e-6, 'kernel against bias'):.0e}"
    x = specimen.content(1, 1).expand(1, length, -1)
    logits = logits_of(specimen, *specimen.project(x)[:2], x, causal=False)[0].detach()
    worst = 0.0
    for head in range(encoding.num_heads):
        functions = values[head if len(values) > 1 else 0].flatten(1)
        basis = torch.cat((functions.real, functions.imag, torch.ones(1, functions.shape[1]))).double().T
        target = logits[head].flatten().unsqueeze(-1)
        fitted = basis @ torch.linalg.lstsq(basis, target, driver="gelsd").solution
        worst = max(worst, agree(fitted, target, 1e-6, "logits outside the span of the kernel's functions"))
    return f"spans the logits, {worst:.0e}"


def positions(specimen: Specimen) -> str:
    """Positions given once or by sequence are the same; every sequence has its own."""
    encoding, length = specimen.encoding, 12
    once = specimen.positions(length, 3)
    each = once.expand(2, *once.shape)
    x = specimen.content(2, length)
    worst = agree(specimen.attend(x, once), specimen.attend(x, each), EXACT, "positions given by sequence")
    linear = torch.stack([torch.arange(length) * 2, torch.arange(length) + 7])
    rows = encoding.place(linear)
    if encoding.length_dependent:
        return f"by sequence, {worst:.0e}"  # the longest sequence decides for all
    both = specimen.attend(x, rows)
    for b in range(2):
        alone = specimen.attend(x[b : b + 1], rows[b])
        worst = max(worst, agree(both[b : b + 1], alone, EXACT, "a sequence's own positions"))
    return f"by sequence, {worst:.0e}"


def causal(specimen: Specimen) -> str:
    """A changed later token changes nothing before it, and something from there on."""
    p, place = specimen.positions(LENGTH), 9
    x = specimen.content(2, LENGTH)
    changed = x.clone()
    changed[:, place] += 1.0
    for fused in (True, False):
        before, after = (specimen.attend(y, p, fused=fused) for y in (x, changed))
        agree(before[:, :, :place], after[:, :, :place], EXACT, f"outputs before token {place}, which was changed")
        demand(apart(before[:, :, place:], after[:, :, place:]) > 1e-6, "a changed token changed nothing after it")
    return "nothing comes from the future"


def paths(specimen: Specimen) -> str:
    """Fused attention, explicit attention, and chunks of queries give the same numbers; a subset of queries too."""
    length, batch = 13, 2
    p, x = specimen.positions(length), specimen.content(2, length)
    mask = torch.arange(length) < torch.tensor([length, length - 4])[:, None]
    mask = mask[:, None, None, :]
    worst, encoding = 0.0, specimen.encoding
    for masked in (None, mask):
        whole = specimen.attend(x, p, mask=masked, fused=False)
        for name, more in {
            "fused": {},
            "chunks": {"at_once": batch * encoding.num_heads * length * 3},
            "explicit chunks": {"at_once": 1, "fused": False},
        }.items():
            worst = max(worst, agree(specimen.attend(x, p, mask=masked, **more), whole, EXACT, f"{name} and explicit"))
        embedded = encoding.embed(x, p)
        q, k, v = specimen.project(embedded)
        rows = torch.tensor([[5], [8]])
        each = p.expand(batch, *p.shape)
        queries = torch.stack([q[b, :, r] for b, r in enumerate(rows)])
        told = {**specimen.layer(embedded, each), "q_positions": torch.stack([each[b, r] for b, r in enumerate(rows)])}
        one = attend(queries, k, v, rows=rows, mask=masked, **told)
        wanted = torch.stack([whole[b, :, r] for b, r in enumerate(rows)])
        worst = max(worst, agree(one, wanted, EXACT, "one query a sequence"))
    return f"fused, explicit, chunks, single queries: {worst:.0e}"


def decoding(specimen: Specimen) -> str:
    """Token by token, with cached keys, values and notes, attention gives what the full pass gives."""
    encoding, length, start = specimen.encoding, 14, 5
    p = specimen.positions(length, start)
    x = specimen.content(2, length)
    full = specimen.attend(x, p)
    worst = 0.0
    for n, out in enumerate(decoded(specimen, x, p)):
        wanted = full[:, :, n : n + 1]
        if encoding.length_dependent:
            wanted = specimen.attend(x[:, : n + 1], rows_of(encoding, p, slice(0, n + 1)))[:, :, -1:]
        worst = max(worst, agree(out, wanted, EXACT, f"token {n} decoded with a cache"))
    return f"with a cache equals the full pass, {worst:.0e}"


def decoded(
    specimen: Specimen, x: Stream, p: Positions, mask: Bool[Tensor, "B 1 1 N"] | None = None
) -> Iterator[Float[Tensor, "B H 1 d"]]:
    """Each token's output in turn, from the cached keys, values and notes of those before it."""
    encoding = specimen.encoding
    keys: list[Tensor] = []
    values: list[Tensor] = []
    notes: Tensor | None = None
    for n in range(x.shape[1]):
        here, so_far = rows_of(encoding, p, slice(n, n + 1)), rows_of(encoding, p, slice(0, n + 1))
        token = encoding.embed(x[:, n : n + 1], here)
        q, k, v = specimen.project(token)
        keys.append(k)
        values.append(v)
        new = encoding.note(token, notes)
        notes = new if notes is None or new is None else torch.cat((notes, new), dim=2)
        told = {**specimen.layer(token, so_far), "q_positions": here, "notes": notes}
        seen = None if mask is None else mask[..., : n + 1]
        yield attend(q, torch.cat(keys, dim=2), torch.cat(values, dim=2), mask=seen, **told)


def padding(specimen: Specimen) -> str:
    """A query that sees no key gives 0 on every path; padding leaves two layers finite, and tokens what they are."""
    encoding, length, pads = specimen.encoding, 11, 4
    p, x = specimen.positions(length), specimen.content(2, length).requires_grad_()
    mask = (torch.arange(length) >= torch.tensor([[0], [pads]]))[:, None, None, :]
    width = encoding.num_heads * encoding.head_dim
    merge = torch.randn(width, encoding.d_model, generator=specimen.generator, dtype=x.dtype) / width**0.5
    at_once = 2 * encoding.num_heads * length * 3
    hidden = x
    for layer in ("first", "second"):
        outputs = {
            "fused": specimen.attend(hidden, p, mask=mask),
            "explicit": specimen.attend(hidden, p, mask=mask, fused=False),
            "chunked": specimen.attend(hidden, p, mask=mask, fused=False, at_once=at_once),
            "cached": torch.cat(list(decoded(specimen, hidden, p, mask)), dim=2),
        }
        for name, out in outputs.items():
            demand(bool(out.isfinite().all()), f"{name} attention after padding is not finite in the {layer} layer")
            demand(not out[1, :, :pads].any(), f"{name} attention of a query that sees no key is not 0")
            if name != "cached" or not encoding.length_dependent:
                agree(out, outputs["fused"], EXACT, f"{name} and fused attention after padding")
        hidden = hidden + outputs["explicit"].transpose(1, 2).flatten(-2) @ merge
    hidden[:, pads:].square().sum().backward()
    real = torch.arange(length) % 3 != 2
    places = specimen.positions(int(real.sum()))
    alone = specimen.attend(x[:, real], places)
    between = specimen.attend(x, places[(real.cumsum(0) - 1).clamp(min=0)], padding=~real.expand(2, -1))
    agree(between[:, :, real], alone, EXACT, "attention with padding between tokens and without it")
    for name, gradient in {"the content": x.grad, **{n: w.grad for n, w in encoding.named_parameters()}}.items():
        demand(gradient is None or bool(gradient.isfinite().all()), f"{name} receives a gradient that is not finite")
    return "0 where no key is seen: fused, explicit, chunked, cached; two layers finite; padding between tokens is none"


def shift(specimen: Specimen) -> str:
    """Moving all positions changes nothing, where the encoding says that only offsets count."""
    encoding = specimen.encoding
    if not encoding.toeplitz or encoding.coupling == "input" or encoding.length_dependent:
        return "not declared"
    x, p = specimen.content(2, LENGTH), specimen.positions(LENGTH)
    worst = 0.0
    for distance in (1, 1000, 100_000):
        worst = max(worst, agree(specimen.attend(x, p + distance), specimen.attend(x, p), EXACT, f"shift {distance}"))
    return f"by 1, 1000, 100000: {worst:.0e}"


def rows_of(encoding: PositionalEncoding, positions: Positions, rows: slice) -> Positions:
    return positions[rows] if not encoding.by_sequence(positions) else positions[:, rows]
