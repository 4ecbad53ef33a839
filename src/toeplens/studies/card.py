"""The card of an encoding: measured properties, kernel, symbol, resolution and cost."""

from __future__ import annotations

import copy
import inspect
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toeplens import encodings
from toeplens.encodings import PositionalEncoding, attend, attention_weights, conformance
from toeplens.lens.toeplitz.spectrum import symbol
from toeplens.studies.kit.pages import HasPage
from toeplens.utils import InputError
from toeplens.utils.options import check_range

MAX_DISTANCE = 1_048_576  # largest distance tested for the resolution
# dtypes of the resolution
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_MOST_TOKENS = 4096  # logits of longer sequences take gigabytes
_PROFILE_ROWS = 64  # last queries of a sequence, over which attention by distance is averaged


@dataclass(frozen=True)
class Cost:
    """Cost of the attention of one layer, relative to no encoding on the same machine."""

    forward: float  # time of a forward pass; fastest of several runs
    step: float  # of forward plus backward
    peak: float  # peak memory of such a step
    parameters: int  # learned parameters per layer
    shared: bool  # whether all layers share them


@dataclass(frozen=True)
class Card(HasPage):
    """The content of a card.

    The symbol of the kernel is averaged over frequencies, under the window 1 - |delta| / M, where M is ``max_len``.
    This is the Rayleigh quotient of the M x M Toeplitz matrix and a wave of that angle, so it lies within the
    eigenvalues.

    The profile is the attention by distance 0 .. R-1: weight of a key times the number of visible keys, averaged over
    random contents; 1 if position makes no difference. Queries and keys share a common component, so that logits
    without position have mean 2 and standard deviation 1: the effect of a rotation on similar contents would not be
    visible with unrelated contents.
    """

    PAGE = "toeplens.report.card:card_page"

    name: str
    options: dict[str, Any]
    sizes: dict[str, int]
    citation: str
    formula: str
    about: str
    declared: conformance.EncodingProperties
    measured: conformance.EncodingProperties
    report: conformance.ConformanceReport
    offsets: Int[np.ndarray, "D"]  # -(M-1) .. M-1, at which the kernel was evaluated
    # a bias, or inner products of input vectors; complex rows per frequency for a rotation. H is 1 if heads are equal
    kernel: Float[np.ndarray, "H D"] | Complex[np.ndarray, "H n D"] | None
    angles: Float[np.ndarray, "P"] | None  # of the symbol, in radians
    symbol: Float[np.ndarray, "H P"] | None  # None without a kernel, or if the kernel is infinite
    profile: Float[np.ndarray, "H R"]
    # by dtype, the first distance d (input vectors: position) at which d and d + 1 round to the same value; None if
    # there is none up to 1,048,576; None as a whole without a fixed table of values
    resolution: dict[str, int | None] | None
    cost: Cost

    def to_dict(self) -> dict[str, Any]:
        """The card as JSON; curves at distances 0, 1, 2, 4, 8, ..."""
        distances = [d for d in (0, *(2**e for e in range(30))) if d <= int(self.offsets[-1])]
        middle = len(self.offsets) // 2
        curve = None if self.kernel is None else real_curves(self.kernel)[:, [middle + d for d in distances]].tolist()
        return {
            **{name: getattr(self, name) for name in ("name", "options", "sizes", "citation", "formula")},
            "measured": {
                "couplings": sorted(self.measured.couplings),
                "data_dependent": self.measured.data_dependent,
                "toeplitz": self.measured.toeplitz,
            },
            "conforms": self.report.passed,
            "findings": {finding.check: finding.detail for finding in self.report.results},
            "distances": distances,
            "kernel": curve,
            "attention_by_distance": [
                {"distance": d, "mean": float(m)} for d, m in enumerate(self.profile.mean(0)) if d in distances
            ],
            "resolution": self.resolution,
            "cost": {"forward": self.cost.forward, "step": self.cost.step, "peak": self.cost.peak},
            "parameters": self.cost.parameters,
        }


