"""Options and sizes that no encoding can take are refused in one sentence that names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.builders import REPRESENTATIVES
from tests.encodings.samples import SIZES

from toeplens import encodings
from toeplens.ground import InputError

REFUSED: dict[str, list[dict[str, Any]]] = {  # the field that is named is the last one
    "alibi": [{"slopes": "steep"}],
    "axial-rope": [{"axes": 5}, {"axes_dims": [3, 5]}, {"axes_dims": [8]}, {"grid": [4, 0]}],
    "bipe": [{"segment": 0}, {"slope_factor": 0.0}],
    "cable": [{"step": "gelu"}],
    "carope": [{"base": 1.0}, {"head_dim": 7}],
    "clex": [{"max_factor": 0}, {"act": "relu"}],
    "comrope": [{"variant": "ap", "block": 8}],
    "cope": [{"positions_max": 0}],
    "dape": [{"base": "none"}, {"width": 0}],
    "dape-v2": [{"kernel_size": 2}, {"kernel_size": 1, "base": "none"}],
    "deberta": [{"position_buckets": 7}, {"terms": ["p2p"]}, {"terms": []}, {"terms": ["c2p", "c2p"]}],
    "dual-chunk": [{"chunk": 0}, {"largest": "longest"}],
    "fire": [{"threshold": 0.0}, {"c": -1.0}, {"c": math.inf}],
    "fope": [{"gain": -1.0}, {"train_length": 6}, {"max_len": 6}],
    "fox": [{"bias_init": math.nan}],
    "grape": [{"count": 2}, {"planes": "free", "count": 5}],
    "grape-path": [{"width": 3}],
    "hope": [{"train_length": 6}, {"max_len": 5}],
    "learned": [{"init_std": math.inf}, {"init_std": -0.1}],
    "liere": [{"block": 3}, {"grid": [4]}, {"extent": [1.0, -1.0]}],
    "llama4-temperature": [{"floor_scale": 0.0}],
    "mla": [{"rotary_dim": 3}, {"q_compress": 0}, {"phase_table": "released", "rotary_dim": 6}, {"d_compress": 0}],
    "mrope": [{"head_dim": 12, "sections": [1, 2, 2]}, {"head_dim": 12, "sections": [-1, 3, 4]}],
    "p-rope": [{"p": 1.1}, {"p": -0.1}],
    "partial-rope": [{"rotary_pct": 0.4}, {"rotary_pct": 1.5}, {"heads": 4}, {"heads": [3]}, {"layers": [1, 1]}],
    "path": [{"rank": 0}, {"activation": "relu"}],
    "randomized-sinusoidal": [{"max_position": 63}],
    "repo": [{"width": 0}],
    "rerope": [{"window": 0.0}, {"leak": 1.5}],
    "resonance-rope": [{"factor": 0.5}],
    "rollpe": [{"speed": 0.0}, {"head_dim": 2}],
    "rope": [{"head_dim": 7}, {"base": 0.0}, {"base": math.nan}, {"pairing": "thirds"}],
    "rope-bands": [{"gains": [1, 1, 1]}, {"gains": [1, -0.1, 1, 1]}, {"gains": [1, 1.1, 1, 1]}, {"keep": [1, 1]}],
    "rope-plus-plus": [{"num_heads": 1}],
    "sandwich": [{"width": 7}],
    "selective-rope": [{"rank": 0}, {"d_model": 25}],
    "self-extend": [{"group": 0}],
    "sinusoidal": [{"d_model": 25}, {"layout": "thirds"}],
    "swin": [{"window": [7]}, {"window": [7, 0]}],
    "syntactic": [{"branching": 1}, {"max_depth": 13}],
    "t5": [{"num_buckets": 5}, {"bidirectional": True, "num_buckets": 6}, {"max_distance": 16}],
    "tapa": [{"alpha": 0.0}, {"share": 1.0}],
    "transformer-xl": [{"d_model": 25}],
    "urpe": [{"base": "alibi"}],
    "xpos": [{"gamma": 0.0}, {"scale_base": -1.0}],
}


@pytest.mark.parametrize(("name", "given"), [(name, given) for name, rows in REFUSED.items() for given in rows])
def test_what_makes_no_sense_is_refused(name: str, given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=rf"^{list(given)[-1]}(:| must) [^\n]*[.?]$"):
        encodings.build(name, **{**SIZES, **given})


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_values_of_a_wrong_kind_are_told_what_is_allowed(name: str) -> None:
    """Of every option, its name; what Python or torch make of such a value says neither."""
    for option in encodings.options(name):
        for value in (object(), [object()]):
            with pytest.raises(InputError, match=rf"^{option} must be .+, got .*\.$"):
                encodings.build(name, **SIZES, **{option: value})


def test_heads_of_a_size_that_cannot_be_turned_are_one_sentence() -> None:
    """As those of somebody's own attention, which does not add the rotary part of latent attention."""
    places = {"q_positions": torch.arange(4), "k_positions": torch.arange(4)}
    for name, few, said in (("mla", 8, "12 (8 that are not rotated, 4 that are) for MLA"), ("rope", 6, "8 for RoPE")):
        x, encoding = torch.zeros(1, 3, 4, few), encodings.build(name, **SIZES)
        with pytest.raises(InputError) as caught:
            encodings.attend(x, x, x, encoding=encoding, **places, scale=1.0)
        assert str(caught.value) == f"head_dim must be {said}, got {few}."
