"""Decompose the attention logits of a run, and attribute its class logits; for pages and records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.backends import DecoderSource, relevance
from toeplens.engine import examples_of
from toeplens.lens import AttentionTrace, LayerTrace, NotSeparable, Split, ToeplitzProfile, decompose, symbol
from toeplens.lens.kit.terms import dense_profile
from toeplens.studies.kit.frames import schema, table
from toeplens.studies.kit.kernels import KernelDecay, SpectrumRange, decays_of, spectrum_range
from toeplens.studies.kit.pages import HasPage
from toeplens.training import Batches, Run, plan_execution
from toeplens.utils import InputError, invalid
from toeplens.utils.records import FloatOrNaN, Record

MAX_SHOWN = 64  # maximum number of positions in a heat map
MAX_ATTRIBUTED = 128  # maximum number of sequences whose class logits are attributed
LOGIT_PARTS = ("content", "position_input", "position_attention", "biases", "softmax")  # parts of a class logit


@dataclass(frozen=True)
class LayerShares(Record):
    """Shares of a layer, for the logits (``logits``) and the row-centred logits (``softmax``)."""

    names: tuple[str, ...]  # of the parts
    shares: dict[str, Float[np.ndarray, "H P"]]  # of the parts
    kinds: dict[str, Float[np.ndarray, "H 3"]]  # shares of position, content, coupled
    named: list[str]  # type of each head
    # shares of the dimensions without rotation, then of each frequency; None without a rotation of pairs
    branches: dict[str, Float[np.ndarray, "H n1"]] | None
    kernel: Float[np.ndarray, "H D"]  # position kernel: logits of mean contents, by offset
    fixed: Float[np.ndarray, "H"]  # Toeplitz share of the position kernel
    error: float  # relative, of the sum of the parts


@dataclass(frozen=True)
class LayerStructure(Record):
    """One layer.

    The symbol is that of the position kernel (without parts: of the diagonal means), for its Hermitian part under the
    window 1 - |delta| / N, so that it lies within the eigenvalues of the N x N matrix.
    """

    layer: int
    parts: LayerShares | None  # None if the encoding has no decomposition
    reason: str  # the reason
    offsets: Int[np.ndarray, "D"]  # query position minus key position
    means: Float[np.ndarray, "H D"]  # mean logit at each offset, over all sequences
    toeplitz: Float[np.ndarray, "H"]  # Toeplitz share of the logits' energy
    explained: Float[np.ndarray, "H"]  # share of the logits' variance explained by the offset
    chance: float  # expected explained share for content without structure
    angles: Float[np.ndarray, "A"]  # radians per token
    symbol: Float[np.ndarray, "H A"]
    example: Float[np.ndarray, "h n n"]  # logits of one sequence for some heads; NaN for invisible keys
    heads: list[int]  # these heads: those with the largest explained share
    decays: list[KernelDecay | None] = field(default_factory=list)  # of the means; None for fewer than four distances
    # range of the symbol of the mirrored position kernel and of its matrix's eigenvalues; empty without parts
    ends: list[SpectrumRange] = field(default_factory=list)


@dataclass(frozen=True)
class LogitAttribution(Record):
    """Attribution of the logits of the predicted classes (`toeplens.backends.relevance`), means over sequences.

    The parts, named in `LOGIT_PARTS`, are the relevance of content, of position at the input and in the attention, of
    biases, and the remainder of the softmax rule; they add up to the logit.
    """

    sequences: int
    logit: float
    parts: dict[str, float]
    share: FloatOrNaN  # of position in the sum of absolute values of all parts, taken per position
    by_head: Float[np.ndarray, "L H"]  # relevance of position in the attention
    error: float  # largest difference of a logit from the sum of its parts, relative to the sum of absolute values


@dataclass(frozen=True)
class RunStructure(HasPage, Record):
    """The decomposed layers of a run, and the settings."""

    PAGE = "toeplens.report.decomposition:structure_page"

    run: str
    encoding: str
    protocol: str
    task: str
    split: str
    sequences: int
    accuracy: float | None
    layers: list[LayerStructure]
    origins: LogitAttribution | None = None  # of class logits; None if the rules do not apply to the encoding
    no_origins: str = ""  # the reason

    def table_makers(self) -> dict[str, Callable[[], pa.Table]]:
        return {
            "heads": lambda: table(HEADS, self._rows(_head_row)),
            "parts": lambda: table(PARTS, self._rows(_part_rows)),
            "offsets": lambda: table(OFFSETS, self._rows(_offset_rows)),
            "frequencies": lambda: table(FREQUENCIES, self._rows(_frequency_rows)),
            "symbol": lambda: table(SYMBOL, self._rows(_symbol_rows)),
        }

    def _rows(self, rows_of: Callable[[LayerStructure, int], Iterable[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
        for layer in self.layers:
            for head in range(len(layer.toeplitz)):
                yield from ({"layer": layer.layer, "head": head, **row} for row in rows_of(layer, head))


_KEY_COLUMNS = "layer:count head:count"
HEADS = schema("type:text position content coupled toeplitz explained fixed", _KEY_COLUMNS)
PARTS = schema("part:text logits softmax", _KEY_COLUMNS)
OFFSETS = schema("offset:count logit kernel", _KEY_COLUMNS)
FREQUENCIES = schema("pair:count logits softmax", _KEY_COLUMNS)
SYMBOL = schema("angle value", _KEY_COLUMNS)


def _head_row(layer: LayerStructure, head: int) -> Iterable[dict[str, Any]]:
    row: dict[str, Any] = {"toeplitz": float(layer.toeplitz[head]), "explained": float(layer.explained[head])}
    if (parts := layer.parts) is not None:
        row |= dict(zip(("position", "content", "coupled"), map(float, parts.kinds["logits"][head]), strict=True))
        row |= {"type": parts.named[head], "fixed": float(parts.fixed[head])}
    return [row]


def _part_rows(layer: LayerStructure, head: int) -> Iterable[dict[str, Any]]:
    names = layer.parts.names if layer.parts else ()
    return ({"part": name, **_share_pair(layer.parts.shares, head, i)} for i, name in enumerate(names) if layer.parts)


def _offset_rows(layer: LayerStructure, head: int) -> Iterable[dict[str, Any]]:
    kernel = layer.parts.kernel[head] if layer.parts else [None] * len(layer.offsets)
    for offset, logit, bias in zip(layer.offsets, layer.means[head], kernel, strict=True):
        yield {"offset": int(offset), "logit": float(logit), "kernel": None if bias is None else float(bias)}


def _frequency_rows(layer: LayerStructure, head: int) -> Iterable[dict[str, Any]]:
    if layer.parts and (shares := layer.parts.branches):
        for i in range(shares["logits"].shape[1]):
            yield {"pair": i - 1 if i else None, **_share_pair(shares, head, i)}


def _symbol_rows(layer: LayerStructure, head: int) -> Iterable[dict[str, Any]]:
    return ({"angle": float(x), "value": float(y)} for x, y in zip(layer.angles, layer.symbol[head], strict=True))


def _share_pair(shares: dict[str, np.ndarray], head: int, i: int) -> dict[str, float]:
    return {name: float(values[head, i]) for name, values in shares.items()}


def decompose_run(
    run: Run,
    *,
    split: Split = "mean",
    examples: int = 256,
    layers: list[int] | None = None,
    shown: int = 4,
    device: str = "auto",
) -> RunStructure:
    """Decompose the attention logits of a finished run's model on its test set.

    Arguments
        split     estimator of the position part (see `toeplens.lens.position_parts`)
        examples  number of sequences
        layers    layers to decompose, from 0 (default: all)
        shown     heads per layer whose logits are kept for a heat map
        device    ``auto``, ``cpu``, ``cuda`` or ``cuda:N``
    """
    if examples < 1:
        raise invalid("examples", "be at least 1", examples)
    if run.status == "diverged":
        raise InputError(f"run: {run.directory} diverged, so it has no finite weights.")
    spec, accuracy = run.spec, run.result.get("test_accuracy")
    target = plan_execution(device, "off", "float32").device
    batch = Batches.of(examples_of(spec, examples), target)
    source = DecoderSource(run.model().to(target))
    trace = AttentionTrace(source, batch.tokens, batch.lengths, layers=layers)
    tokens, lengths = batch.tokens[:MAX_ATTRIBUTED], None if batch.lengths is None else batch.lengths[:MAX_ATTRIBUTED]
    origins, reason = None, ""
    try:
        result = relevance(source, tokens, lengths)
        origins = LogitAttribution(
            sequences=len(tokens),
            logit=float(result.target.mean()),
            parts={name: float(getattr(result, name).reshape(len(tokens), -1).sum(1).mean()) for name in LOGIT_PARTS},
            share=float(np.nanmean(result.share)) if np.isfinite(result.share).any() else float("nan"),
            by_head=result.by_layer,
            error=float(result.errors.max()),
        )
    except InputError as error:
        reason = str(error).removeprefix("encoding: ")
    return RunStructure(
        *(spec.name, spec.model.encoding, spec.model.protocol, spec.task, split, len(batch.tokens)),
        None if accuracy is None else float(accuracy),
        [_decompose_layer(trace, layer, split, shown) for layer in trace.layers],
        origins,
        reason,
    )


def _decompose_layer(trace: AttentionTrace, layer: int, split: Split, shown: int) -> LayerStructure:
    traced, parts, reason = trace[layer], None, ""
    try:
        split_logits = decompose(trace, layer, split=split)
        profile, kernel, branches = split_logits.profile, split_logits.kernel, split_logits.by_frequency()
        parts = LayerShares(
            split_logits.names,
            _share_arrays(split_logits.shares),
            _share_arrays(split_logits.kinds),
            split_logits.head_kinds(),
            None if branches is None else _share_arrays(branches),
            kernel.diagonal_means.cpu().numpy(),
            kernel.share.cpu().numpy(),
            split_logits.error,
        )
    except NotSeparable as error:
        profile = kernel = dense_profile(traced)
        reason = str(error).removeprefix("encoding: ")
    heads = torch.argsort(profile.variance_explained.nan_to_num(), descending=True, stable=True)[:shown].sort().values
    counts = profile.counts.double()
    offsets, means = profile.offsets.cpu().numpy(), profile.diagonal_means.cpu().numpy()
    return LayerStructure(
        *(layer, parts, reason, offsets, means),
        profile.share.cpu().numpy(),
        profile.variance_explained.cpu().numpy(),
        float((counts > 0).sum() / counts.sum()),
        *_symbol(kernel, traced.causal),
        _example(traced, heads),
        heads.tolist(),
        decays_of(offsets, means, np.broadcast_to(counts.cpu().numpy(), means.shape)),
        [] if parts is None else [spectrum_range(row) for row in _mirror_kernel(kernel, traced.causal)],
    )


def _share_arrays(shares: Any) -> dict[str, np.ndarray]:
    return {name: getattr(shares, name).cpu().numpy() for name in ("logits", "softmax")}


def _mirror_kernel(kernel: ToeplitzProfile, causal: bool) -> Float[np.ndarray, "H D"]:
    """The kernel's Hermitian part, up to the longest sequence; a causal kernel is mirrored."""
    means = kernel.diagonal_means[:, kernel.counts > 0].cpu().numpy()
    return np.concatenate((means[:, :0:-1], means), axis=1) if causal else (means + means[:, ::-1]) / 2


def _symbol(kernel: ToeplitzProfile, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """The symbol of `_mirrored` under the window."""
    mirrored = _mirror_kernel(kernel, causal)
    size = (mirrored.shape[1] + 1) // 2
    angles, values = symbol(mirrored * (1 - np.abs(np.arange(-size + 1, size)) / size), max(256, 4 * size))
    return angles, np.real(values)


def _example(layer: LayerTrace, heads: Tensor) -> np.ndarray:
    longest = int(layer.present.sum(1).argmax())
    size = int(layer.present[longest].sum())
    shown = torch.arange(max(0, size - MAX_SHOWN), size, device=layer.q.device)
    logits = layer.logits(sequences=slice(longest, longest + 1), queries=shown)[0, heads][..., shown]
    return logits.masked_fill(~logits.isfinite(), torch.nan).cpu().numpy()
