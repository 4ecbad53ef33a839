"""What single encodings are, and what they refuse; what every encoding must keep to is in test_conformance.py."""

from __future__ import annotations

import itertools
import math
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from tests.builders import REPRESENTATIVES
from tests.encodings.samples import SIZES, assert_close, build, by_kernel, rotated_logits, vectors
from torch import Tensor

from toeplens import encodings
from toeplens.encodings import OffsetBias, PositionalEncoding, registry
from toeplens.encodings.conformance import Specimen
from toeplens.encodings.rotary import rotate_pairs
from toeplens.utils import InputError

# ---- names, positions, kernels ---------------------------------------------------------------------------------------

B, N = 2, 12


# ---- shapes, names, options, errors ---------------------------------------------------------------------------------


def test_an_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(InputError, match=r"^encoding must be .*, got 'roep'; did you mean .*'rope'.*\?$") as caught:
        encodings.get("roep")
    assert caught.value.exit_code == 2
    with pytest.raises(InputError, match=r"must be one of .*alibi"):
        encodings.build("??", **SIZES)


def test_unknown_options_and_sizes_of_zero_are_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"^option of encoding 'rope' must be .*, got 'flavour'"):
        build("rope", flavour=1)
    for size in SIZES:
        with pytest.raises(InputError, match=rf"^{size} must .*\.$"):
            build("rope", **{size: 0})
    with pytest.raises(InputError, match=r"^encoding: 'rope' cannot be built from "):
        build("rope", base=10**400)


@pytest.mark.parametrize("name", ["shaw", "fox"])  # with parameters of its own, and of a linear layer
def test_replaced_parameters_are_reset(name: str) -> None:
    loaded = build(name)
    loaded.load_state_dict({key: torch.full_like(x, 7.0) for key, x in loaded.state_dict().items()}, assign=True)
    with torch.device("meta"):
        empty = build(name)
    empty.to_empty(device="cpu")
    torch.nn.init.constant_(next(empty.parameters()), 7.0)
    for encoding in (loaded.for_layer(1), loaded, empty):
        encoding.reset_parameters()
        assert not any(bool((x == 7).any()) for x in encoding.parameters())


def test_frequencies_cannot_be_restored_from_the_meta_device() -> None:
    with torch.device("meta"):
        encoding = build("rope")
    with pytest.raises(InputError, match=r"^RoPE must be built on its device, as frequencies cannot be restored"):
        encoding.to_empty(device="cpu")


TABLES = {
    *("learned", "random-fixed", "t5", "relative-table", "tupe", "shaw", "deberta", "relative-projection", "urpe"),
    *("clex", "swin", "bipe"),
}  # what looks a row up for a position, a distance, or a length


@pytest.mark.parametrize("name", [*REPRESENTATIVES, "learned", "swin", "bipe"])
def test_real_positions_are_accepted_or_refused_in_one_sentence(name: str) -> None:
    torch.manual_seed(0)
    specimen = Specimen(lambda: build(name))
    x, p = specimen.random_content(2, 7), specimen.positions(7)
    for fused in (True, False):
        if name in TABLES:
            with pytest.raises(InputError, match=r"^positions must be integers for \w+, got float64\.$"):
                specimen.attend(x, p.double(), fused=fused)
        else:
            whole, real = (specimen.attend(x, places, fused=fused) for places in (p, p.double()))
            assert torch.allclose(real, whole, rtol=0, atol=1e-12)
            assert specimen.attend(x, p.double() + 0.25, fused=fused).isfinite().all()


