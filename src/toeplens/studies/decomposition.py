"""Decompose the attention logits of a run, and attribute its class logits; for pages and records."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.backends import DecoderSource, relevance
from toeplens.engine import examples_of
from toeplens.ground import InputError, invalid
from toeplens.ground.records import MaybeNaN, Record
from toeplens.lens import AttentionTrace, LayerTrace, NoForm, Split, ToeplitzProfile, decompose, symbol
from toeplens.lens.kit.terms import written_out_profile
from toeplens.studies.kit.kernels import Decay, KernelEnds, decays_of, kernel_ends
from toeplens.training import Batches, Run, plan_execution

SHOWN = 64  # maximum number of positions in a heat map
TRACED = 128  # maximum number of sequences whose class logits are attributed
ORIGINS = ("content", "position_input", "position_attention", "biases", "softmax")  # parts of a class logit


@dataclass(frozen=True)
class Parts(Record):
    """Shares of a layer, for the logits (``logits``) and the row-centred logits (``softmax``).

    names      names of the parts
    shares     {"logits" or "softmax": [H, P]} shares of the parts, in the order of ``names``
    kinds      {"logits" or "softmax": [H, 3]} shares of position, content, coupled
    named      type of each head
    branches   {"logits" or "softmax": [H, n + 1]} shares of the dimensions without rotation, then of each frequency;
               None without a rotation of pairs
    kernel     [H, D] position kernel: logits of mean contents, by offset
    fixed      [H] Toeplitz share of the position kernel
    error      relative error of the sum of the parts
    """

    names: tuple[str, ...]
    shares: dict[str, Float[np.ndarray, "H P"]]
    kinds: dict[str, Float[np.ndarray, "H 3"]]
    named: list[str]
    branches: dict[str, Float[np.ndarray, "H n1"]] | None
    kernel: Float[np.ndarray, "H D"]
    fixed: Float[np.ndarray, "H"]
    error: float


@dataclass(frozen=True)
class LayerStructure(Record):
    """One layer.

    layer      index from 0
    parts      None if the encoding has no decomposition; ``why`` gives the reason
    offsets    [D] query position minus key position
    means      [H, D] mean logit at each offset, over all sequences
    toeplitz   [H] Toeplitz share of the logits' energy
    explained  [H] share of the logits' variance explained by the offset
    chance     expected explained share for content without structure
    angles     [A] radians per token
    symbol     [H, A] symbol of the position kernel (without parts: of the diagonal means), for its Hermitian part under
               the window 1 - |delta| / N, so that it lies within the eigenvalues of the N x N matrix
    example    [h, n, n] logits of one sequence for the heads in ``heads``; NaN for invisible keys
    heads      [h] the heads in ``example``, those with the largest explained share
    decays     [H] best-fitting decay of each head's ``means``; None for fewer than four distances
    ends       [H] range of the symbol of the mirrored position kernel and of its matrix's eigenvalues; empty without
               parts
    """

    layer: int
    parts: Parts | None
    why: str
    offsets: Int[np.ndarray, "D"]
    means: Float[np.ndarray, "H D"]
    toeplitz: Float[np.ndarray, "H"]
    explained: Float[np.ndarray, "H"]
    chance: float
    angles: Float[np.ndarray, "A"]
    symbol: Float[np.ndarray, "H A"]
    example: Float[np.ndarray, "h n n"]
    heads: list[int]
    decays: list[Decay | None] = field(default_factory=list)
    ends: list[KernelEnds] = field(default_factory=list)


@dataclass(frozen=True)
class Origins(Record):
    """Attribution of the logits of the predicted classes (`toeplens.backends.relevance`), means over sequences.

    sequences  number of sequences
    logit      the logit itself
    parts      by the names in `ORIGINS`: relevance of content, of position at the input and in the attention, of
               biases, and the remainder of the softmax rule; they add up to the logit
    share      share of position in the sum of absolute values of all parts, taken per position
    by_head    [L, H] relevance of position in the attention
    error      largest difference between an example's logit and the sum of its parts, relative to the sum of absolute
               values
    """

    sequences: int
    logit: float
    parts: dict[str, float]
    share: MaybeNaN
    by_head: Float[np.ndarray, "L H"]
    error: float


@dataclass(frozen=True)
class RunStructure(Record):
    """The decomposed layers of a run, and the settings.

    origins     attribution of class logits; None if the rules do not apply to the encoding
    no_origins  the reason
    """

    run: str
    encoding: str
    protocol: str
    task: str
    split: str
    sequences: int
    accuracy: float | None
    layers: list[LayerStructure]
    origins: Origins | None = None
    no_origins: str = ""


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
    spec = run.spec
    place = plan_execution(device, "off", "float32").device
    chosen = Batches.of(examples_of(spec, examples), place)
    source = DecoderSource(run.model().to(place))
    trace = AttentionTrace(source, chosen.tokens, chosen.lengths, layers=layers)
    accuracy = run.result.get("test_accuracy")
    origins, why = _origins(source, chosen.tokens[:TRACED], None if chosen.lengths is None else chosen.lengths[:TRACED])
    return RunStructure(
        spec.name,
        spec.model.encoding,
        spec.model.protocol,
        spec.task,
        split,
        len(chosen.tokens),
        None if accuracy is None else float(accuracy),
        [_layer(trace, layer, split, shown) for layer in trace.layers],
        origins,
        why,
    )


def _origins(source: DecoderSource, tokens: Tensor, lengths: Tensor | None) -> tuple[Origins | None, str]:
    """Attribution of class logits, or the reason why the rules do not apply to the encoding."""
    try:
        found = relevance(source, tokens, lengths)
    except InputError as error:
        return None, str(error).removeprefix("encoding: ")
    sums = {name: getattr(found, name).reshape(len(tokens), -1).sum(1) for name in ORIGINS}
    made = Origins(
        sequences=len(tokens),
        logit=float(found.target.mean()),
        parts={name: float(each.mean()) for name, each in sums.items()},
        share=float(np.nanmean(found.share)) if np.isfinite(found.share).any() else float("nan"),
        by_head=found.by_layer,
        error=float(found.errors.max()),
    )
    return made, ""


def _layer(trace: AttentionTrace, layer: int, split: Split, shown: int) -> LayerStructure:
    found = trace[layer]
    parts: Parts | None = None
    why = ""
    try:
        made = decompose(trace, layer, split=split)
        profile, kernel, branches = made.profile, made.kernel, made.by_frequency()
        parts = Parts(
            made.names,
            _both(made.shares.logits, made.shares.softmax),
            _both(made.kinds.logits, made.kinds.softmax),
            made.named(),
            None if branches is None else _both(branches.logits, branches.softmax),
            kernel.diagonal_means.cpu().numpy(),
            kernel.share.cpu().numpy(),
            made.error,
        )
    except NoForm as error:
        profile = kernel = written_out_profile(found)
        why = str(error).removeprefix("encoding: ")
    heads = torch.argsort(profile.variance_explained.nan_to_num(), descending=True, stable=True)[:shown].sort().values
    angles, values = _symbol(kernel, found.causal)
    counts = profile.counts.double()
    offsets, means = profile.offsets.cpu().numpy(), profile.diagonal_means.cpu().numpy()
    return LayerStructure(
        layer,
        parts,
        why,
        offsets,
        means,
        profile.share.cpu().numpy(),
        profile.variance_explained.cpu().numpy(),
        float((counts > 0).sum() / counts.sum()),
        angles,
        values,
        _example(found, heads),
        heads.tolist(),
        decays_of(offsets, means, np.broadcast_to(counts.cpu().numpy(), means.shape)),
        [] if parts is None else [kernel_ends(row) for row in _mirrored(kernel, found.causal)],
    )


def _both(logits: Tensor, softmax: Tensor) -> dict[str, np.ndarray]:
    return {"logits": logits.cpu().numpy(), "softmax": softmax.cpu().numpy()}


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
