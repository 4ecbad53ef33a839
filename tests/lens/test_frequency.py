"""Frequency use equals what a plain program finds that forms every logit; bands under control are what they say."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.lens.models import attention_cases, decoder, reference_share
from torch import Tensor

from toeplens import encodings
from toeplens.backends import DecoderSource
from toeplens.encodings import FrequencyMask, Rotary, swap_bands, with_frequency_mask
from toeplens.lens import AttentionTrace, LayerTrace, rotary_offsets
from toeplens.lens import frequency as use
from toeplens.lens.frequency import ablate_bands, frequency_use
from toeplens.lens.kit.terms import NotSeparable
from toeplens.lens.kit.trace import CountedQueries
from toeplens.model import Decoder
from toeplens.utils import InputError

SIZES = {"vocab_size": 20, "d_model": 32, "d_ff": 24, "num_layers": 2, "num_heads": 4, "max_len": 16, "dropout": 0.0}
LENGTHS = torch.tensor([7, 4, 1, 7, 5])
TOKENS = torch.randint(0, 20, (5, 7), generator=torch.Generator().manual_seed(2))
LABELS = torch.tensor([3, 1, -1, 7, 0])


def model_of(encoding: str, seed: int = 1, **fields: Any) -> Decoder:
    return decoder(seed=seed, encoding=encoding, **SIZES, **fields)


@cache
def fresh_model(seed: int) -> Decoder:
    """A model that no test changes."""
    return model_of("rope", seed)


def trace_of(model: Decoder, tokens: Tensor = TOKENS, lengths: Tensor | None = LENGTHS) -> AttentionTrace:
    return AttentionTrace(DecoderSource(model), tokens, lengths)


def reference_shares(terms: list[Tensor], norms: list[Tensor], seen: Tensor) -> dict[str, Tensor]:
    """Shares, norms and variance of each head, from every term [B, H, N, N] of every logit, and which pairs count."""
    total = sum(terms, torch.zeros_like(terms[0]))
    logits, softmax = zip(*(reference_share(term, total, seen) for term in terms), strict=True)
    return {
        "norms": torch.stack([norm.transpose(0, 1)[:, seen].mean(-1) for norm in norms], -1),
        "logits": torch.stack(logits, -1),
        "softmax": torch.stack(softmax, -1),
        "variance": total.transpose(0, 1)[:, seen].var(-1, correction=0),
    }


def norms_of(q: Tensor, k: Tensor, columns: list[list[int]]) -> list[Tensor]:
    return [q[..., dims].norm(dim=-1).unsqueeze(-1) * k[..., dims].norm(dim=-1).unsqueeze(-2) for dims in columns]


def reference_use(layer: LayerTrace, count: int, counted: CountedQueries = "all") -> dict[str, Tensor]:
    """Pair by pair of the layer's turned queries and keys; the rest of its own logits is the last term."""
    first = getattr(layer.encoding, "first", 0)
    half = getattr(layer.encoding, "pairing", "interleaved") == "half"
    columns = [[d for d in range(layer.q.shape[-1]) if not first <= d < first + 2 * count]]
    columns += [[first + t, first + t + count] if half else [first + 2 * t, first + 2 * t + 1] for t in range(count)]
    turned_q, turned_k = layer.rotated
    terms = [turned_q[..., dims] @ turned_k[..., dims].mT * layer.scale for dims in columns]
    visible = layer.present.unsqueeze(2) & layer.present.unsqueeze(1)
    visible = visible.tril() if layer.causal else visible
    if counted == "used":
        visible = visible & (torch.arange(visible.shape[1]) == layer.present.sum(1, keepdim=True) - 1).unsqueeze(-1)
    return reference_shares([*terms, layer.logits() - sum(terms)], norms_of(layer.q, layer.k, columns), visible)


CASES = [
    ("rope", {}),
    ("rope", {"encoding_options": {"pairing": "half"}}),
    ("rope", {"protocol": "released"}),
    ("partial-rope", {"encoding_options": {"rotary_pct": 0.5}}),
    ("partial-rope", {"encoding_options": {"heads": 2}}),
    ("p-rope", {}),
    ("rope-absolute", {}),
    ("xpos", {}),
    ("mla", {}),
    ("alibi", {}),
    ("rope-yarn", {}),
]