def real_curves(kernel: np.ndarray) -> Float[np.ndarray, "H D"]:
    """A kernel as one real curve per head; a rotation is averaged over its frequencies."""
    return np.real(kernel).mean(1) if kernel.ndim == 3 else kernel


def make_card(name: str, *, length: int = 512, rounds: int = 7, **options: Any) -> Card:
    """Measure an encoding's card at initialisation: 8 heads of 32 dimensions, ``length`` positions.

    For combined encodings (``rope + fox``), ``options`` holds the options of each by name.
    ``rounds`` is the number of timing runs, alternating with runs without encoding.
    """
    check_range("length", length, 2 * _PROFILE_ROWS, _MOST_TOKENS)
    sizes = {"d_model": 256, "num_heads": 8, "head_dim": 32, "max_len": length}
    name, kind = encodings.canonical_name(name), encodings.get(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoding = encodings.build(name, **sizes, **options).eval()
        report = conformance.check(name, strict=False, **options)
        specimen = conformance.Specimen(lambda: encodings.build(name, **conformance.SIZES, **options))
        measured = conformance.measure_properties(specimen)
        declared = conformance.declared_properties(specimen.encoding)
        offsets, kernel = np.arange(1 - length, length), None
        if encoding.axes == 1:
            tensor = encoding.kernel(torch.from_numpy(offsets))
            kernel = None if tensor is None else tensor.detach().numpy()
        angles = values = None
        if kernel is not None and np.isnan(kernel).any():
            raise InputError(
                f"encoding: the kernel of {name!r} is not finite at some distances, so it cannot be drawn."
            )
        if kernel is not None and np.isfinite(kernel).all():
            angles, values = symbol_of(offsets, kernel)
        several = len(encodings.split_names(name)) > 1
        merged = {f"{part}.{n}": v for part, opts in options.items() for n, v in opts.items()} if several else options
        return Card(
            name=name,
            options={**{n: p.default for n, p in encodings.options(name).items()}, **merged},
            sizes=sizes,
            citation=kind.citation,
            formula=kind.formula,
            about=inspect.getdoc(kind) or "",
            declared=declared,
            measured=measured,
            report=report,
            offsets=offsets,
            kernel=kernel,
            angles=angles,
            symbol=values,
            profile=_profile(encoding),
            resolution=_resolution(encoding),
            cost=_cost(encoding, encodings.build("nope", **sizes), rounds),
        )


def symbol_of(offsets: Int[np.ndarray, "D"], kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Angles and the real part of a kernel's symbol (see `Card`); rounding errors around 0 are set to 0."""
    length = int(offsets[-1]) + 1
    rows = real_curves(kernel).astype(np.float64) * (1 - np.abs(offsets) / length)
    angles, transform = symbol(rows, 4 * length)
    values = np.real(transform)
    return angles, np.where(np.abs(values) > 1e-13 * np.abs(rows).sum(-1, keepdims=True), values, 0.0)


def _project(encoding: PositionalEncoding, batch: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Random embedded tokens with their queries, keys and values, all of unit variance."""
    d_model, length = encoding.d_model, encoding.max_len
    positions = encoding.to_positions(torch.arange(length))
    x = encoding.embed(torch.randn(batch, length, d_model, dtype=dtype), positions)
    weights = torch.randn(2, encoding.num_heads, d_model, encoding.query_dim, dtype=dtype) * d_model**-0.5
    q, k = (x.unsqueeze(1) @ weight for weight in weights)
    v = torch.randn(batch, encoding.num_heads, length, encoding.head_dim, dtype=dtype)
    return x, q, k, v, positions


@torch.no_grad()
def _profile(encoding: PositionalEncoding, batch: int = 4, draws: int = 4) -> Float[np.ndarray, "H R"]:
    length = encoding.max_len
    rows = torch.arange(length - _PROFILE_ROWS, length)
    reach = length - _PROFILE_ROWS + 1  # distances that exist for all of these queries
    columns = rows.unsqueeze(-1) - torch.arange(reach)
    total = torch.zeros(encoding.num_heads, reach)
    common = torch.nn.functional.normalize(torch.randn(encoding.num_heads, 1, encoding.query_dim), dim=-1)
    common = common * (2 * encoding.query_dim**0.5) ** 0.5
    for _ in range(draws):
        x, q, k, _, positions = _project(encoding, batch)
        weights = attention_weights(
            q[:, :, -_PROFILE_ROWS:] + common,
            k + common,
            encoding=encoding,
            q_positions=positions[-_PROFILE_ROWS:],
            k_positions=positions,
            scale=encoding.query_dim**-0.5,
            key_features=encoding.key_features(x),
        )
        relative = weights * (rows + 1).unsqueeze(-1)
        total += relative.gather(-1, columns.expand(*relative.shape[:2], -1, -1)).mean((0, 2))
    return (total / draws).numpy()


@torch.no_grad()
def _resolution(encoding: PositionalEncoding, chunk: int = 1 << 14) -> dict[str, int | None] | None:
    """By dtype, the first d at which distances (input vectors: positions) d and d + 1 round to the same value."""
    if encoding.axes > 1 or encoding.coupling == "none":
        return None
    encoding = copy.deepcopy(encoding).double()
    resolution: dict[str, int | None] = dict.fromkeys(DTYPES)
    limit = encoding.max_len - 1 if encoding.bounded else MAX_DISTANCE
    for start in range(0, limit, chunk):
        pos = torch.arange(start, min(start + chunk, limit) + 1)
        if encoding.coupling == "input":
            table = encoding.embed(torch.zeros(1, len(pos), encoding.d_model, dtype=torch.float64), pos)[0].T
        else:
            kernel = encoding.kernel(pos)
            if kernel is None:
                return None
            table = torch.view_as_real(kernel).movedim(-1, 0) if kernel.is_complex() else kernel
            table = table.flatten(0, -2)
        for name in [name for name, distance in resolution.items() if distance is None]:
            rounded = table.to(DTYPES[name])
            same = (rounded[:, 1:] == rounded[:, :-1]).all(0).nonzero()
            if len(same):
                resolution[name] = start + int(same[0, 0])
        if None not in resolution.values():
            break
    return resolution


def _cost(encoding: PositionalEncoding, plain: PositionalEncoding, rounds: int) -> Cost:
    runs = [_attention_step(variant) for variant in (encoding, plain)]
    times: dict[tuple[int, bool], list[float]] = {(i, grad): [] for i in range(2) for grad in (False, True)}
    for _ in range(rounds + 1):
        for (index, grad), seconds in times.items():
            start = time.perf_counter()
            with torch.set_grad_enabled(grad):
                out = runs[index]()
                if grad:
                    out.sum().backward()
            seconds.append(time.perf_counter() - start)
    fastest = {case: min(seconds[1:]) for case, seconds in times.items()}  # the first round is a warm-up
    return Cost(
        forward=fastest[0, False] / fastest[1, False],
        step=fastest[0, True] / fastest[1, True],
        peak=_peak_memory(runs[0]) / _peak_memory(runs[1]),
        parameters=sum(parameter.numel() for parameter in encoding.parameters() if parameter.requires_grad),
        shared=encoding.shared,
    )


def _attention_step(encoding: PositionalEncoding, batch: int = 4) -> Callable[[], Tensor]:
    """A function that runs the attention of one layer on fixed random content."""
    with torch.no_grad():
        x, q, k, v, positions = _project(encoding, batch)
    q, k, v = (part.requires_grad_() for part in (q, k, v))
    options = {"q_positions": positions, "k_positions": positions, "scale": encoding.query_dim**-0.5}
    return lambda: attend(q, k, v, encoding=encoding, **options, key_features=encoding.key_features(x))


class _MemoryTracker(TorchDispatchMode):
    """Tracks the bytes of live storages, and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (key := (storage := leaf.untyped_storage())._cdata) not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self.peak = max(self.peak, sum(self._sizes.values()))
                weakref.finalize(storage, self._sizes.pop, key)
        return result


def _peak_memory(run: Callable[[], Tensor]) -> int:
    """Peak memory of a forward and backward pass, in bytes on top of existing storages."""
    with _MemoryTracker() as tracker:
        run().sum().backward()
    return tracker.peak
