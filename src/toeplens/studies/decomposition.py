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

from toeplens.engine import examples_of
from toeplens.ground import InputError, invalid
from toeplens.ground.records import MaybeNaN, Record
from toeplens.lens import AttentionTrace, LayerTrace, NoForm, Split, ToeplitzProfile, decompose, symbol
from toeplens.lens.kit.terms import written_out_profile
from toeplens.sources import DecoderSource, relevance
from toeplens.studies.kit.frames import schema, table
from toeplens.studies.kit.kernels import Decay, KernelEnds, decays_of, kernel_ends
from toeplens.studies.kit.pages import HasPage
from toeplens.training import Batches, Run, plan_execution

SHOWN = 64  # maximum number of positions in a heat map
TRACED = 128  # maximum number of sequences whose class logits are attributed
ORIGINS = ("content", "position_input", "position_attention", "biases", "softmax")  # parts of a class logit


@dataclass(frozen=True)
class Parts(Record):
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
    parts: Parts | None  # None if the encoding has no decomposition
    why: str  # the reason
    offsets: Int[np.ndarray, "D"]  # query position minus key position
    means: Float[np.ndarray, "H D"]  # mean logit at each offset, over all sequences
    toeplitz: Float[np.ndarray, "H"]  # Toeplitz share of the logits' energy
    explained: Float[np.ndarray, "H"]  # share of the logits' variance explained by the offset
    chance: float  # expected explained share for content without structure
    angles: Float[np.ndarray, "A"]  # radians per token
    symbol: Float[np.ndarray, "H A"]
    example: Float[np.ndarray, "h n n"]  # logits of one sequence for some heads; NaN for invisible keys
    heads: list[int]  # these heads: those with the largest explained share
    decays: list[Decay | None] = field(default_factory=list)  # of each head's means; None for fewer than four distances
    # range of the symbol of the mirrored position kernel and of its matrix's eigenvalues; empty without parts
    ends: list[KernelEnds] = field(default_factory=list)


