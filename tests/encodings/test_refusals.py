"""Options and sizes that no encoding can take are refused in one sentence that names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.encodings.samples import SIZES

from toeplens import encodings
from toeplens.ground import InputError

REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "axial-rope": [
        ({"head_dim": 12, "axes": 1}, "axes"),
        ({"head_dim": 12, "axes": 7}, "axes"),
        ({"head_dim": 12, "axes_dims": [3, 4]}, "axes_dims"),
        ({"head_dim": 12, "axes_dims": [0, 6]}, "axes_dims"),
        ({"head_dim": 12, "axes_dims": [6]}, "axes_dims"),
        ({"head_dim": 12, "grid": [4]}, "grid"),
        ({"head_dim": 12, "grid": [4, 0]}, "grid"),
        ({"head_dim": 12, "frequencies": "pixel"}, "grid"),
        ({"head_dim": 12, "frequencies": "pixel", "grid": [4]}, "grid"),
        ({"head_dim": 12, "frequencies": "pixel", "grid": [4, 4], "max_freq": 0.0}, "max_freq"),
        ({"head_dim": 12, "frequencies": "sound"}, "frequencies"),
    ],
    "mrope": [
        ({"head_dim": 12, "sections": [1, 2, 2]}, "sections"),
        ({"head_dim": 12, "sections": [3, 3]}, "sections"),
        ({"head_dim": 12, "sections": [-1, 3, 4]}, "sections"),
        ({"head_dim": 12, "sections": [0, 3, 3], "interleaved_sections": True}, "sections"),
    ],
    "rope-mixed": [
        ({"head_dim": 12, "grid": [1, 2, 3]}, "grid"),
        ({"head_dim": 12, "base": 0.0}, "base"),
    ],
    "rope-bands": [
        ({"gains": [1, 1, 1]}, "gains"),
        ({"gains": [[1, 1, 1, 1], [1, 1, 1, 1]]}, "gains"),
        ({"gains": [[1, 1, 1, 1], [1, 1, 1, 1], 1]}, "gains"),
        ({"gains": [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1]]}, "gains"),
        ({"gains": [1, -0.1, 1, 1]}, "gains"),
        ({"gains": [1, math.nan, 1, 1]}, "gains"),
        ({"gains": [1, 1.1, 1, 1]}, "gains"),
        ({"ramp": [0.5, 1.5, 2]}, "ramp"),
        ({"ramp": [0.5, 1.5], "off": "pair"}, "ramp"),
        ({"ramp": [0.5, 1.5, 0], "off": "pair"}, "ramp"),
        ({"ramp": [-0.5, 1.5, 1], "off": "pair"}, "ramp"),
        ({"keep": [4]}, "keep"),
        ({"keep": [1, 1]}, "keep"),
        ({"keep": [1], "gains": [1, 1, 1, 1]}, "keep"),
        ({"keep": [1], "ramp": [1, 1, 1]}, "ramp"),
        ({"off": "band"}, "off"),
        ({"layers": [-1]}, "layers"),
        ({"frequencies": [1.0, 0.1]}, "frequencies"),
        ({"frequencies": -1.0}, "frequencies"),
        ({"frequencies": math.inf}, "frequencies"),
    ],
    "p-rope": [
        ({"p": 1.1}, "p"),
        ({"p": -0.1}, "p"),
        ({"base": 0.0}, "base"),
    ],
    "cope": [
        ({"positions_max": 0}, "positions_max"),
    ],
    "relative-projection": [
        ({"basis": 0}, "basis"),
        ({"max_distance": 0}, "max_distance"),
    ],
    "fox": [
        ({"bias_init": math.nan}, "bias_init"),
    ],
    "cable": [
        ({"step": "gelu"}, "step"),
    ],
    "path": [
        ({"rank": 0}, "rank"),
        ({"conv_size": 0}, "conv_size"),
        ({"activation": "relu"}, "activation"),
    ],
    "sandwich": [
        ({"width": 7}, "width"),
        ({"base": 0.0}, "base"),
    ],
    "dynamic-bias": [
        ({"hidden": 0}, "hidden"),
        ({"depth": 0}, "depth"),
    ],
    "fire": [
        ({"threshold": 0.0}, "threshold"),
        ({"c": -1.0}, "c"),
        ({"c": math.inf}, "c"),
        ({"hidden": 0}, "hidden"),
    ],
    "shaw": [
        ({"max_distance": -1}, "max_distance"),
    ],
    "transformer-xl": [
        ({"d_model": 25}, "d_model"),
        ({"base": 0.0}, "base"),
    ],
    "deberta": [
        ({"max_distance": 0}, "max_distance"),
        ({"position_buckets": 7}, "position_buckets"),
        ({"position_buckets": 64, "max_distance": 33}, "position_buckets"),
        ({"p2c_index": "mirrored"}, "p2c_index"),
        ({"terms": ["p2p"]}, "terms"),
        ({"terms": []}, "terms"),
        ({"terms": ["c2p", "c2p"]}, "terms"),
    ],
    "dape-v2": [
        ({"base": "xpos"}, "base"),
        ({"base": "none", "kernel_size": 1}, "base"),
        ({"kernel_size": 2}, "kernel_size"),
        ({"kernel_size": -1}, "kernel_size"),
    ],
    "dape": [
        ({"base": "none"}, "base"),
        ({"width": 0}, "width"),
    ],
    "urpe": [
        ({"base": "alibi"}, "base"),
        ({"init_std": -0.1}, "init_std"),
    ],
    "scaled-sinusoidal": [
        ({"start": math.nan}, "start"),
        ({"layout": "thirds"}, "layout"),
    ],
    "shape": [
        ({"max_shift": -1}, "max_shift"),
    ],
    "randomized-sinusoidal": [
        ({"max_position": 63}, "max_position"),
        ({"base": 0.0}, "base"),
    ],
    "syntactic": [
        ({"branching": 1}, "branching"),
        ({"max_depth": 1}, "max_depth"),
        ({"max_depth": 13}, "max_depth"),
        ({"by": "height"}, "by"),
    ],
    "syntactic-bias": [
        ({"max_distance": 0}, "max_distance"),
        ({"init_std": -1.0}, "init_std"),
        ({"by": "label"}, "by"),
    ],
    "xpos": [
        ({"gamma": 0.0}, "gamma"),
        ({"scale_base": -1.0}, "scale_base"),
        ({"base": 0.0}, "base"),
    ],
    "harope": [
        ({"map": "both"}, "map"),
    ],
    "carope": [
        ({"start": "zero"}, "start"),
        ({"base": 1.0}, "base"),
        ({"pairing": "both"}, "pairing"),
        ({"head_dim": 7}, "head_dim"),
    ],
    "rope-learned": [
        ({"base": 0.0}, "base"),
    ],
    "fope": [
        ({"max_len": 512, "gain": -1.0}, "gain"),
        ({"train_length": 6}, "train_length"),
        ({"max_len": 512, "padding": "zeros"}, "padding"),
        ({"max_len": 512, "pairing": "both"}, "pairing"),
        ({"max_len": 512, "base": 0.0}, "base"),
        ({"max_len": 6}, "max_len"),
        ({"max_len": 512, "head_dim": 2}, "head_dim"),
        ({"max_len": 512, "head_dim": 9}, "head_dim"),
    ],
    "pope": [
        ({"init": "one"}, "init"),
        ({"base": 0.0}, "base"),
    ],
    "complexformer": [
        ({"pairing": "both"}, "pairing"),
        ({"head_dim": 7}, "head_dim"),
    ],
    "rollpe": [
        ({"speed": 0.0}, "speed"),
        ({"speed": math.inf}, "speed"),
        ({"head_dim": 2}, "head_dim"),
    ],
    "drope": [
        ({"step": 0.0}, "step"),
        ({"head_dim": 7}, "head_dim"),
    ],
    "rope": [
        ({"head_dim": 7}, "head_dim"),
        ({"base": 0.0}, "base"),
        ({"base": math.nan}, "base"),
        ({"pairing": "thirds"}, "pairing"),
    ],
    "rope-absolute": [
        ({"head_dim": 7}, "head_dim"),
        ({"d_model": 25}, "d_model"),
    ],
    "partial-rope": [
        ({"head_dim": 7}, "head_dim"),
        ({"rotary_pct": 0.0}, "rotary_pct"),
        ({"rotary_pct": 1.5}, "rotary_pct"),
        ({"rotary_pct": 0.4}, "rotary_pct"),
        ({"rotary_pct": 0.1}, "rotary_pct"),
        ({"heads": 4}, "heads"),
        ({"heads": [3]}, "heads"),
        ({"heads": [-1]}, "heads"),
        ({"layers": [-1]}, "layers"),
        ({"layers": [1, 1]}, "layers"),
    ],
    "sinusoidal": [
        ({"d_model": 25}, "d_model"),
        ({"base": -1.0}, "base"),
        ({"layout": "thirds"}, "layout"),
    ],
    "mla": [
        ({"rotary_dim": 3}, "rotary_dim"),
        ({"rotary_dim": 0}, "rotary_dim"),
        ({"q_compress": 0}, "q_compress"),
        ({"q_compress": "half"}, "q_compress"),
        ({"rotary_dim": 6, "phase_table": "released"}, "rotary_dim"),
        ({"d_compress": 0}, "d_compress"),
        ({"rotary_query": "both"}, "rotary_query"),
        ({"phase_table": "none"}, "phase_table"),
    ],
    "alibi": [
        ({"slopes": "steep"}, "slopes"),
    ],
    "t5": [
        ({"num_buckets": 5}, "num_buckets"),
        ({"num_buckets": 0}, "num_buckets"),
        ({"num_buckets": 6, "bidirectional": True}, "num_buckets"),
        ({"max_distance": 16}, "max_distance"),
    ],
    "relative-table": [
        ({"init_std": -0.1}, "init_std"),
    ],
    "learned": [
        ({"init_std": math.inf}, "init_std"),
    ],
    "random-fixed": [
        ({"std": 0.0}, "std"),
    ],
}


@pytest.mark.parametrize(("name", "given", "field"), [(name, *row) for name, rows in REFUSED.items() for row in rows])
def test_what_makes_no_sense_is_refused(name: str, given: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        encodings.build(name, **{**SIZES, **given})
    message = str(caught.value)
    assert message.startswith(f"{field}: ")
    assert message.endswith(".")
    assert "\n" not in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", encodings.names())
def test_values_of_a_wrong_kind_are_told_what_is_allowed(name: str) -> None:
    """Of every option, its name; what Python or torch make of such a value says neither."""
    for option in encodings.options(name):
        for value in (object(), {"a": 1}, [object()], b"x"):
            with pytest.raises(InputError, match=rf"^{option}: .* was given; it must be .+\.$"):
                encodings.build(name, **SIZES, **{option: value})


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("rope", {"base": "x"}, "base: 'x' was given; it must be a number."),
        ("tupe", {"relative": 1}, "relative: 1 was given; it must be true or false."),
        ("rope-yarn", {"truncate": "x"}, "truncate: 'x' was given; it must be true, false or None."),
        (
            "scaled-rope",
            {"layer_types": ["a"], "a": {"rope_theta": "x"}},
            "a.rope_theta: 'x' was given; it must be a number or None.",
        ),
        ("scaled-rope", {"layer_types": 3}, "layer_types: 3 was given; it must be a list of words or None."),
    ],
)
def test_kinds_are_said_in_words(name: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        encodings.build(name, **SIZES, **given)
    assert str(caught.value) == said


def test_heads_of_a_size_that_cannot_be_turned_are_one_sentence() -> None:
    """As those of somebody's own attention, which does not add the rotary part of latent attention."""
    positions = torch.arange(4)
    places = {"q_positions": positions, "k_positions": positions}
    for name, few, said in (
        ("mla", 8, "heads of 8 dimensions were given; MLA takes 12 (8 before the 4 that are turned)."),
        ("mla", 16, "heads of 16 dimensions were given; MLA takes 12 (8 before the 4 that are turned)."),
        ("rope", 6, "heads of 6 dimensions were given; RoPE takes 8."),
    ):
        x, encoding = torch.zeros(1, 3, 4, few), encodings.build(name, **SIZES)
        with pytest.raises(InputError) as caught:
            encodings.attend(x, x, x, encoding=encoding, **places, scale=1.0)
        assert str(caught.value) == f"head_dim: {said}"
