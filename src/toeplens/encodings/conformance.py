"""The conformance suite: does an encoding keep the interface, and are its declared attributes true?

    from toeplens.encodings import conformance
    print(conformance.check(MyEncoding, slope=2.0))

This runs every check on a small instance. If one fails, it raises `NonConformance` with all results in the message.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from toeplens.encodings import registry
from toeplens.encodings.attention import attend, attention_logits
from toeplens.encodings.base import AttentionInputs, PositionalEncoding
from toeplens.encodings.shapes import Positions, Stream
from toeplens.utils import InputError, choose, invalid

# default sizes of the instances that are checked
SIZES = {"d_model": 24, "num_heads": 3, "head_dim": 8, "max_len": 64}


def randomise(encoding: PositionalEncoding, seed: int) -> PositionalEncoding:
    """Draw every parameter from a normal distribution, so that none is zero by its initialisation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return encoding.eval()


class Specimen:
    """An encoding with random parameters, between random projections of the width it needs; all in float64.

    ``build`` makes a new instance, with new parameters.
    """

    def __init__(self, build: Callable[[], PositionalEncoding], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.build, self.max_difference = build, 0.0
        self.encoding = encoding = randomise(build(), seed + 1).double()
        self.generator = torch.Generator().manual_seed(seed + 2)
        shape = (3, encoding.num_heads, encoding.d_model, encoding.query_dim)
        self.projections = torch.randn(shape, generator=self.generator, dtype=torch.float64) / encoding.d_model**0.5
        self.scale = encoding.scale

    def check_close(self, a: Tensor, b: Tensor, name: str, tolerance: float = 1e-9) -> None:
        """Raise `CheckFailed` unless the relative difference, of which the largest is kept, is small enough.

        The default is for float64 results that differ only in the order of operations.
        """
        difference = relative_difference(a, b)
        require(difference <= tolerance, f"{name}: relative difference {difference:.1e}, allowed {tolerance:.0e}")
        self.max_difference = max(self.max_difference, difference)

    def random_content(self, batch: int, length: int, dtype: torch.dtype = torch.float64) -> Stream:
        """Random token embeddings, with a mean that is not zero."""
        shape = (batch, length, self.encoding.d_model)
        return (torch.randn(shape, generator=self.generator, dtype=torch.float64) + 0.3).to(dtype)

    def positions(self, length: int, start: int = 0) -> Positions:
        """Positions ``start``, ``start`` + 1, ..., within the table if there is one."""
        if self.encoding.bounded:
            start = min(start, self.encoding.max_len - length)
        return self.encoding.to_positions(torch.arange(start, start + length))

    def project(self, x: Stream) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, H, N, d] of embedded tokens; v has the head's own width."""
        q, k, v = (x.unsqueeze(1) @ projection.to(x.dtype) for projection in self.projections)
        return q, k, v[..., : self.encoding.head_dim]

    def attention_arguments(
        self, x: Stream, positions: Positions, encoding: PositionalEncoding | None = None
    ) -> dict[str, Any]:
        """The keyword arguments of attention; ``x`` are the embedded tokens at these positions."""
        encoding = self.encoding if encoding is None else encoding
        arguments = {"encoding": encoding, "q_positions": positions, "k_positions": positions, "scale": self.scale}
        return {**arguments, "key_features": encoding.key_features(x)}

    def attend(self, x: Stream, positions: Positions, **options: Any) -> Float[Tensor, "B H N d"]:
        """The whole layer, of this encoding or another ``encoding``: input vectors, projections, attention."""
        encoding = options.pop("encoding", self.encoding)
        x = encoding.embed(x, positions)
        return attend(*self.project(x), **self.attention_arguments(x, positions, encoding), **options)

    def logits(self, x: Stream, positions: Positions, **options: Any) -> Float[Tensor, "B H N N"]:
        """The layer's logits; minus infinity where a key is masked."""
        encoding = options.pop("encoding", self.encoding)
        x = encoding.embed(x, positions)
        return attention_logits(*self.project(x)[:2], **self.attention_arguments(x, positions, encoding), **options)

    def cast_encoding(self, dtype: torch.dtype) -> PositionalEncoding:
        """A copy of the encoding with its parameters in ``dtype``."""
        return copy.deepcopy(self.encoding).to(dtype)