def test_an_encoding_states_its_published_scale() -> None:
    """What an attention of one's own multiplies q . k by."""
    d = SIZES["head_dim"]
    published = {"t5": 1.0, "tupe": (2 * d) ** -0.5, "deberta": (3 * d) ** -0.5, "mla": (d + d // 2) ** -0.5}
    for name in encodings.names():
        assert build(name).scale == pytest.approx(published.get(name, d**-0.5), abs=1e-15), name
    assert build("deberta", terms=["p2c"]).scale == (2 * d) ** -0.5


def test_an_encoding_that_declares_an_unknown_coupling_is_refused() -> None:
    class Telepathic(PositionalEncoding):
        coupling = "telepathy"

    with pytest.raises(InputError, match=r"^coupling must be one of .*, got 'telepathy'\.$"):
        Telepathic(**SIZES)


class DistanceBias(OffsetBias):
    """Minus the distance: a plugin author's whole encoding."""

    citation = "this test"

    def kernel(self, offsets: Tensor) -> Tensor:
        return -offsets.abs().float().expand(self.num_heads, -1)


def test_entry_points_add_encodings_and_cannot_override_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = encodings.get("rope")
    here = f"{__name__}:DistanceBias"
    values = {"distance": here, "rope": here, "gone": f"{__name__}:Gone", "count": "builtins:len"}
    actual = [EntryPoint(name=n, value=value, group="toeplens.encodings") for n, value in values.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: actual)
    registry._load_encodings.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"^encoding 'rope': .*:DistanceBias of the package \? uses a name"):
            assert "distance" in encodings.names()
        assert set(encodings.load_errors()) == {"rope", "gone", "count"}
        for broken, why in (
            ("gone", "Gone of the package . cannot be loaded"),
            ("count", "is not a subclass of Positional"),
        ):
            assert broken not in encodings.names()
            with pytest.raises(InputError, match=rf"^encoding: '{broken}' cannot be used: .*{why}.*\.$"):
                encodings.get(["distance", broken])
        assert isinstance(encodings.build("distance", **SIZES), DistanceBias)
        assert encodings.options("distance") == {}
        assert encodings.get("rope") is ours
    finally:
        monkeypatch.undo()
        registry._load_encodings.cache_clear()


# ---- positions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["learned", "random-fixed"])
@pytest.mark.parametrize("positions", [[0, 64], [-1, 3], [[0, 1], [2, 1000]]])
def test_positions_beyond_a_table_are_refused(name: str, positions: list) -> None:
    encoding = build(name)
    x = torch.zeros(2, 2, encoding.d_model)
    with pytest.raises(InputError, match=r"^positions must be from 0 to 63 .*, got (64|-1|1000)\.$"):
        encoding.embed(x, torch.tensor(positions))
    assert encoding.embed(x, torch.tensor([0, 63])).shape == x.shape
    assert encoding.embed(x[:, :0], torch.arange(0)).shape == (2, 0, encoding.d_model)


# ---- kernels and the Toeplitz property ------------------------------------------------------------------------------


ROTATIONS: list[tuple[str, dict[str, Any]]] = [
    ("rope", {"pairing": "half"}),
    ("rope", {"base": 500000.0}),
    ("partial-rope", {"rotary_pct": 0.5, "pairing": "half"}),
    ("partial-rope", {"heads": [0, 2], "rotary_pct": 0.5}),
    ("mla", {"pairing": "half"}),
    ("mla", {"rotary_dim": 8, "rotary_query": "shared", "latent_norm": False}),
]


@pytest.mark.parametrize(("name", "options"), ROTATIONS, ids=str)
def test_a_rotation_matches_its_kernel_and_is_orthogonal(name: str, options: dict) -> None:
    encoding = build(name, **options)
    q, k = vectors(N, 3, encoding.query_dim)
    positions = torch.arange(0, 3 * N, 3)
    rotated = rotated_logits(encoding, q, k, positions)
    assert_close(rotated, by_kernel(encoding, q, k, positions), 1e-12)
    rotated, _ = encoding.rotate(q, k, positions, positions)
    back, _ = encoding.rotate(rotated, k, -positions, positions)
    assert torch.allclose(rotated.norm(dim=-1), q.norm(dim=-1), rtol=0, atol=1e-12)
    assert torch.allclose(back, q, rtol=0, atol=1e-12)


# ---- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_a_rotation_takes_any_memory_layout(pairing: str) -> None:
    """A head cut out of a wider tensor, at an odd place or with its dimensions far apart, is still a head."""
    wide = torch.randn(2, 3, N, 9, dtype=torch.float64)
    phases = torch.rand(1, N, 4, dtype=torch.float64)
    for x in (wide[..., 1:], wide[..., :8], wide.transpose(1, 2)[:, :N, :, 1:].transpose(1, 2)):
        layouts = (x, x.transpose(-1, -2).contiguous().transpose(-1, -2))
        for same in layouts:
            assert torch.equal(
                rotate_pairs(same, phases.cos(), phases.sin(), pairing),
                rotate_pairs(x.clone(), phases.cos(), phases.sin(), pairing),
            )


# ---- what single encodings are --------------------------------------------------------------------------------------


def test_partial_rope_rotates_only_the_chosen_dimensions() -> None:
    q, k = vectors(N)
    positions = torch.arange(1, N + 1)
    rotated, _ = build("rope").rotate(q, k, positions, positions)
    everything, _ = build("partial-rope").rotate(q, k, positions, positions)
    assert torch.equal(everything, rotated)
    quarter, _ = build("partial-rope", rotary_pct=0.25).rotate(q, k, positions, positions)
    assert torch.equal(quarter[..., 2:], q[..., 2:])
    assert not torch.isclose(quarter[..., :2], q[..., :2]).any()
    for heads, chosen in ((1, [0]), ([0, 2], [0, 2]), (0, []), ([], [])):
        some, _ = build("partial-rope", heads=heads).rotate(q, k, positions, positions)
        for head in range(3):
            assert torch.equal(some[:, head], rotated[:, head] if head in chosen else q[:, head])


def test_a_relative_table_distinguishes_sides_and_clips_at_its_ends() -> None:
    kernel = build("relative-table").kernel(torch.tensor([-5000, -63, -1, 0, 1, 63, 64]))
    assert torch.equal(kernel[:, 0], kernel[:, 1])
    assert torch.equal(kernel[:, -1], kernel[:, -2])
    assert not torch.equal(kernel[:, 2], kernel[:, 4])


def test_alibis_released_slopes_are_powers_of_e() -> None:
    released = build("alibi", slopes="exponential", num_heads=4)
    assert torch.allclose(released.slopes, torch.exp(-torch.arange(4, dtype=torch.float64) / 4))
    assert torch.allclose(released.kernel(torch.tensor([-4]))[:, 0], -4 * released.slopes)


def test_rope_absolute_combines_rope_and_a_sinusoid() -> None:
    both, rope, sinusoid = (build(name) for name in ("rope-absolute", "rope", "sinusoidal"))
    q, k = vectors(N)
    positions = torch.arange(N)
    x = torch.randn(B, N, both.d_model)
    assert torch.equal(both.embed(x, positions), sinusoid.embed(x, positions))
    assert torch.equal(both.rotate(q, k, positions, positions)[0], rope.rotate(q, k, positions, positions)[0])


def test_the_released_phase_table_reads_halves_as_if_they_were_interleaved() -> None:
    encoding = build("mla", rotary_dim=4, phase_table="released")
    q, k = vectors(N, 3, encoding.query_dim)
    positions = torch.arange(N)
    turned, _ = encoding.rotate(q, k, positions, positions)
    phases = positions.double().unsqueeze(-1) * torch.tensor([1.0, 0.01], dtype=torch.float64)
    table = torch.cat((phases.sin(), phases.cos()), dim=-1)  # s0 s1 c0 c1
    sin, cos = table[:, 0::2], table[:, 1::2]  # s0 c0, s1 c1
    a, b = q[..., 8::2], q[..., 9::2]
    assert torch.allclose(turned[..., 8::2], a * cos - b * sin, rtol=0, atol=1e-14)
    assert torch.allclose(turned[..., 9::2], a * sin + b * cos, rtol=0, atol=1e-14)


# ---- options that are refused ----------------------------------------------------------------------------------------

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
def test_invalid_options_are_refused(name: str, given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=rf"^{list(given)[-1]}(:| must) [^\n]*[.?]$"):
        encodings.build(name, **{**SIZES, **given})


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_errors_for_wrong_types_state_what_is_allowed(name: str) -> None:
    """Of every option, its name; what Python or torch make of such a value says neither."""
    for option, value in itertools.product(encodings.options(name), (object(), [object()])):
        with pytest.raises(InputError, match=rf"^{option} must be .+, got .*\.$"):
            encodings.build(name, **SIZES, **{option: value})


def test_unrotatable_head_sizes_are_refused_in_one_sentence() -> None:
    """As those of somebody's own attention, which does not add the rotary part of latent attention."""
    places = {"q_positions": torch.arange(4), "k_positions": torch.arange(4)}
    for name, few, said in (("mla", 8, "12 (8 that are not rotated, 4 that are) for MLA"), ("rope", 6, "8 for RoPE")):
        x, encoding = torch.zeros(1, 3, 4, few), encodings.build(name, **SIZES)
        with pytest.raises(InputError) as caught:
            encodings.attend(x, x, x, encoding=encoding, **places, scale=1.0)
        assert str(caught.value) == f"head_dim must be {said}, got {few}."