@dataclass(frozen=True)
class Origins(Record):
    """Attribution of the logits of the predicted classes (`toeplens.sources.relevance`), means over sequences.

    The parts, named in `ORIGINS`, are the relevance of content, of position at the input and in the attention, of
    biases, and the remainder of the softmax rule; they add up to the logit.
    """

    sequences: int
    logit: float
    parts: dict[str, float]
    share: MaybeNaN  # of position in the sum of absolute values of all parts, taken per position
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
    origins: Origins | None = None  # attribution of class logits; None if the rules do not apply to the encoding
    no_origins: str = ""  # the reason

    def table_makers(self) -> dict[str, Callable[[], pa.Table]]:
        return {
            "heads": lambda: table(HEADS, self._rows(_head_row)),
            "parts": lambda: table(PARTS, self._rows(_part_rows)),
            "offsets": lambda: table(OFFSETS, self._rows(_offset_rows)),
            "frequencies": lambda: table(FREQUENCIES, self._rows(_frequency_rows)),
            "symbol": lambda: table(SYMBOL, self._rows(_symbol_rows)),
        }

    def _rows(self, of: Callable[[LayerStructure, int], Iterable[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
        for layer in self.layers:
            for head in range(len(layer.toeplitz)):
                yield from ({"layer": layer.layer, "head": head, **row} for row in of(layer, head))


_PLACE = "layer:count head:count"
HEADS = schema("type:text position content coupled toeplitz explained fixed", _PLACE)
PARTS = schema("part:text logits softmax", _PLACE)
OFFSETS = schema("offset:count logit kernel", _PLACE)
FREQUENCIES = schema("pair:count logits softmax", _PLACE)
SYMBOL = schema("angle value", _PLACE)


def _head_row(layer: LayerStructure, head: int) -> Iterable[dict[str, Any]]:
    row: dict[str, Any] = {"toeplitz": float(layer.toeplitz[head]), "explained": float(layer.explained[head])}
    if (parts := layer.parts) is not None:
        row |= dict(zip(("position", "content", "coupled"), map(float, parts.kinds["logits"][head]), strict=True))
        row |= {"type": parts.named[head], "fixed": float(parts.fixed[head])}
    return [row]


def _part_rows(layer: LayerStructure, head: int) -> Iterable[dict[str, Any]]:
    names = layer.parts.names if layer.parts else ()
    return ({"part": name, **_both_of(layer.parts.shares, head, at)} for at, name in enumerate(names) if layer.parts)


def _offset_rows(layer: LayerStructure, head: int) -> Iterable[dict[str, Any]]:
    kernel = layer.parts.kernel[head] if layer.parts else [None] * len(layer.offsets)
    for offset, logit, bias in zip(layer.offsets, layer.means[head], kernel, strict=True):
        yield {"offset": int(offset), "logit": float(logit), "kernel": None if bias is None else float(bias)}


def _frequency_rows(layer: LayerStructure, head: int) -> Iterable[dict[str, Any]]:
    if layer.parts and (shares := layer.parts.branches):
        yield from (
            {"pair": at - 1 if at else None, **_both_of(shares, head, at)} for at in range(shares["logits"].shape[1])
        )


def _symbol_rows(layer: LayerStructure, head: int) -> Iterable[dict[str, Any]]:
    return (
        {"angle": float(angle), "value": float(y)} for angle, y in zip(layer.angles, layer.symbol[head], strict=True)
    )


def _both_of(shares: dict[str, np.ndarray], head: int, at: int) -> dict[str, float]:
    return {name: float(each[head, at]) for name, each in shares.items()}


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
    place = plan_execution(device, "off", "float32").device
    chosen = Batches.of(examples_of(spec, examples), place)
    source = DecoderSource(run.model().to(place))
    trace = AttentionTrace(source, chosen.tokens, chosen.lengths, layers=layers)
    tokens, lengths = chosen.tokens[:TRACED], None if chosen.lengths is None else chosen.lengths[:TRACED]
    origins, why = None, ""
    try:
        found = relevance(source, tokens, lengths)
        origins = Origins(
            sequences=len(tokens),
            logit=float(found.target.mean()),
            parts={name: float(getattr(found, name).reshape(len(tokens), -1).sum(1).mean()) for name in ORIGINS},
            share=float(np.nanmean(found.share)) if np.isfinite(found.share).any() else float("nan"),
            by_head=found.by_layer,
            error=float(found.errors.max()),
        )
    except InputError as error:
        why = str(error).removeprefix("encoding: ")
    return RunStructure(
        *(spec.name, spec.model.encoding, spec.model.protocol, spec.task, split, len(chosen.tokens)),
        None if accuracy is None else float(accuracy),
        [_layer(trace, layer, split, shown) for layer in trace.layers],
        origins,
        why,
    )


def _layer(trace: AttentionTrace, layer: int, split: Split, shown: int) -> LayerStructure:
    found, parts, why = trace[layer], None, ""
    try:
        made = decompose(trace, layer, split=split)
        profile, kernel, branches = made.profile, made.kernel, made.by_frequency()
        parts = Parts(
            made.names,
            _both(made.shares),
            _both(made.kinds),
            made.named(),
            None if branches is None else _both(branches),
            kernel.diagonal_means.cpu().numpy(),
            kernel.share.cpu().numpy(),
            made.error,
        )
    except NoForm as error:
        profile = kernel = written_out_profile(found)
        why = str(error).removeprefix("encoding: ")
    heads = torch.argsort(profile.variance_explained.nan_to_num(), descending=True, stable=True)[:shown].sort().values
    counts = profile.counts.double()
    offsets, means = profile.offsets.cpu().numpy(), profile.diagonal_means.cpu().numpy()
    return LayerStructure(
        *(layer, parts, why, offsets, means),
        profile.share.cpu().numpy(),
        profile.variance_explained.cpu().numpy(),
        float((counts > 0).sum() / counts.sum()),
        *_symbol(kernel, found.causal),
        _example(found, heads),
        heads.tolist(),
        decays_of(offsets, means, np.broadcast_to(counts.cpu().numpy(), means.shape)),
        [] if parts is None else [kernel_ends(row) for row in _mirrored(kernel, found.causal)],
    )


def _both(shares: Any) -> dict[str, np.ndarray]:
    return {name: getattr(shares, name).cpu().numpy() for name in ("logits", "softmax")}


def _mirrored(kernel: ToeplitzProfile, causal: bool) -> Float[np.ndarray, "H D"]:
    """The kernel's Hermitian part, up to the longest sequence; a causal kernel is mirrored."""
    means = kernel.diagonal_means[:, kernel.counts > 0].cpu().numpy()
    return np.concatenate((means[:, :0:-1], means), axis=1) if causal else (means + means[:, ::-1]) / 2


def _symbol(kernel: ToeplitzProfile, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """The symbol of `_mirrored` under the window."""
    both = _mirrored(kernel, causal)
    size = (both.shape[1] + 1) // 2
    angles, values = symbol(both * (1 - np.abs(np.arange(-size + 1, size)) / size), max(256, 4 * size))
    return angles, np.real(values)


def _example(layer: LayerTrace, heads: Tensor) -> np.ndarray:
    longest = int(layer.present.sum(1).argmax())
    size = int(layer.present[longest].sum())
    kept = torch.arange(max(0, size - SHOWN), size, device=layer.q.device)
    logits = layer.logits(sequences=slice(longest, longest + 1), queries=kept)[0, heads][..., kept]
    return logits.masked_fill(~logits.isfinite(), torch.nan).cpu().numpy()