@pytest.mark.parametrize(
    ("encoding", "fields", "counted"),
    [*((*case, "all") for case in CASES), ("rope", {}, "used"), ("alibi", {}, "used")],
)
def test_frequency_use_matches_the_reference(encoding: str, fields: dict[str, Any], counted: CountedQueries) -> None:
    """float64, 1e-9 of the largest norm, 1e-9 for shares; causal and not, padded, both pairings; all queries, or used.

    Of the first layer all queries are used.
    """
    trace = trace_of(model_of(encoding, **fields))
    actual = frequency_use(trace, counted=counted)
    layer = trace[1]
    expected = reference_use(layer, actual.frequencies.shape[-1], counted)
    torch.testing.assert_close(actual.norms[1], expected["norms"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(actual.norms[0], frequency_use(trace).norms[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(actual.shares.logits[1], expected["logits"], rtol=0, atol=1e-9)
    torch.testing.assert_close(actual.shares.softmax[1], expected["softmax"], rtol=0, atol=1e-9)
    torch.testing.assert_close(actual.shares.logits.sum(-1), torch.ones(2, 4, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(actual.norm_shares().sum(-1), torch.ones(2, 4, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.equal(frequency_use(layer, counted=counted).norms, actual.norms[1])
    torch.testing.assert_close(actual.massive(2)[0], actual.q_energy.sort(-1).values[..., -2:].sum(-1))
    if counted == "used":
        ends = layer.present.sum(1).tolist()
        q = torch.stack([layer.q[b, :, n - 1] for b, n in enumerate(ends)]).square().sum(0)
        torch.testing.assert_close(actual.q_energy[1], q / q.sum(-1, keepdim=True), rtol=1e-9, atol=0)


@pytest.mark.parametrize("window", [None, 3])
def test_padding_values_are_ignored(window: int | None) -> None:
    """NaN behind the end of a sequence changes no number: of tensors, and of a layer."""
    q, k = torch.randn(2, 2, 3, 9, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lengths, theta = torch.tensor([9, 5]), torch.tensor([1.0, 0.1])
    spoiled = [x.clone() for x in (q, k)]
    for x in spoiled:
        x[1, :, 5:] = torch.nan
    options = {"rotation": theta, "pairing": "half", "lengths": lengths, "window": window}
    expected, actual = (frequency_use(*pair, **options).to_dict() for pair in ((q, k), spoiled))
    assert actual == expected
    layer = trace_of(fresh_model(1), TOKENS, LENGTHS)[1]
    parts = [x.clone() for x in (layer.q, layer.k)]
    for x in parts:
        x.masked_fill_(~layer.present[:, None, :, None], torch.nan)
    dirty, clean = (frequency_use(each) for each in (replace(layer, q=parts[0], k=parts[1]), layer))
    torch.testing.assert_close(dirty.shares.logits, clean.shares.logits, rtol=0, atol=0)
    torch.testing.assert_close(dirty.norms, clean.norms, rtol=0, atol=0)
    empty = frequency_use(q, k, **options | {"lengths": torch.tensor([0, 0]), "causal": False})
    assert empty.variance.isnan().all()


def reference_use_of_tensors(case: dict[str, Any]) -> dict[str, Tensor]:
    """Every term of every logit, pair by pair."""
    theta, bias = case["rotation"], case["bias"]
    (heads, length, width), n = case["q"].shape[1:], theta.shape[-1]
    q, k = case["q"], case["k"].repeat_interleave(heads // case["k"].shape[1], 1)
    columns = [list(range(2 * n, width))]
    columns += [[t, t + n] if case["pairing"] == "half" else [2 * t, 2 * t + 1] for t in range(n)]
    offsets = torch.arange(length).unsqueeze(1) - torch.arange(length)
    terms = [q[..., columns[0]] @ k[..., columns[0]].mT]
    for t, (one, two) in enumerate(columns[1:]):
        z = torch.complex(q[..., one], q[..., two])[..., None] * torch.complex(k[..., one], -k[..., two])[..., None, :]
        terms.append((z * torch.exp(1j * offsets * theta[:, t, None, None])).real)
    terms = [case["scale"] * term for term in terms]
    if bias is None:
        bias = torch.zeros(1, 1)
    elif bias.ndim == 2:
        bias = bias[:, (offsets + (0 if case["causal"] else length - 1)).clamp(min=0)]
    window, chunk = case["window"] or length, case["chunk"] or length
    chunks = torch.arange(length) // chunk
    visible = (offsets.abs() < window) & (chunks == chunks.unsqueeze(1)) & ((offsets >= 0) | (not case["causal"]))
    is_token = torch.arange(length) < case["lengths"].unsqueeze(1)
    return reference_shares(
        [*terms, bias.expand_as(terms[0])],
        norms_of(q, k, columns),
        visible & is_token.unsqueeze(1) & is_token.unsqueeze(2),
    )


@given(attention_cases(least=3), st.sampled_from([1, 1 << 23]))
def test_frequency_use_of_tensors_matches_the_reference(case: dict[str, Any], at_once: int) -> None:
    """float64, 1e-9; windows, grouped key heads, padding, biases of both kinds, both pairings."""
    del case["k_position"]
    case["rotation"] = torch.zeros(1, 0, dtype=torch.float64) if case["rotation"] is None else case["rotation"]
    expected = reference_use_of_tensors(case)
    with patch.object(use, "_MAX_ELEMENTS", at_once):
        actual = frequency_use(**case)
    for name, values in (("norms", actual.norms), ("variance", actual.variance), *vars(actual.shares).items()):
        torch.testing.assert_close(
            values, expected[name], rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}"
        )
    heads, pairs = case["q"].shape[1], case["rotation"].shape[-1]
    assert actual.layers == ()
    torch.testing.assert_close(actual.frequencies, case["rotation"].expand(heads, pairs))
    there = torch.arange(case["q"].shape[2]) < case["lengths"][:, None]
    for given_, energy in ((case["q"], actual.q_energy), (case["k"], actual.k_energy)):
        wide = given_.repeat_interleave(heads // given_.shape[1], 1).square()
        total = (wide * there[:, None, :, None]).sum((0, 2))
        torch.testing.assert_close(energy, total / total.sum(-1, keepdim=True), rtol=1e-12, atol=0)


def test_a_layer_without_a_rotation_is_in_the_first_column() -> None:
    actual = frequency_use(trace_of(model_of("partial-rope", encoding_options={"layers": [1]})))
    assert actual.frequencies[0].isnan().all()
    assert (actual.norms[0, :, 1:] == 0).all()
    one = torch.ones(4, dtype=torch.float64)
    torch.testing.assert_close(actual.shares.logits[0, :, 0], one, rtol=0, atol=1e-12)
    assert actual.frequencies[1].isfinite().all()
    assert actual.centre()[0].isnan().all()


def rotary(name: str = "rope", **options: Any) -> Rotary:
    built = encodings.build(name, d_model=32, num_heads=4, head_dim=8, max_len=16, **options)
    assert isinstance(built, Rotary)
    return built


MASKS = [
    FrequencyMask(freeze=(0, 2)),
    FrequencyMask(drop=(1,)),
    FrequencyMask(permute=(3, 1, 2, 0)),
    FrequencyMask(freeze=(1,), permute=(1, 0, 2, 3), heads=(2,)),
    FrequencyMask(drop=(0, 3), heads=(0, 3)),
]


@pytest.mark.parametrize("control", MASKS, ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [("rope", {}), ("rope", {"pairing": "half"}), ("partial-rope", {"heads": 2}), ("rope-yarn", {})],
)
def test_frequency_masks_by_hand_and_in_the_kernel(name: str, options: dict[str, Any], control: FrequencyMask) -> None:
    """Each pair's complex product, turned (or not) by hand; float64, 1e-9."""
    plain = rotary(name, **options)
    encoding = with_frequency_mask(plain, control)
    q, k = torch.randn(2, 1, 4, 5, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    at = torch.arange(5)
    turned_q, turned_k = encoding.rotate(q, k, at, at)
    size = plain.magnitude**2
    frequencies = plain.frequencies_at(at).double().expand(4, -1)
    kernel = encoding.kernel(torch.arange(-4, 5))
    assert kernel is not None
    for h in range(4):
        mine = control.heads is None or h in control.heads
        for i in range(5):
            for j in range(5):
                total = by_kernel = 0.0
                for t in range(4):
                    a, b = (2 * t, 2 * t + 1) if plain.pairing == "interleaved" else (t, t + 4)
                    z = complex(q[0, h, i, a], q[0, h, i, b]) * complex(k[0, h, j, a], -k[0, h, j, b])
                    source = control.permute[t] if mine and control.permute else t
                    angle = (i - j) * float(frequencies[h, source])
                    if mine and t in control.freeze:
                        angle = 0.0
                    if not (mine and t in control.drop):
                        total += size * (z * complex(math.cos(angle), math.sin(angle))).real
                    by_kernel += (z * complex(kernel[h if len(kernel) > 1 else 0, t, i - j + 4])).real
                assert float(turned_q[0, h, i] @ turned_k[0, h, j]) == pytest.approx(total, abs=1e-9)
                assert by_kernel == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize("encoding", ["rope", "mla"])
@pytest.mark.parametrize("off", ["rotation", "pair"])
def test_band_drops_match_rerunning_the_changed_model(encoding: str, off: Any) -> None:
    """float64, 1e-9: one band of one head in one layer changed in the whole model, for every place."""
    source = DecoderSource(model_of(encoding))
    counted = LABELS >= 0

    def losses(one: DecoderSource) -> Tensor:
        with torch.no_grad():
            logits = one.model(TOKENS, LENGTHS)
        return torch.nn.functional.cross_entropy(logits[counted], LABELS[counted], reduction="none")

    batches = [(TOKENS[:2], LABELS[:2], LENGTHS[:2]), (TOKENS[2:], LABELS[2:], LENGTHS[2:])]
    actual = ablate_bands(source, batches, off=off)
    intact = losses(source)
    assert actual.baseline == pytest.approx(float(intact.mean()))
    assert actual.examples == 4
    for layer, pairs in enumerate(source.pairs_per_layer):
        for head in range(4):
            for band in range(pairs):
                place = {"freeze" if off == "rotation" else "drop": (band,)}
                changed = losses(source.with_frequency_mask(FrequencyMask(**place, heads=(head,)), [layer]))
                assert actual.drops[layer, head, band] == pytest.approx(float((changed - intact).mean()), abs=1e-9)
    assert (actual.low <= actual.drops + 1e-12).all()
    assert (actual.drops <= actual.high + 1e-12).all()


def test_layers_without_a_rotation_have_no_bands() -> None:
    source = DecoderSource(model_of("partial-rope", encoding_options={"layers": [1]}))
    actual = ablate_bands(source, [(TOKENS, LABELS, LENGTHS)], metric="accuracy")
    assert np.isnan(actual.drops[0]).all()
    assert np.isfinite(actual.drops[1]).all()
    with pytest.raises(InputError, match=r"^layers must have a rotation \(\[1\]\), got 0"):
        source.with_frequency_mask(FrequencyMask(), [0])
    with pytest.raises(InputError, match=r"^layers must include a layer with a rotation \(\[1\]\), got \[0\]"):
        ablate_bands(source, [(TOKENS, LABELS, LENGTHS)], layers=[0])


def test_bands_swap_their_frequencies() -> None:
    assert swap_bands(6, [0, 1], [4, 5]) == (4, 5, 2, 3, 0, 1)
    for second in ([5], [0, 4], [4, 6]):
        with pytest.raises(InputError, match=r"^second must have as many indices"):
            swap_bands(6, [0, 1], second)


@pytest.mark.parametrize(
    ("control", "sentence"),
    [
        (FrequencyMask(freeze=(4,)), "freeze must be different indices from 0 to 3, got .4."),
        (FrequencyMask(drop=(1, 1)), "drop must be different indices from 0 to 3, got .1, 1."),
        (FrequencyMask(permute=(0, 1)), "permute must name each of 0 to 3 once, got .0, 1."),
        (FrequencyMask(heads=(9,)), "heads must be different indices .*, got .9"),
    ],
)
def test_an_invalid_frequency_mask_is_refused(control: FrequencyMask, sentence: str) -> None:
    with pytest.raises(InputError, match=rf"^{sentence}"):
        with_frequency_mask(rotary(), control)


@pytest.mark.parametrize("encoding", ["fox", "shaw", "urpe", "pope"])
def test_encodings_without_frequencies_are_refused(encoding: str) -> None:
    with pytest.raises(NotSeparable, match=r"^encoding(:| must) "):
        frequency_use(trace_of(model_of(encoding)))


def test_invalid_options_are_refused() -> None:
    source = DecoderSource(model_of("alibi"))
    with pytest.raises(InputError, match=r"no layer of this model rotates"):
        ablate_bands(source, [(TOKENS, LABELS, LENGTHS)])
    with pytest.raises(InputError, match=r"^top must be from 1 to 8 \(.*\), got 9"):
        frequency_use(trace_of(model_of("rope"))).massive(9)
    with pytest.raises(InputError, match=r"^rotation must not be set with a trace"):
        frequency_use(trace_of(model_of("rope")), rotation=torch.ones(2))
    with pytest.raises(InputError, match=r"pairs must fit the dimensions .*, got 4"):
        rotary_offsets(*offset_case(0), 4, pairing="interleaved")
    case: dict[str, Any] = dict.fromkeys(("q", "k"), torch.ones(2, 4, 3))
    for field, value in (("window", 0), ("k", None), ("counted", "used")):
        with pytest.raises(InputError, match=f"^{field}(:| must) "):
            frequency_use(**{**case, field: value})


def test_a_reversed_rotation_has_the_right_centre_frequency() -> None:
    """As NanoChat turns. 1e-6."""
    q, k = torch.randn(2, 3, 9, 6, generator=torch.Generator().manual_seed(0)), torch.randn(3, 9, 6)
    for speeds in (torch.tensor([1.0, 0.3, 0.1]), torch.tensor([1.0, -0.3, 0.0])):
        actual = frequency_use(q[0], k, rotation=-speeds, pairing="half")
        octaves = torch.where(speeds != 0, speeds.abs(), 1.0).log2()
        for kind in ("logits", "softmax"):
            weight = getattr(actual.shares, kind)[..., 1:-1].clamp(min=0) * (speeds != 0)
            expected = (weight * octaves).sum(-1) / weight.sum(-1)
            torch.testing.assert_close(actual.centre(kind), expected, rtol=0, atol=1e-6)
            assert expected.isfinite().all()


def test_what_is_the_same_for_all_keys_of_a_query_does_not_move_the_centre_within_queries() -> None:
    """A slow pair whose keys are all the same adds one number to each query's logits, however large."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 40, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    speeds = torch.tensor([1.0, 1e-9])
    centres = []
    for size in (0.0, 1000.0):
        k[..., [1, 3]] = size
        centres.append(frequency_use(q, k, rotation=speeds, pairing="half"))
    small, large = centres
    torch.testing.assert_close(large.centre("softmax"), small.centre("softmax"), rtol=0, atol=1e-3)
    assert large.centre()[0] < -25 < -1 < large.centre("softmax")[0]


def offset_case(seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 4, 7, 6, generator=random), torch.randn(2, 2, 7, 6, generator=random)
    return q + torch.randn(6, generator=random), k + torch.randn(6, generator=random)


def offsets_by_hand(q: Tensor, k: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    strength, angle = torch.zeros(2, 4, 3, dtype=torch.float64)
    for h in range(4):
        for t in range(3):
            result = []
            for x, head in ((q, h), (k, h // 2)):
                values = [
                    complex(*x[b, head, i, 2 * t : 2 * t + 2].tolist()) for b in range(2) for i in range(lengths[b])
                ]
                result.append((sum(values) / len(values), sum(map(abs, values)) / len(values)))
            (mq, sq), (mk, sk) = result
            strength[h, t] = abs(mq) * abs(mk) / (sq * sk)
            angle[h, t] = cmath.phase(mq * mk.conjugate())
    return strength, angle


@given(st.integers(0, 10_000), st.integers(1, 7))
def test_rotary_offsets_match_a_loop(seed: int, length: int) -> None:
    q, k = offset_case(seed)
    actual = rotary_offsets(q, k, 3, torch.tensor([length, 7]), pairing="interleaved")
    strength, angle = offsets_by_hand(q, k, [length, 7])
    torch.testing.assert_close(actual.strength, strength, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(actual.angle, angle, rtol=1e-5, atol=1e-6)
    assert ((actual.strength >= 0) & (actual.strength <= 1 + 1e-12)).all()
    assert torch.isnan(rotary_offsets(0 * q, k, 3, pairing="interleaved").strength).all()
