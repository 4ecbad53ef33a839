"""RoPE from a model's configuration: any type, per layer type, per axis, or with a position-dependent temperature."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

from toeplens.encodings.absolute import NoPE
from toeplens.encodings.axial import axes_of_pairs, phases_along
from toeplens.encodings.base import SIZES, PositionalEncoding
from toeplens.encodings.kit import require_number, widened
from toeplens.encodings.scaled import ScaledRoPE
from toeplens.encodings.scaling import RULES, every_keyword, keywords, length_of
from toeplens.encodings.shapes import Frequencies, Keys, Positions, Queries, Turned
from toeplens.ground import InputError, invalid

_COMMON = (*SIZES, "pairing")  # the same for all layer types


class ConfiguredRoPE(ScaledRoPE):
    """The rotation of a transformers model, from its configuration's ``rope_parameters``.

    ``build("scaled-rope", max_len=config.max_position_embeddings, layer_types=config.layer_types, **sizes,
    **config.rope_parameters)``. ``layer_types`` is only needed if the parameters are nested by layer type. Each type's
    parameters are then under its name, or None if that type has no rotation. All layers must have the same head size.

    Arguments in addition to those of `ScaledRoPE`
        layer_types           the type of each layer
        mrope_section         pairs of time, height and width, as in `MRoPE`; positions have these three coordinates
        mrope_interleaved     alternate the axes, as Qwen3-VL's code does even if its configuration does not say so
        llama_4_scaling_beta  queries are multiplied by 1 + beta ln(1 + floor(i / original_max_position_embeddings))
                              after the rotation (Ministral 3, after Llama 4's temperature)

        short_mscale, long_mscale  factors of queries and keys up to and beyond the original length, instead of
                              ``attention_factor`` (longrope: Phi-3.5-MoE)
        alpha                 instead of ``factor``: growth of the base at all lengths, as in ``ntk`` (dynamic: Hunyuan)
        attn_factor, finetuned  ignored with a warning, as in transformers; so are keywords of other types

    As in transformers, ``rope_type`` takes precedence over ``type``. The original length defaults to
    ``max_position_embeddings``, and a ``beta_fast`` or ``beta_slow`` of 0 means the default. The ``type`` ``mrope`` of
    Qwen2-VL's configurations is ``default``, and Phi-3's ``su`` is ``longrope``. The type ``axial`` of vision models is
    not supported, because each model's code implements it differently; see `AxialRoPE`.
    """

    temperature: float = 0.0
    step: float = 1.0  # positions per step of the temperature
    layer_types: tuple[str, ...] = ()
    mscales: tuple[float, float] | None = None  # up to the original length, and beyond

    def __init__(
        self,
        *,
        layer_types: Sequence[str] | None = None,
        mrope_section: Sequence[int] | None = None,
        mrope_interleaved: bool | None = None,
        llama_4_scaling_beta: float | None = None,
        short_mscale: float | None = None,
        long_mscale: float | None = None,
        alpha: float | None = None,
        attn_factor: float | None = None,
        finetuned: bool | None = None,
        **parameters: Any,
    ) -> None:
        types = () if layer_types is None else tuple(layer_types)
        nested = [name for name, value in parameters.items() if name in types or isinstance(value, Mapping)]
        if nested:
            by_type = {name: parameters.pop(name) for name in nested}
            flat = {"mrope_section": mrope_section, "llama_4_scaling_beta": llama_4_scaling_beta, **parameters}
            self._take_types(types, by_type, flat)
            return
        beside = {"short_mscale": short_mscale, "long_mscale": long_mscale, "alpha": alpha}
        beside |= {"attn_factor": attn_factor, "finetuned": finetuned}
        original = parameters.get("original_max_position_embeddings")  # which llama_4_scaling_beta reads
        taken, mscales = _as_transformers(parameters, beside, reads_original=llama_4_scaling_beta is not None)
        super().__init__(**taken)
        if mscales is not None:
            self.mscales = mscales
            self.magnitude = mscales[self.max_len > self.until]
        if mrope_section is not None:
            axis_of = axes_of_pairs("mrope_section", mrope_section, self.frequencies.shape[-1], bool(mrope_interleaved))
            self.axes = 3
            self.axis_of = self.register_exact("axis_of", torch.tensor(axis_of))
        if llama_4_scaling_beta is not None:
            self.temperature = require_number("llama_4_scaling_beta", llama_4_scaling_beta, at_least=0)
            step = taken.get("original_max_position_embeddings", original)
            if step is None or self.axes > 1:
                why = "needs original_max_position_embeddings" if step is None else "must not be set with mrope_section"
                raise InputError(f"llama_4_scaling_beta {why}.")
            self.step, self.toeplitz = step, self.temperature == 0

    def _take_types(
        self, layer_types: tuple[str, ...], by_type: Mapping[str, Mapping[str, Any] | None], flat: dict[str, Any]
    ) -> None:
        """Build one rotation per layer type; this instance takes the first type that has a rotation."""
        common = {name: flat.pop(name) for name in _COMMON if name in flat}
        beside = next((name for name, value in flat.items() if value is not None), None)
        if beside is not None:
            raise InputError(f"{beside} must not be set with parameters by layer type.")
        for layer, kind in enumerate(layer_types):
            if kind not in by_type:
                raise InputError(f"layer_types: layer {layer} has type {kind!r}, which has no parameters.")
        turned = {kind: dict(own) for kind in dict.fromkeys(layer_types) if (own := by_type[kind]) is not None}
        if not turned:
            raise InputError("layer_types: no layer type has parameters. Use encoding 'nope'.")
        first = next(iter(turned))
        ConfiguredRoPE.__init__(self, **common, **turned[first])
        self.layer_types, self.own_type = layer_types, first
        self.others = nn.ModuleDict(
            {kind: ConfiguredRoPE(**common, **parameters) for kind, parameters in turned.items() if kind != first}
        )
        if any(other.axes != self.axes for other in self.others.values()):
            raise InputError("mrope_section must be set for all layer types or for none.")
        self.toeplitz = all(each.toeplitz for each in (self, *self.others.values()))
        if len(turned) < len(set(layer_types)):
            self.layers = frozenset(layer for layer, kind in enumerate(layer_types) if kind in turned)

    def for_layer(self, layer: int) -> PositionalEncoding:
        if not self.layer_types:
            return self
        if layer >= len(self.layer_types):
            raise invalid(
                "layer_types",
                f"have an entry for layer {layer}, counted from 0",
                got=f"{len(self.layer_types)} entries",
            )
        kind = self.layer_types[layer]
        if kind == self.own_type:
            return self
        if kind in self.others:
            return cast(ConfiguredRoPE, self.others[kind])
        return NoPE(**self.sizes)

    def place(self, tokens: Int[Tensor, "*B N"]) -> Positions:
        """Token indices; with ``mrope_section``, three equal coordinates as for text."""
        return tokens if self.axes == 1 else tokens.unsqueeze(-1).expand(*tokens.shape, self.axes)

    def frequencies_at(self, k_positions: Positions) -> Frequencies:
        return super().frequencies_at(k_positions.amax(-1) if self._has_coordinates(k_positions) else k_positions)

    def phases(self, positions: Positions, frequencies: Frequencies) -> Float[Tensor, "*B H N n"]:
        if not self._has_coordinates(positions):
            return super().phases(positions, frequencies)
        return phases_along(positions.to(torch.float64), self.axis_of, frequencies)

    def _has_coordinates(self, positions: Positions) -> bool:
        return self.axes > 1 and positions.ndim > 1

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        q, k = super().rotate(q, k, q_positions, k_positions)
        if self.mscales is not None and self.mscales[0] != self.mscales[1]:
            positions = k_positions.amax(-1) if self._has_coordinates(k_positions) else k_positions
            short, long = (mscale / self.magnitude for mscale in self.mscales)
            size = torch.where(length_of(positions) > self.until, long, short)[..., None, None, None]
            q, k = (x * size.to(x.dtype) for x in (q, k))
        if not self.temperature:
            return q, k
        steps = torch.div(q_positions, self.step, rounding_mode="floor").to(widened(q.dtype))
        factor = (1 + self.temperature * steps.log1p()).unsqueeze(-1).unsqueeze(-3)
        return (q.to(factor.dtype) * factor).to(q.dtype), k

    def kernel(self, offsets: Int[Tensor, "D *axes"]) -> Complex[Tensor, "H n D"] | None:
        """The rotation's kernel (the first layer type's) at offsets [D] or [D, axes]; None with a temperature."""
        return None if self.temperature else super().kernel(offsets)


def _as_transformers(
    parameters: Mapping[str, Any], beside: Mapping[str, Any], *, reads_original: bool
) -> tuple[dict[str, Any], tuple[float, float] | None]:
    """The parameters that transformers uses, with its defaults, and longrope's two factors; warns about the others.

    Arguments
        beside          parameters that `ScaledRoPE` does not take
        reads_original  whether one of them reads the original length, whatever the type
    """
    given = {name: value for name, value in parameters.items() if value is not None}
    named, older = given.get("rope_type"), given.pop("type", None)
    kind = {"mrope": "default", "su": "longrope"}.get(named or older, named or older or "default")
    given["rope_type"] = kind
    extra = {name: value for name, value in beside.items() if value is not None}
    mscales = None
    if kind == "longrope" and {"short_mscale", "long_mscale"} & extra.keys():
        if not {"short_mscale", "long_mscale"} <= extra.keys():
            raise InputError("short_mscale and long_mscale must be set together.")
        short, long = (require_number(name, extra.pop(name), over=0) for name in ("short_mscale", "long_mscale"))
        mscales, given["attention_factor"] = (short, long), long
    if kind == "dynamic" and "alpha" in extra:
        given |= {"rope_type": "ntk", "factor": require_number("alpha", extra.pop("alpha"), over=0)}
    takes = keywords(given["rope_type"]) if given["rope_type"] in RULES else every_keyword()
    ignored = [name for name in given if name in every_keyword() and name not in takes] + list(extra)
    if older not in (None, "mrope", named) and named is not None:
        ignored.append("type")
    ignored = [name for name in ignored if not (reads_original and name == "original_max_position_embeddings")]
    if ignored:
        words = "is not used by it and is" if len(ignored) == 1 else "are not used by it and are"
        warnings.warn(f"rope type {kind!r}: {', '.join(ignored)} {words} ignored, as in transformers.", stacklevel=3)
    if "original_max_position_embeddings" in takes:
        given.setdefault("original_max_position_embeddings", given.get("max_position_embeddings", given["max_len"]))
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        if not given.get(name, default):
            given[name] = default
    known = {name: value for name, value in given.items() if name in takes or name not in every_keyword()}
    return known, mscales


ENCODINGS = {"scaled-rope": ConfiguredRoPE}