def relative_difference(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the larger of 1 and the largest entry; minus infinities must coincide."""
    a, b = a.detach().double(), b.detach().double()
    is_equal = a == b  # infinities too
    if bool(((~a.isfinite() | ~b.isfinite()) & ~is_equal).any()):
        return float("inf")
    if not a.numel():
        return 0.0
    magnitude = torch.where(b.isfinite(), b, 0.0).abs().max()
    return float(torch.where(is_equal, 0.0, a - b).abs().max() / magnitude.clamp(min=1.0))


TOLERANCE = 1e-9  # relative differences of float64 numbers below this are rounding
LENGTH = 16


@dataclass(frozen=True)
class EncodingProperties:
    """Where and how position enters, as measured on random input."""

    couplings: frozenset[str]
    data_dependent: bool
    toeplitz: bool


def measure_properties(specimen: Specimen) -> EncodingProperties:
    """Measure the attributes of the specimen's encoding.

    couplings       the hooks that change something (a rotation that leaves a content part unchanged is a concatenation)
    data_dependent  whether the logit of a fixed query and key changes with the other tokens or with other content
                    features. If not: whether the logits, over many contents and position pairs, are more than a fixed
                    set of functions of position (for one query, a matrix of low rank)
    toeplitz        whether logits depend only on the offset if the content is the same everywhere (for input vectors:
                    whether their inner products do); not measured for data-dependent encodings
    """
    couplings = _couplings(specimen)
    dependent = _depends_on_others(specimen, couplings) or _is_not_low_rank(specimen, couplings)
    return EncodingProperties(couplings, dependent, not dependent and _is_toeplitz(specimen, couplings))


def _attention_inputs(specimen: Specimen) -> tuple[AttentionInputs, Positions]:
    x = specimen.random_content(2, LENGTH)
    features = specimen.encoding.key_features(x)
    inputs = AttentionInputs.with_defaults(*specimen.project(x)[:2], key_features=features, scale=specimen.scale)
    return inputs, specimen.positions(LENGTH)


def _couplings(specimen: Specimen) -> frozenset[str]:
    encoding, couplings = specimen.encoding, set()
    inputs, p = _attention_inputs(specimen)
    x = specimen.random_content(2, LENGTH)
    if relative_difference(encoding.embed(x, p), x) > TOLERANCE:
        couplings.add("input")
    q, k = encoding.call_hook("rotate", inputs.q, inputs.k, p, p, inputs=inputs)
    if q.shape != inputs.q.shape or relative_difference(q, inputs.q) > TOLERANCE:
        content = encoding.head_dim
        has_extra_dims = encoding.query_dim > content and q.shape == inputs.q.shape
        is_concatenated = has_extra_dims and relative_difference(q[..., :content], inputs.q[..., :content]) <= TOLERANCE
        couplings.add("concatenation" if is_concatenated else "rotation")
    plain = q @ k.transpose(-2, -1)
    logits = plain * specimen.scale
    weights = logits.softmax(-1)
    bias = encoding.call_hook("bias", p, p, inputs=inputs)
    if bias is not None and float(bias.detach().abs().max()) > TOLERANCE:
        couplings.add("bias")
    for coupling, hook, arguments, unchanged in (
        ("accumulated", "score", (q, k), plain),
        ("logits", "transform_logits", (logits,), logits),
        ("weights", "transform_weights", (weights,), weights),
    ):
        result = encoding.call_hook(hook, *arguments, p, p, inputs=inputs)
        if relative_difference(result.tril(), unchanged.tril()) > TOLERANCE:
            couplings.add(coupling)
    if "logits" not in couplings and encoding.call_hook("add_values", weights, p, p, inputs=inputs) is not None:
        couplings.add("logits")
    return frozenset(couplings or {"none"})


def logits_of(specimen: Specimen, q: Tensor, k: Tensor, x: Tensor, *, causal: bool = True) -> Tensor:
    """The logits of given queries and keys at positions 0, 1, 2, ..., with the key features of content ``x``."""
    return attention_logits(q, k, **specimen.attention_arguments(x, specimen.positions(q.shape[-2])), causal=causal)


def _depends_on_others(specimen: Specimen, couplings: frozenset[str]) -> bool:
    encoding, row, column = specimen.encoding, LENGTH - 4, 5
    positions = specimen.positions(LENGTH)
    if "input" in couplings:
        contents = [specimen.random_content(2, LENGTH) for _ in range(2)]
        if relative_difference(*(encoding.embed(x, positions) - x for x in contents)) > TOLERANCE:
            return True
    contents = [specimen.random_content(1, LENGTH) for _ in range(2)]
    (q, k, _), (other_q, other_k, _) = (specimen.project(x) for x in contents)
    other_q[..., row, :], other_k[..., column, :] = q[..., row, :], k[..., column, :]
    results = logits_of(specimen, q, k, contents[0]), logits_of(specimen, other_q, other_k, contents[1])
    if relative_difference(*(logits[..., row, column] for logits in results)) > TOLERANCE:
        return True
    if "weights" not in couplings:
        return False
    weights = torch.rand(2, encoding.num_heads, LENGTH, LENGTH, dtype=torch.float64, generator=specimen.generator)
    all_inputs = [_attention_inputs(specimen)[0] for _ in range(2)]
    outputs = (encoding.call_hook("transform_weights", weights, positions, positions, inputs=x) for x in all_inputs)
    return relative_difference(*outputs) > TOLERANCE


def _is_not_low_rank(specimen: Specimen, couplings: frozenset[str]) -> bool:
    """Whether one head's logits, as a matrix of contents by position pairs, do not have low rank."""
    if couplings <= {"none", "input"}:
        return False
    encoding = specimen.encoding
    limit = 4 * encoding.query_dim + 4  # sums of products of a query, a key and fixed functions stay well below this
    length = 2 * limit  # more distances than that
    length = min(length, encoding.max_len) if encoding.bounded else length
    positions = specimen.positions(length)
    for size in (1, 8):  # a content-dependent phase shows only at large values
        rows = []
        for x in (size * specimen.random_content(3 * limit, 1)).split(32):
            x = x.expand(-1, length, -1)
            q, k, _ = specimen.project(x)
            arguments = {**specimen.attention_arguments(x, positions), "q_positions": positions[-1:]}
            rows.append(attention_logits(q[..., -1:, :], k, **arguments)[:, 0, 0])
        logits = torch.cat(rows).detach()
        singular = torch.linalg.svdvals(logits[:, logits.isfinite().all(0)])  # masked keys carry no information
        if int((singular > TOLERANCE * singular[0]).sum()) > limit:
            return True
    return False


def _is_toeplitz(specimen: Specimen, couplings: frozenset[str]) -> bool:
    strides = (1,) if specimen.encoding.bounded else (1, 397)  # close, and far beyond any threshold
    return all(_is_toeplitz_at(specimen, couplings, torch.arange(LENGTH) * stride) for stride in strides)


def _is_toeplitz_at(specimen: Specimen, couplings: frozenset[str], tokens: Tensor) -> bool:
    encoding = specimen.encoding
    positions = encoding.to_positions(tokens)
    if couplings == {"input"}:
        rows = encoding.embed(torch.zeros(1, LENGTH, encoding.d_model, dtype=torch.float64), positions)
        return _constant_diagonals(rows @ rows.transpose(-1, -2))
    if "weights" in couplings:
        inputs, _ = _attention_inputs(specimen)
        ones = torch.ones(2, encoding.num_heads, LENGTH, LENGTH, dtype=torch.float64)
        if not _constant_diagonals(encoding.call_hook("transform_weights", ones, positions, positions, inputs=inputs)):
            return False
    x = specimen.random_content(1, 1).expand(1, LENGTH, -1)
    if encoding.axes == 1:
        return _constant_diagonals(specimen.logits(x, positions, causal=False))
    scattered = positions[torch.randperm(LENGTH, generator=specimen.generator)]
    try:
        shifted = specimen.logits(x, scattered + torch.arange(1, encoding.axes + 1), causal=False)
    except InputError:
        return False  # these coordinates are not lengths: they cannot be shifted
    return relative_difference(shifted, specimen.logits(x, scattered, causal=False)) <= TOLERANCE


def _constant_diagonals(matrix: Tensor) -> bool:
    return relative_difference(matrix[..., 1:, 1:], matrix[..., :-1, :-1]) <= TOLERANCE


def declared_properties(encoding: PositionalEncoding) -> EncodingProperties:
    """The attributes that the encoding declares."""
    couplings = frozenset({encoding.coupling, *encoding.also_couples})
    return EncodingProperties(couplings, encoding.data_dependent, encoding.toeplitz)


class CheckFailed(Exception):
    """A check failed; the message says why."""


def require(condition: bool, message: str) -> None:
    """Raise `CheckFailed` unless the condition holds."""
    if not condition:
        raise CheckFailed(message)


def shapes(specimen: Specimen) -> str:
    """Every hook returns the documented shape and dtype, also for fewer queries than keys."""
    encoding, length = specimen.encoding, 10
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        cast = specimen.cast_encoding(dtype)
        p = specimen.positions(length)
        x = specimen.random_content(2, length, dtype)
        embedded = cast.embed(x, p)
        require(embedded.shape == x.shape, f"embed returned {tuple(embedded.shape)} for {tuple(x.shape)}")
        require(embedded.dtype == dtype, f"embed returned {embedded.dtype} for {dtype}")
        features = cast.key_features(x)
        if features is not None:
            fits = features.ndim == 4 and features.shape[0] == 2 and features.shape[2] == length
            require(fits, f"key_features: {tuple(features.shape)}")
        q, k, _ = specimen.project(x)
        last, rows = select_positions(encoding, p, slice(length - 3, length)), torch.arange(length - 3, length)
        inputs = AttentionInputs(q[..., -3:, :], k, rows, features, None, True, specimen.scale)
        rotated_q, rotated_k = cast.call_hook("rotate", inputs.q, k, last, p, inputs=inputs)
        fits = rotated_q.shape[:3] == inputs.q.shape[:3] and rotated_k.shape[:3] == k.shape[:3]
        require(fits, "rotate changed a shape")
        require(rotated_q.shape[-1] == rotated_k.shape[-1], "rotate returned queries and keys of different width")
        require(rotated_q.dtype == rotated_k.dtype == dtype, f"rotate returned {rotated_q.dtype} for {dtype}")
        inputs = replace(inputs, q=rotated_q, k=rotated_k)
        square = (2, encoding.num_heads, 3, length)
        hook_arguments: dict[str, tuple[Tensor, ...]] = {"score": (rotated_q, rotated_k)}
        hook_arguments |= {hook: (torch.rand(square).to(dtype),) for hook in ("transform_logits", "transform_weights")}
        for hook, arguments in hook_arguments.items():
            result = cast.call_hook(hook, *arguments, last, p, inputs=inputs)
            require(result.shape == square, f"{hook} returned {tuple(result.shape)}, wanted {square}")
        bias = cast.call_hook("bias", last, p, inputs=inputs)
        require(bias is None or bias.shape in (square, square[1:]), "bias returned a wrong shape")
        values = cast.call_hook("add_values", torch.rand(square).to(dtype), last, p, inputs=inputs)
        fits = values is None or values.shape == (*square[:3], encoding.head_dim)
        require(fits, "add_values returned a wrong shape")
        out = specimen.attend(x, p, encoding=cast)
        require(bool(out.isfinite().all()), f"attention in {dtype} is not finite")
    return "float64, float32, bfloat16"


def facts(specimen: Specimen) -> str:
    """`coupling`, `data_dependent` and `toeplitz` equal the measured values; `scale` follows from `scale_terms`."""
    encoding = specimen.encoding
    stated, measured = declared_properties(encoding), measure_properties(specimen)
    for name in ("couplings", "data_dependent", "toeplitz"):
        values = getattr(stated, name), getattr(measured, name)
        declared, actual = (sorted(x) if isinstance(x, frozenset) else x for x in values)
        require(declared == actual, f"{name}: declared {declared}, measured {actual}")
    inputs, p = _attention_inputs(specimen)
    logits = inputs.q @ inputs.k.transpose(-2, -1) * specimen.scale
    biased = (logits, logits + torch.rand_like(logits))
    results = [encoding.call_hook("transform_logits", x, p, p, inputs=inputs) for x in biased]
    keeps_bias = relative_difference(*results) > TOLERANCE
    require(encoding.forms_logits or keeps_bias, "forms_logits: declared False, but a bias is lost")
    expected = (encoding.scale_terms * encoding.query_dim) ** -0.5 if encoding.scale_terms else 1.0
    require(encoding.scale == expected, f"scale is {encoding.scale}, but scale_terms implies {expected}")
    require(bool(encoding.citation.strip()), "citation: missing")
    require(bool((type(encoding).__doc__ or "").strip()), "the class has no docstring")
    return f"{', '.join(sorted(measured.couplings))}; data-dependent {measured.data_dependent}; " + (
        f"Toeplitz {measured.toeplitz}"
    )


def kernel(specimen: Specimen) -> str:
    """`kernel` matches the bias, the inner products of input vectors, or functions that span the logits."""
    encoding, length = specimen.encoding, 40
    if encoding.axes > 1:
        return "skipped: positions have several coordinates"
    p = specimen.positions(length)
    offsets = p.unsqueeze(-1) - p
    values = encoding.kernel(offsets.flatten())
    if values is None:
        require(not encoding.toeplitz or encoding.coupling == "weights", "declared Toeplitz, but it has no kernel")
        return "none"
    values = values.detach().unflatten(-1, offsets.shape)
    if encoding.coupling == "input":
        rows = encoding.embed(torch.zeros(1, length, encoding.d_model, dtype=torch.float64), p)[0]
        specimen.check_close(values[0], rows @ rows.T, "kernel against p_i . p_j", 1e-6)
        return f"Gram matrix, {specimen.max_difference:.0e}"
    if not values.is_complex():
        reason = "as the bias depends on content (a real kernel is the whole bias by offset)"
        require("bias" not in encoding._inputs_argument, f"kernel: must be complex [H, n, D] or None, {reason}")
        bias = encoding.bias(p, p)
        bias = torch.zeros_like(values) if bias is None else bias
        specimen.check_close(values, bias, "kernel against bias", 1e-6)
        return f"bias, {specimen.max_difference:.0e}"
    x = specimen.random_content(1, 1).expand(1, length, -1)
    logits = logits_of(specimen, *specimen.project(x)[:2], x, causal=False)[0].detach()
    for head in range(encoding.num_heads):
        functions = values[head if len(values) > 1 else 0].flatten(1)
        basis = torch.cat((functions.real, functions.imag, torch.ones(1, functions.shape[1]))).double().T
        target = logits[head].flatten().unsqueeze(-1)
        fitted = basis @ torch.linalg.lstsq(basis, target, driver="gelsd").solution
        specimen.check_close(fitted, target, "logits outside the span of the kernel's functions", 1e-6)
    return f"spans the logits, {specimen.max_difference:.0e}"


def positions(specimen: Specimen) -> str:
    """Shared positions and per-sequence positions agree; each sequence can have its own."""
    encoding, length = specimen.encoding, 12
    shared = specimen.positions(length, 3)
    repeated = shared.expand(2, *shared.shape)
    x = specimen.random_content(2, length)
    specimen.check_close(specimen.attend(x, shared), specimen.attend(x, repeated), "positions per sequence")
    rows = encoding.to_positions(torch.stack([torch.arange(length) * 2, torch.arange(length) + 7]))
    if not encoding.length_dependent:  # otherwise the longest sequence decides for all
        batched = specimen.attend(x, rows)
        for b in range(2):
            single = specimen.attend(x[b : b + 1], rows[b])
            specimen.check_close(batched[b : b + 1], single, "a sequence's own positions")
    return f"per sequence, {specimen.max_difference:.0e}"


def causal(specimen: Specimen) -> str:
    """Changing a later token changes the outputs from there on and none before."""
    p, token = specimen.positions(LENGTH), 9
    x = specimen.random_content(2, LENGTH)
    changed = x.clone()
    changed[:, token] += 1.0
    for fused in (True, False):
        before, after = (specimen.attend(y, p, fused=fused) for y in (x, changed))
        (first, later), (other_first, other_later) = (x.split([token, LENGTH - token], dim=2) for x in (before, after))
        specimen.check_close(first, other_first, f"outputs before token {token}, which was changed")
        require(relative_difference(later, other_later) > 1e-6, "a changed token changed nothing after it")
    return "no information from later tokens"


def paths(specimen: Specimen) -> str:
    """Fused, explicit and chunked attention agree, also for a subset of queries."""
    length, batch = 13, 2
    p, x = specimen.positions(length), specimen.random_content(2, length)
    mask = (torch.arange(length) < torch.tensor([[length], [length - 4]]))[:, None, None, :]
    encoding = specimen.encoding
    for masked in (None, mask):
        full = specimen.attend(x, p, mask=masked, fused=False)
        for name, options in {
            "fused": {},
            "chunks": {"pairs_per_chunk": batch * encoding.num_heads * length * 3},
            "explicit chunks": {"pairs_per_chunk": 1, "fused": False},
        }.items():
            specimen.check_close(specimen.attend(x, p, mask=masked, **options), full, f"{name} and explicit")
        embedded = encoding.embed(x, p)
        q, k, v = specimen.project(embedded)
        rows = torch.tensor([[5], [8]])
        queries, expected = (torch.stack([x[b, :, r] for b, r in enumerate(rows)]) for x in (q, full))
        arguments = {**specimen.attention_arguments(embedded, p.expand(batch, *p.shape)), "q_positions": p[rows]}
        out = attend(queries, k, v, rows=rows, mask=masked, **arguments)
        specimen.check_close(out, expected, "one query per sequence")
    return f"fused, explicit, chunks, single queries: {specimen.max_difference:.0e}"


def decoding(specimen: Specimen) -> str:
    """Decoding token by token with a cache of keys, values and key features equals the full pass."""
    encoding, length, start = specimen.encoding, 14, 5
    p = specimen.positions(length, start)
    x = specimen.random_content(2, length)
    full = specimen.attend(x, p)
    for n, out in enumerate(decode_outputs(specimen, x, p)):
        expected = full[:, :, n : n + 1]
        if encoding.length_dependent:
            expected = specimen.attend(x[:, : n + 1], select_positions(encoding, p, slice(0, n + 1)))[:, :, -1:]
        specimen.check_close(out, expected, f"token {n} decoded with a cache")
    return f"with a cache equals the full pass, {specimen.max_difference:.0e}"


def decode_outputs(
    specimen: Specimen, x: Stream, p: Positions, mask: Bool[Tensor, "B 1 1 N"] | None = None
) -> Iterator[Float[Tensor, "B H 1 d"]]:
    """Each token's output in turn, from the cached keys, values and key features of earlier tokens."""
    encoding = specimen.encoding
    keys, values, features = [], [], None
    for n in range(x.shape[1]):
        position, past = (select_positions(encoding, p, slice(start, n + 1)) for start in (n, 0))
        token = encoding.embed(x[:, n : n + 1], position)
        q, k, v = specimen.project(token)
        keys.append(k)
        values.append(v)
        new = encoding.key_features(token, features)
        features = new if features is None or new is None else torch.cat((features, new), dim=2)
        arguments = specimen.attention_arguments(token, past) | {"q_positions": position, "key_features": features}
        past_mask = None if mask is None else mask[..., : n + 1]
        yield attend(q, torch.cat(keys, dim=2), torch.cat(values, dim=2), mask=past_mask, **arguments)


def padding(specimen: Specimen) -> str:
    """A query without visible keys gives 0 on every path; padding gives finite outputs and changes nothing else."""
    encoding, length, pads = specimen.encoding, 11, 4
    p, x = specimen.positions(length), specimen.random_content(2, length).requires_grad_()
    mask = (torch.arange(length) >= torch.tensor([[0], [pads]]))[:, None, None, :]
    width = encoding.num_heads * encoding.head_dim
    merge = torch.randn(width, encoding.d_model, generator=specimen.generator, dtype=x.dtype) / width**0.5
    chunk = 2 * encoding.num_heads * length * 3
    hidden = x
    for layer in ("first", "second"):
        outputs = {
            "fused": specimen.attend(hidden, p, mask=mask),
            "explicit": specimen.attend(hidden, p, mask=mask, fused=False),
            "chunked": specimen.attend(hidden, p, mask=mask, fused=False, pairs_per_chunk=chunk),
            "cached": torch.cat(list(decode_outputs(specimen, hidden, p, mask)), dim=2),
        }
        for name, out in outputs.items():
            require(bool(out.isfinite().all()), f"{name} attention after padding is not finite in the {layer} layer")
            require(not out[1, :, :pads].any(), f"{name} attention of a query that sees no key is not 0")
            if name != "cached" or not encoding.length_dependent:
                specimen.check_close(out, outputs["fused"], f"{name} and fused attention after padding")
        hidden = hidden + outputs["explicit"].transpose(1, 2).flatten(-2) @ merge
    hidden[:, pads:].square().sum().backward()
    real = torch.arange(length) % 3 != 2
    real_positions = specimen.positions(int(real.sum()))
    unpadded = specimen.attend(x[:, real], real_positions)
    padded = specimen.attend(x, real_positions[(real.cumsum(0) - 1).clamp(min=0)], padding=~real.expand(2, -1))
    specimen.check_close(padded[:, :, real], unpadded, "attention with padding between tokens and without it")
    for name, gradient in {"the content": x.grad, **{n: w.grad for n, w in encoding.named_parameters()}}.items():
        require(gradient is None or bool(gradient.isfinite().all()), f"{name} receives a gradient that is not finite")
    return "masked rows are 0 (fused, explicit, chunked, cached), outputs finite, padding between tokens ignored"


def shift(specimen: Specimen) -> str:
    """Shifting all positions changes nothing, if the encoding declares that only offsets matter."""
    encoding = specimen.encoding
    if not encoding.toeplitz or encoding.coupling == "input" or encoding.length_dependent:
        return "not declared"
    x, p = specimen.random_content(2, LENGTH), specimen.positions(LENGTH)
    distances = (1, encoding.max_len - LENGTH) if encoding.bounded else (1, 1000, 100_000)
    for distance in distances:
        specimen.check_close(specimen.attend(x, p + distance), specimen.attend(x, p), f"shift {distance}")
    return f"by {', '.join(map(str, distances))}: {specimen.max_difference:.0e}"


def select_positions(encoding: PositionalEncoding, positions: Positions, rows: slice) -> Positions:
    return positions[rows] if not encoding.is_per_sequence(positions) else positions[:, rows]


FAR_POSITION = 1_048_576
# allowed relative error of a logit against float64: a few dozen roundings; a phase computed in the dtype itself would
# be off by 0.06 (float32) or by anything (bfloat16) at position FAR_POSITION
ROUNDING = {torch.float32: 3e-5, torch.bfloat16: 6e-2}


def precision(specimen: Specimen) -> str:
    """Logits in float32 and bfloat16 are as close to float64 at position 1,048,576 as at 0."""
    worst = dict.fromkeys(ROUNDING, 0.0)
    rejected = 0
    limit = specimen.encoding.max_len if specimen.encoding.bounded else FAR_POSITION + 1
    windows = [torch.arange(12) + start for start in (0, 1000, FAR_POSITION - 11)]
    windows.append(torch.tensor([0, 1, 100, 4097, 65_537, FAR_POSITION]))
    for window in windows:
        if int(window.max()) >= limit:
            continue
        p = specimen.encoding.to_positions(window)
        for dtype, allowed in ROUNDING.items():
            x, cast = specimen.random_content(1, len(window), dtype), specimen.cast_encoding(dtype)
            try:
                q, k, _ = specimen.project(x)
                ours = attention_logits(q, k, **specimen.attention_arguments(x, p, cast))
                cast = cast.double()  # the same rounded queries, keys and parameters
                exact = attention_logits(q.double(), k.double(), **specimen.attention_arguments(x.double(), p, cast))
            except InputError:
                rejected += 1  # an error message is fine: nothing wrong was computed
                continue
            visible = exact.isfinite()
            place_text = f"{str(dtype)[6:]} at positions {window[:2].tolist()}..."
            specimen.check_close(ours[visible], exact[visible], place_text, allowed)
            worst[dtype] = max(worst[dtype], relative_difference(ours[visible], exact[visible]))
    far = f"up to {min(limit - 1, FAR_POSITION):,}" + (f", {rejected} windows rejected" if rejected else "")
    return f"float32 {worst[torch.float32]:.0e}, bfloat16 {worst[torch.bfloat16]:.0e} {far}"


def casts(specimen: Specimen) -> str:
    """`model.half()` and `.to(bfloat16)` round only parameters; phases and slopes are unchanged."""
    encoding = specimen.cast_encoding(torch.float32)
    p = specimen.positions(12, 5000)
    x = specimen.random_content(2, 12, torch.float32)
    before = specimen.logits(x, p, encoding=encoding), encoding.kernel(torch.arange(5))
    state = copy.deepcopy(encoding.state_dict())
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        cast = copy.deepcopy(encoding).to(dtype).float()
        cast.load_state_dict(state)
        after = specimen.logits(x, p, encoding=cast), cast.kernel(torch.arange(5))
        specimen.check_close(after[0], before[0], f"logits after a round trip through {dtype}", 1e-7)
        if before[1] is not None and after[1] is not None:
            ours, theirs = (torch.view_as_real(kernel + 0j) for kernel in (after[1], before[1]))
            specimen.check_close(ours, theirs, f"kernel after {dtype}", 1e-7)
    return "float16, bfloat16, float64 and back leave phases unchanged"


def gradients(specimen: Specimen) -> str:
    """All parameters and the content receive finite, non-zero gradients."""
    encoding = copy.deepcopy(specimen.encoding).train()
    start = 4 * encoding.max_len if encoding.length_dependent else 0  # where the length has an effect
    p, x = specimen.positions(20, start), specimen.random_content(2, 20).requires_grad_()
    out = specimen.attend(x, p, encoding=encoding)
    (out * torch.randn_like(out)).sum().backward()
    tensors = {**dict(encoding.named_parameters()), "the content": x}
    for name, parameter in tensors.items():
        gradient = parameter.grad
        if gradient is None:
            raise CheckFailed(f"{name} receives no gradient")
        require(bool(gradient.isfinite().all()), f"{name} receives a gradient that is not finite")
        require(bool(gradient.any()), f"{name} receives a gradient of zero")
    return f"{len(tensors) - 1} parameters" if len(tensors) > 1 else "no parameters"


def state(specimen: Specimen) -> str:
    """Options and state dict define the encoding: a loaded copy gives bit-identical results."""
    torch.manual_seed(99)
    loaded = randomise(specimen.build(), 98).double()
    loaded.load_state_dict(specimen.encoding.state_dict())
    p, x = specimen.positions(12), specimen.random_content(2, 12)
    require(torch.equal(specimen.attend(x, p), specimen.attend(x, p, encoding=loaded)), "the loaded copy differs")
    return f"{len(specimen.encoding.state_dict())} tensors"


class _LargestTensor(TorchDispatchMode):
    """Remembers the largest storage that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for output in result if isinstance(result, tuple | list) else (result,):
            if isinstance(output, Tensor):
                self.elements = max(self.elements, output.untyped_storage().nbytes() // output.element_size())
        return result


def memory(specimen: Specimen) -> str:
    """No tensor grows with the square of the length, on fused paths and in chunks of queries."""
    encoding = specimen.encoding
    sizes, lengths = {}, (1024, 2048)
    pairs = encoding.num_heads * lengths[0] * 64 * encoding.pair_width
    for length in lengths:
        if encoding.bounded and length > encoding.max_len:
            return "skipped: its table is shorter"
        p = specimen.positions(length)
        x = specimen.random_content(1, length, torch.float32)
        cast = specimen.cast_encoding(torch.float32)
        with torch.no_grad(), _LargestTensor() as largest:
            specimen.attend(x, p, encoding=cast, pairs_per_chunk=pairs)
        sizes[length] = largest.elements
    growth = sizes[lengths[1]] / sizes[lengths[0]]
    require(growth < 2.5, f"the largest tensor grows {growth:.1f}-fold as the length doubles: {sizes}")
    return f"the largest tensor grows {growth:.1f}-fold as the length doubles"


def compiled(specimen: Specimen) -> str:
    """torch.compile compiles it as one graph with the same results; masked rows are 0 there too."""
    encoding, length, pads = specimen.cast_encoding(torch.float32), 12, 4
    p, x = specimen.positions(length), specimen.random_content(2, length, torch.float32)
    mask = (torch.arange(length) >= torch.tensor([[0], [pads]]))[:, None, None, :]

    def run(content: Tensor, token_positions: Tensor) -> tuple[Tensor, Tensor]:
        masked = specimen.attend(content, token_positions, encoding=encoding, mask=mask)
        return specimen.attend(content, token_positions, encoding=encoding), masked

    torch._dynamo.reset()
    try:
        (out, masked), expected = torch.compile(run, backend="aot_eager", fullgraph=True)(x, p), run(x, p)
    finally:
        torch._dynamo.reset()
    difference = max(relative_difference(out, expected[0]), relative_difference(masked, expected[1]))
    require(difference <= 1e-5, f"compiled and eager differ by {difference:.1e}")
    require(not masked[1, :, :pads].any(), "compiled attention of a query that sees no key is not 0")
    return f"one graph, {difference:.0e}"


_ALL = (shapes, facts, kernel, positions, causal, paths, decoding, padding, shift, precision, casts, gradients, state)
# name -> a function of the specimen that returns a description, or raises `CheckFailed`
CHECKS: dict[str, Callable[[Specimen], str]] = {run.__name__: run for run in (*_ALL, memory)} | {"compile": compiled}


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    check: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class ConformanceReport:
    """All results for one encoding."""

    encoding: str
    results: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)

    def __str__(self) -> str:
        width = max(len(result.check) for result in self.results)
        lines = [f"{'ok  ' if f.passed else 'FAIL'} {f.check:<{width}}  {f.detail}" for f in self.results]
        return "\n".join([f"conformance of {self.encoding}", *lines])


class NonConformance(AssertionError):
    """At least one check failed; ``report`` and the message have all results."""

    def __init__(self, report: ConformanceReport) -> None:
        super().__init__(str(report))
        self.report = report


def check(
    encoding: str | type,
    /,
    *,
    strict: bool = True,
    skip: Collection[str] = (),
    sizes: dict[str, int] | None = None,
    **options: Any,
) -> ConformanceReport:
    """Check that an encoding implements `PositionalEncoding` correctly and that its declared attributes are true.

    Arguments
        encoding  a registered name or a class
        strict    raise `NonConformance` if a check fails; otherwise always return the report
        skip      names of checks to skip, from `CHECKS` (``compile`` takes most of the time)
        sizes     d_model, num_heads, head_dim, max_len, if the small defaults do not suit the encoding
        options   the encoding's options

    An encoding that cannot be built from its options raises what `toeplens.encodings.build` raises.
    """
    for field, names, known in (("skip", skip, CHECKS), ("sizes", sizes or {}, SIZES)):
        for name in names:
            choose(field, name, known)
    encoding_class = registry.get(encoding) if isinstance(encoding, str) else encoding
    if not (isinstance(encoding_class, type) and issubclass(encoding_class, PositionalEncoding)):
        raise invalid("encoding", "be a name or a subclass of PositionalEncoding", encoding_class)

    build = partial(encoding_class, **{**SIZES, **(sizes or {})}, **options)
    label = encoding if isinstance(encoding, str) else encoding.__name__
    if options:
        label += f" ({', '.join(f'{name}={value!r}' for name, value in options.items())})"
    results = []
    with torch.random.fork_rng(devices=[]):
        build()  # invalid options raise here
        for name in (name for name in CHECKS if name not in skip):
            try:
                results.append(CheckResult(name, True, CHECKS[name](Specimen(build))))
            except CheckFailed as failure:
                results.append(CheckResult(name, False, str(failure)))
            except Exception as error:  # any exception in the encoding's code is a failure
                message = f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                results.append(CheckResult(name, False, message))
    report = ConformanceReport(label, tuple(results))
    if strict and not report.passed:
        raise NonConformance(report)
    return report
