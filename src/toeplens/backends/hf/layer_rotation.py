"""The rotation of one layer of a model, for queries and keys that were captured by other means."""

from __future__ import annotations

from typing import Any, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.backends.hf.calls import AttentionCall, Side
from toeplens.backends.hf.capture import capture_attention
from toeplens.backends.hf.load import open_model
from toeplens.backends.hf.model import device_of, library_errors, tolerance
from toeplens.encodings.rotary import Pairing
from toeplens.lens import RotaryPairs
from toeplens.utils import InputError, choose, invalid

_TOKENS = 64  # tokens of the pass (default)
_MAGNITUDE_ROUNDING = 1e-5  # a magnitude this close to 1 is 1, or closer than its dtype's rounding


class _LayerReached(Exception):
    """Ends the pass at the layer; its argument is the layer's call."""


def read_rotation(model: Any, layer: int, tokens: Int[Tensor, "*_B N"] | None, side: Side | None) -> RotaryPairs:
    """See `toeplens.lens.rotation_of`."""
    loaded = open_model(model)
    model, name = loaded.model, type(loaded.model).__name__
    is_encoder_decoder = bool(model.config.is_encoder_decoder)
    if is_encoder_decoder or side is not None:
        choose("side", side or "", get_args(Side))
    if tokens is None:
        if loaded.vocabulary is None:
            raise InputError(f"tokens must be set: the vocabulary of {name} is unknown.")
        count = torch.arange(min(_TOKENS, loaded.max_length or _TOKENS))
        tokens = loaded.vocabulary // 4 + count % max(1, loaded.vocabulary // 2)  # special tokens are at the ends
    inputs = {"input_ids": torch.atleast_2d(torch.as_tensor(tokens)).to(device_of(model))}
    inputs |= {"decoder_input_ids": inputs["input_ids"]} if is_encoder_decoder else {}
    layers: list[int] = []

    def on_layer(call: AttentionCall) -> None:
        if call.kind == "self" and side in (None, call.side):
            layers.append(call.layer)
            if call.layer == layer:
                raise _LayerReached(call)

    with library_errors(f"model: {name} does not run on these tokens: {{}}."):
        try:
            capture_attention(model, inputs, on_layer)
        except _LayerReached as reached:
            return _as_pairs(reached.args[0], model, f"layer {layer} of {name}")
    raise invalid("layer", f"be from 0 to {len(layers) - 1}, the layers of {name} with attention", layer)


def _as_pairs(call: AttentionCall, model: Any, name: str) -> RotaryPairs:
    """The rotation of a call as pairs in a range of dimensions; ``name`` is that of the layer."""
    rotation = call.rotation
    if call.unknown is not None:
        raise InputError(f"layer: how {name} rotates queries and keys is not known. {call.module}: {call.unknown}")
    if rotation is None:
        raise InputError(f"layer: {name} does not rotate queries and keys.")
    first, before, after = int(rotation.pairs.min()), _pairing_of(rotation.pairs), _pairing_of(rotation.after)
    size, allowed = float(rotation.magnitudes.mean()), tolerance(call.q.dtype)
    if before is None or after is None or bool(((rotation.magnitudes - size).abs() > allowed).any()):
        raise InputError(f"layer: {name} rotates queries and keys, but not pairs of neighbouring dimensions equally.")
    frequencies = _table_values(model, rotation.frequencies, allowed / call.q.shape[2])
    size = 1.0 if abs(size - 1) <= max(_MAGNITUDE_ROUNDING, torch.finfo(call.q.dtype).eps) else size
    _, heads, _, width = call.q.shape
    reordered = None if before == after else after
    return RotaryPairs(frequencies, before, width, first, size, reordered, heads)


def _pairing_of(pairs: Int[Tensor, "n 2"]) -> Pairing | None:
    """How pairs are arranged in a range of dimensions; None if they do not fill one."""
    dimensions = pairs.min() + torch.arange(pairs.numel(), device=pairs.device)
    if torch.equal(pairs, dimensions.view(2, -1).T):
        return "half"
    return "interleaved" if torch.equal(pairs, dimensions.view(-1, 2)) else None


def _table_values(model: Any, measured: Float[Tensor, "n"], allowed: float) -> Float[Tensor, "n"]:
    """The model's own table of frequencies, if one is as close as rounding allows; otherwise those measured."""
    tables = [x.to(measured) for x in model.buffers() if x.is_floating_point() and x.shape == measured.shape]
    nearest = min(tables, key=lambda x: float((x - measured).abs().max()), default=measured)
    return nearest if bool(((nearest - measured).abs() <= allowed).all()) else measured
