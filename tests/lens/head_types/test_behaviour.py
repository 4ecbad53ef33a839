"""The shares are what a plain program finds that writes every query's table of logits out, content by position."""

from __future__ import annotations

import itertools
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
from tests.lens.models import attention_cases, decoder
from torch import Tensor
from torch.utils._pytree import tree_leaves

from toeplens import encodings
from toeplens.backends import DecoderSource
from toeplens.encodings import PositionalEncoding, Rotary
from toeplens.lens import AttentionTrace, LayerTrace, toeplitz_profile
from toeplens.lens.frequency import frequency_use
from toeplens.lens.head_types import two_way
from toeplens.lens.head_types.behaviour import (
    Behaviour,
    PermutationScores,
    _agreement_scores,
    behaviour,
    permutation_scores,
)
from toeplens.lens.kit import separable_keys
from toeplens.lens.kit.position import position_parts
from toeplens.lens.kit.separable_keys import AttentionOptions, KeySplit, SeparableKeys, iter_layer_keys
from toeplens.lens.kit.trace import CountedQueries
from toeplens.model import Decoder
from toeplens.utils import InputError

SIZES = {"vocab_size": 20, "d_model": 24, "d_ff": 16, "num_layers": 2, "num_heads": 3, "max_len": 16}
LENGTHS = torch.tensor([8, 5, 1, 7])


def shares_of(tables: list[list[np.ndarray]]) -> np.ndarray:
    """Positional, symbolic, interaction and mean variance of the tables M[j, m] of each head's queries: [4, H]."""
    rows = []
    for head in tables:
        sums, total = np.zeros(3), 0.0
        for table in head:
            mean = table.mean()
            position, content = table.mean(1) - mean, table.mean(0) - mean
            rest = table - mean - position[:, None] - content
            sums += [np.mean(x**2) for x in (position, content, rest)]
            total += np.mean((table - mean) ** 2)
        assert abs(sums.sum() - total) <= 1e-9 * total
        rows.append([*(sums / total), total / len(head)])
    return np.array(rows).T


def visible_keys(case: dict[str, Any], sequence: int, query: int) -> range:
    """The keys that a query sees."""
    length, end = case["q"].shape[2], int(case["lengths"][sequence])
    window, chunk = case["window"] or length, case.get("chunk") or length
    keys = [j for j in range(end) if j // chunk == query // chunk and abs(query - j) < window]
    keys = [j for j in keys if query < end and (j <= query or not case["causal"])]
    return range(keys[0], keys[-1] + 1) if keys else range(0)


def reference_shares(case: dict[str, Any]) -> np.ndarray:
    """The same of tensors q [B, H, N, d], k [B, G, N, d]: keys are turned pair by pair, the table is written out."""
    q, k = case["q"].double().numpy(), case["k"].double().numpy()
    count, heads, length, _ = q.shape
    p = np.zeros_like(k) if case["k_position"] is None else np.broadcast_to(case["k_position"].numpy(), k.shape)
    tables = []
    for head in range(heads):
        group = head // (heads // k.shape[1])
        tables.append([])
        for sequence in range(count):
            for i in range(length):
                visible = visible_keys(case, sequence, i)
                if len(visible) < 2:
                    continue
                first, stop = visible.start, visible.stop
                table = np.empty((stop - first, stop - first))
                for j in range(first, stop):
                    keys = k[sequence, group, first:stop] - p[sequence, group, first:stop] + p[sequence, group, j]
                    rotated = keys.copy()
                    theta = torch.zeros(1, 0) if case["rotation"] is None else case["rotation"]
                    for t in range(theta.shape[-1]):
                        angle = (j - i) * float(theta[head % len(theta), t])
                        n = theta.shape[-1]
                        a, b = (t, t + n) if case["pairing"] == "half" else (2 * t, 2 * t + 1)
                        rotated[:, a] = keys[:, a] * math.cos(angle) - keys[:, b] * math.sin(angle)
                        rotated[:, b] = keys[:, a] * math.sin(angle) + keys[:, b] * math.cos(angle)
                    table[j - first] = case["scale"] * rotated @ q[sequence, head, i]
                    bias = case["bias"]
                    if bias is not None and bias.ndim == 4:
                        table[j - first] += float(bias.expand(count, heads, -1, -1)[sequence, head, i, j])
                    elif bias is not None:
                        offset = i - j if case["causal"] else i - j + length - 1
                        table[j - first] += float(bias[head % len(bias), offset])
                tables[-1].append(table)
    return shares_of(tables)


def test_a_window_over_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of seven queries, in chunks of three."""
    monkeypatch.setattr(two_way, "CHUNK", 3)
    case = unmasked_case(17, window=7)
    np.testing.assert_allclose(shares(behaviour(**case)), reference_shares(case)[:3], rtol=0, atol=1e-8)


def shares(found: Behaviour) -> np.ndarray:
    return np.stack([found.positional, found.symbolic, found.interaction])


@given(attention_cases(), st.sampled_from([3, 128]), st.sampled_from([1, 2**19]), st.sampled_from([1, 2, 16]))
def test_the_closed_form_matches_explicit_tables(case: dict[str, Any], chunk: int, block: int, step: int) -> None:
    """float64, 1e-8 of the whole variance; with frequencies of 0, pi, 2 pi, nearly 0 and equal ones."""
    counts = [len(visible_keys(case, *place)) for place in np.ndindex(len(case["q"]), case["q"].shape[2])]
    alone = max(counts) < 2
    assert separable_keys_of(case).num_visible().flatten().tolist() == counts
    expected = reference_shares(case) if not alone else np.empty(0)
    with patch.multiple(two_way, CHUNK=chunk, BLOCK=block, STEP=step):
        actual = behaviour(**case)
    assert actual.queries == sum(count > 1 for count in counts)
    assert (actual.flat == alone).all()
    if alone:
        return
    np.testing.assert_allclose(shares(actual), expected[:3], rtol=0, atol=1e-8)
    np.testing.assert_allclose(actual.variance, expected[3], rtol=1e-8)
    assert (shares(actual) >= 0).all()
    assert (actual.positional + actual.symbolic <= 1 + 1e-12).all()  # exclusion
    np.testing.assert_allclose(shares(actual).sum(0), 1, rtol=0, atol=1e-12)
    if case["rotation"] is None:
        assert (actual.interaction == 0).all()  # every additive scheme


def random_case(length: int = 12, **others: Any) -> dict[str, Any]:
    made = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 2, 2, length, 6, generator=made, dtype=torch.float64).unbind(0)
    rotation = torch.tensor([1.0, 0.2, 0.01], dtype=torch.float64)
    return {"q": q, "k": k + 1, "rotation": rotation, "pairing": "interleaved", **others}


def unmasked_case(length: int = 12, **others: Any) -> dict[str, Any]:
    """With every entry that `by_hand` reads."""
    case = random_case(length, bias=None, k_position=None, causal=True, scale=1.0, window=None) | others
    return case | {"rotation": case["rotation"].reshape(1, 3), "lengths": torch.tensor([length, length])}


def test_slow_frequencies_keep_their_digits() -> None:
    """Turns of 1e-6 in all: Var(P) and Var(I) are of 1e-10 of the squares that they come from (rtol 1e-5)."""
    case = unmasked_case(rotation=torch.full((3,), 1e-6, dtype=torch.float64))
    actual, expected = behaviour(**case), reference_shares(case)
    np.testing.assert_allclose(shares(actual), expected[:3], rtol=1e-5)
    assert (actual.interaction > 0).all()
    assert (actual.interaction < 1e-9).all()


def separable_keys_of(case: dict[str, Any], **others: Any) -> SeparableKeys:
    arguments = {"pairing": "half"} | case | others
    return next(iter_layer_keys(arguments.pop("q"), arguments.pop("k"), AttentionOptions(**arguments)))[2]


def test_permutation_scores_permute_contents_within_the_window() -> None:
    """float64, 1e-12; the logits of the permutation scores."""
    case = random_case(k_position=random_case()["q"].roll(1, 0), bias=torch.linspace(0, 5, 12).double())
    near, far = (separable_keys_of(case, window=window) for window in (4, None))
    for query in (2, 9):
        first = max(0, query - 3)
        order = torch.arange(query + 1 - first).flip(0)
        every = torch.cat((torch.arange(first), order + first))
        expected = far.logits(1, query, every)[..., first:]
        torch.testing.assert_close(near.logits(1, query, order), expected, rtol=1e-12, atol=1e-12)
    actual = permutation_scores(**case, window=1 + 1, queries=99, permutations=2)
    assert actual.queries == 2 * 11


def test_constant_heads_are_flat() -> None:
    """Both behaviours at once: only where all logits are the same, and then neither is scored."""
    case = random_case(rotation=None)
    case["k"] = case["k"][..., :1, :].repeat(1, 1, 12, 1)
    case["k"][:, 1, 3] += 1
    actual = behaviour(**case)
    assert actual.flat.tolist() == [True, False]
    assert np.isnan(shares(actual)[:, 0]).all()
    alone = behaviour(case["q"][0, 0, :1], case["k"][0, 0, :1])
    assert alone.flat.shape == ()
    assert alone.flat
    assert alone.queries == 0
    assert np.isnan(alone.variance)


def test_a_variance_below_rounding_counts_as_zero() -> None:
    """Keys that are equal but for 1e-6 of their size: 2.5e-13 of the energy, under the 1e-12 that is rounding."""
    noise = torch.randn(1, 9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q = torch.ones_like(noise)
    assert behaviour(q, 1 + 1e-6 * noise).flat.all()
    assert not behaviour(q, 1 + 1e-5 * noise).flat.any()
    assert toeplitz_profile(q, 1 + 1e-6 * noise).variance_explained.isnan().all()
    assert toeplitz_profile(q, 1 + 1e-5 * noise).variance_explained.isfinite().all()


ENCODINGS: dict[str, dict[str, Any]] = {
    name: {"encoding": name}
    for name in ("nope", "rope", "alibi", "t5", "sinusoidal", "learned", "rope-absolute", "mla")
} | {
    "partial-rope": {"encoding": "partial-rope", "encoding_options": {"rotary_pct": 0.5, "heads": 2}},
    "rope-yarn": {"encoding": "rope-yarn"},  # its queries and keys have a magnitude
    "xpos": {"encoding": "xpos", "encoding_options": {"scale_base": 16}},  # and its own at every position
    "mla-released": {"encoding": "mla", "encoding_options": {"phase_table": "released", "rotary_dim": 4}},
    "axial-rope": {"encoding": "axial-rope"},
    "rope-half": {"encoding": "rope", "encoding_options": {"pairing": "half"}},
}
ADDITIVE = ("fox", "grape-path", "tupe", "fire", "shaw")


@cache
def model_of(encoding: str, protocol: str) -> Decoder:
    return decoder(seed=1, protocol=protocol, **SIZES, **ENCODINGS.get(encoding, {"encoding": encoding}))


def trace_of(encoding: str, protocol: str = "paper", **options: Any) -> AttentionTrace:
    tokens = torch.randint(0, 20, (4, 8), generator=torch.Generator().manual_seed(2))
    return AttentionTrace(DecoderSource(model_of(encoding, protocol)), tokens, LENGTHS, **options)


def shares_by_layer_logits(layer: LayerTrace, part: Tensor, counted: CountedQueries = "all") -> np.ndarray:
    """Shares from the layer's own logits, one content at a time standing at every position."""
    count, length = layer.q.shape[0], layer.q.shape[2]
    content = layer.k - part
    made = np.stack(
        [layer.logits(k=content[:, :, m : m + 1] + part).detach().double().numpy() for m in range(length)], axis=-1
    )
    tables: list[list[np.ndarray]] = [[] for _ in range(layer.q.shape[1])]
    for sequence in range(count):
        end = int(layer.present[sequence].sum())
        for i in range(end) if counted == "all" else [end - 1]:
            visible = i + 1 if layer.causal else end
            if visible > 1:
                for head, own in enumerate(tables):
                    own.append(made[sequence, head, i, :visible, :visible])
    return shares_of(tables)


@pytest.mark.parametrize(
    ("encoding", "protocol", "split"),
    [(name, "paper", "known") for name in ENCODINGS]
    + [(name, "released", "known") for name in ("t5", "sinusoidal", "mla")]
    + [("rope", "released", "mean"), ("mla", "paper", "mean"), ("learned", "paper", "none")],
)
def test_shares_of_a_trace_match_its_layers_logits(encoding: str, protocol: str, split: KeySplit) -> None:
    """float64, 1e-8; both layers."""
    trace = trace_of(encoding, protocol)
    actual = behaviour(trace, split=split)
    assert actual.positional.shape == (2, 3)
    assert actual.layers == (0, 1)
    first = None
    for index, name in enumerate(actual.splits):
        layer = trace[index]
        first = layer.input_position_part if index == 0 else first
        if name == "mean":
            p = position_parts(trace, layer, "mean")[1]
        else:
            assert first is not None
            p = (first if name == "input" else 0 * first).expand_as(layer.inputs)
        expected = shares_by_layer_logits(layer, layer.project_part(p, p)[1])
        np.testing.assert_allclose(shares(actual)[:, index], expected[:3], rtol=0, atol=1e-8)
        np.testing.assert_allclose(actual.variance[index], expected[3], rtol=1e-8)
    multiplies = any(word in encoding for word in ("rope", "mla", "xpos"))
    assert (actual.interaction[:, :2] > 1e-4).all() if multiplies else (actual.interaction < 1e-12).all()


@pytest.mark.parametrize("encoding", ["rope", "t5"])
def test_the_last_layer_can_be_measured_at_the_readout_query_only(encoding: str) -> None:
    """float64, 1e-8; of the first layer all queries are used, of the last one each sequence's last token's."""
    trace = trace_of(encoding)
    every, used = behaviour(trace), behaviour(trace, counted="used")
    np.testing.assert_array_equal(shares(used)[:, 0], shares(every)[:, 0])
    layer = trace[1]
    expected = shares_by_layer_logits(layer, 0 * layer.project_part(layer.inputs, layer.inputs)[1], "used")
    np.testing.assert_allclose(shares(used)[:, 1], expected[:3], rtol=0, atol=1e-8)
    assert abs(shares(used)[:, 1] - shares(every)[:, 1]).max() > 1e-3
    scores = permutation_scores(trace[1], queries=99, permutations=2, counted="used")
    assert scores.queries == (LENGTHS > 1).sum()
    mean = behaviour(trace_of(encoding, "released"), counted="used")  # its model reads all positions
    np.testing.assert_array_equal(shares(mean), shares(behaviour(trace_of(encoding, "released"))))


def test_known_position_parts_are_those_of_the_input() -> None:
    assert behaviour(trace_of("sinusoidal")).splits == ("input", "none")
    assert behaviour(trace_of("sinusoidal", "released")).splits == ("input", "input")
    assert behaviour(trace_of("sinusoidal", "released", layers=[1])).splits == ("input",)
    assert behaviour(trace_of("alibi")).splits == ("none", "none")
    all_layers, single = behaviour(trace_of("sinusoidal")), behaviour(trace_of("sinusoidal")[0])
    np.testing.assert_array_equal(single.positional, all_layers.positional[0])
    given = behaviour(trace_of("sinusoidal", layers=[0]), split="input")
    np.testing.assert_array_equal(given.positional, all_layers.positional[:1])
    ablated = behaviour(trace_of("sinusoidal", layers=[0]), split="ablate")
    np.testing.assert_allclose(ablated.positional, all_layers.positional[:1], rtol=1e-8)


@pytest.mark.parametrize("encoding", [*ADDITIVE, "path", "pope", "dape", "rerope"])
def test_any_pairwise_logit_has_shares(encoding: str) -> None:
    """float64, 1e-8, of both layers; a sum of position and content has an interaction of 0 (Shaw's reads the query);
    permutations of the keys are those of the layer's own logits."""
    trace = trace_of(encoding)
    for layer in trace:
        actual = behaviour(layer)
        expected = shares_by_layer_logits(layer, torch.zeros_like(layer.k))
        np.testing.assert_allclose(shares(actual), expected[:3], rtol=0, atol=1e-8)
        if encoding in ADDITIVE:
            assert (actual.interaction < 1e-12).all()
            assert (actual.positional > 1e-6).all()
    keys = next(iter_layer_keys(layer, None, AttentionOptions()))[2]
    order = torch.tensor([3, 0, 2, 1])
    changed = layer.k.clone()
    changed[0, :, :4] = layer.k[0, :, order]
    expected_logits = layer.logits(k=changed)[0, :, 3, :4].detach()
    torch.testing.assert_close(keys.logits(0, 3, order), expected_logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("field", ["q", "content", "bias"])
def test_a_wrong_decomposition_of_a_layer_is_detected(field: str) -> None:
    """What is put together from a layer must give the layer's own logits."""
    layer = trace_of("alibi")[0]
    right = next(iter_layer_keys(layer, None, AttentionOptions(split="none")))[2]
    assert separable_keys._matches_layer(layer, right)
    assert not separable_keys._matches_layer(layer, replace(right, **{field: getattr(right, field) * 1.01}))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"k": None}, "k"),
        ({"k": torch.zeros(2, 3, 12, 6)}, "q"),
        ({"rotation": torch.zeros(5, 3)}, "rotation"),
        ({"bias": torch.zeros(12), "causal": False}, "bias"),
        ({"k_position": torch.zeros(3, 12, 6)}, "k_position"),
        ({"window": 0}, "window"),
        ({"window": 2.5}, "window"),
        ({"chunk": 0}, "chunk"),
        ({"lengths": torch.tensor([1])}, "lengths"),
        ({"k": torch.full((2, 2, 12, 6), torch.nan)}, "k"),
    ],
)
def test_invalid_input_is_refused_in_one_sentence(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=f"^{field}(:| must) "):
        behaviour(**random_case() | change)


def test_a_trace_cannot_be_combined_with_tensors() -> None:
    with pytest.raises(InputError, match=r"^k(:| must) "):
        behaviour(trace_of("rope"), torch.zeros(2, 2))
    with pytest.raises(InputError, match=r"^window(:| must) "):
        behaviour(trace_of("rope"), window=3)
    with pytest.raises(InputError, match=r"^split(:| must) "):
        behaviour(trace_of("rope")[0], split="mean")


def encoding_of(name: str, **options: Any) -> PositionalEncoding:
    return encodings.build(name, d_model=16, num_heads=2, head_dim=8, max_len=8, **options)


@pytest.mark.parametrize("encoding", ["rope", "rope-half", "partial-rope", "rope-yarn", "xpos", "alibi", "t5", "nope"])
@pytest.mark.parametrize("k_position", [False, True])
def test_an_encoding_supplies_rotation_pairing_and_bias(encoding: str, k_position: bool) -> None:
    """Of tensors, without the layer that they are of (float64, 1e-6: the encoding's own tables)."""
    layer = trace_of(encoding)[1]
    p = torch.randn(8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * k_position
    given: dict[str, Any] = {"rotation": layer.encoding, "k_position": p if k_position else None}
    actual = behaviour(layer.q, layer.k, **given, lengths=layer.lengths, scale=layer.scale)
    expected = shares_by_layer_logits(layer, p.expand_as(layer.k))
    np.testing.assert_allclose(shares(actual), expected[:3], rtol=0, atol=1e-6)
    np.testing.assert_allclose(actual.variance, expected[3], rtol=1e-6)
    assert actual.queries == 7 + 4 + 6


def test_every_measure_accepts_an_encoding_or_its_frequencies() -> None:
    """Windows, one head, grouped keys; behaviour, permutations and frequency use."""
    encoding = encoding_of("rope", pairing="half")
    assert isinstance(encoding, Rotary)
    q, k = torch.randn(2, 2, 7, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    k = k[:1]
    asked: dict[str, Any] = {"rotation": encoding.frequencies[0], "pairing": "half"}
    for options in ({}, {"window": 3}, {"causal": False}):
        for measure in (behaviour, permutation_scores, frequency_use):
            expected, actual = (measure(q, k, **options, **each).to_dict() for each in (asked, {"rotation": encoding}))
            for value, other in zip(tree_leaves(expected), tree_leaves(actual), strict=True):
                np.testing.assert_allclose(np.array(other, float), np.array(value, float), rtol=0, atol=1e-9)
    alone = encodings.build("rope", d_model=8, num_heads=1, head_dim=8, max_len=8)
    assert behaviour(q[0], k[0], rotation=alone).positional.shape == ()


def test_an_incompatible_encoding_is_refused() -> None:
    q, k = torch.zeros(2, 2, 7, 8, dtype=torch.float64)
    encoding = encoding_of("rope")
    with pytest.raises(InputError, match="bias must not be set with an encoding"):
        behaviour(q, k, rotation=encoding, bias=torch.zeros(7))
    with pytest.raises(InputError, match="pairing must be 'interleaved', as in the encoding, got 'half'"):
        behaviour(q, k, rotation=encoding, pairing="half")
    with pytest.raises(InputError, match="rotation must have 1 heads of 8 dimensions, as q has, got 2 heads of 8"):
        behaviour(q[:1], k[:1], rotation=encoding)
    with pytest.raises(InputError, match=r"FoX reads the tokens' content. Use a trace"):
        behaviour(q, k, rotation=encoding_of("fox"))
    with pytest.raises(InputError, match="logits of Shaw are not a sum over pairs of dimensions"):
        frequency_use(q, k, rotation=encoding_of("shaw"))


def case_of(length: int = 5, **others: Any) -> dict[str, Any]:
    case = random_case(length, **others)
    return case | {name: case[name][0] for name in ("q", "k")}


def logits_of(case: dict[str, Any], head: int, i: int, order: tuple[int, ...]) -> np.ndarray:
    """The logits of one causal query with the key of order[j] at position j, turned pair by pair."""
    q = torch.view_as_complex(case["q"][head, i].reshape(-1, 2)).numpy()
    k = torch.view_as_complex(case["k"][head].reshape(len(case["bias"]), -1, 2)).numpy()
    theta = case["rotation"].numpy()
    made = [(q * k[m].conj() * np.exp(1j * (i - j) * theta)).sum().real for j, m in enumerate(order)]
    return np.array(made) + case["bias"].numpy()[i - np.arange(i + 1)]


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum()


def test_sampled_scores_converge_to_all_permutations() -> None:
    """Every query drawn, 20000 permutations each; the mean over all n! by enumeration, to 0.02."""
    bias = torch.linspace(0, -1, 5, dtype=torch.float64)
    case = case_of(bias=bias)
    actual = permutation_scores(**case, queries=100, permutations=20000)
    assert actual.queries == 4
    for scores, of in ((actual.logits, lambda x: x), (actual.weights, softmax)):
        for head in range(2):
            top, bottom = np.zeros(2), 0.0
            for i in range(1, 5):
                base = of(logits_of(case, head, i, tuple(range(i + 1))))
                terms = []
                for order in itertools.permutations(range(i + 1)):
                    changed = of(logits_of(case, head, i, order))
                    covariances = [np.cov(changed, y, bias=True)[0, 1] for y in (base, base[list(order)])]
                    terms.append([*covariances, changed.var() + base.var()])
                mean = np.mean(terms, axis=0)
                top, bottom = top + 2 * mean[:2], bottom + mean[2]
            ours = [scores.positional[head], scores.symbolic[head]]
            np.testing.assert_allclose(ours, top / bottom, rtol=0, atol=0.02)


def test_the_standard_error_of_a_ratio_by_hand() -> None:
    """Two queries: covariances 1 and 3 over variances 2 and 2 are 1 on the whole, residuals -1 and 1."""
    actual = _agreement_scores(np.array([[1.0, 0.0, 2.0, 9.0], [3.0, 0.0, 2.0, 9.0]])[..., None])
    assert actual.positional == 1
    assert actual.positional_error == pytest.approx(math.sqrt(2 * 2 / (2 - 1)) / 4)


def test_one_query_has_no_standard_error_and_a_flat_head_no_score() -> None:
    case = case_of(9)
    single = permutation_scores(**case, queries=1).logits
    assert np.isfinite(single.positional).all()
    assert np.isnan(single.positional_error).all()
    same = case["k"][:, :1].expand_as(case["k"])
    flat = permutation_scores(**case | {"k": same, "rotation": None})
    for scores in (flat.logits, flat.weights):
        assert np.isnan(scores.positional).all()
        assert np.isnan(scores.symbolic_error).all()


def test_a_trace_scores_every_head_and_its_record_round_trips() -> None:
    trace = trace_of("alibi")
    actual = permutation_scores(trace, queries=6, permutations=3)
    assert actual.logits.positional.shape == actual.weights.symbolic_error.shape == (2, 3)
    assert (actual.queries, actual.permutations, actual.layers) == ((6, 6), 3, (0, 1))
    assert permutation_scores(trace, queries=6, permutations=3, counted="used").queries == (6, 3)
    assert actual.splits == ("none", "none")
    for scores in (actual, permutation_scores(case_of()["q"][0], case_of()["k"][0], queries=1)):
        restored = PermutationScores.from_dict(scores.to_dict())
        assert restored.to_dict() == scores.to_dict()
        assert restored.logits.positional.shape == scores.logits.positional.shape


def test_invalid_counts_are_refused_in_one_sentence() -> None:
    for name in ("queries", "permutations"):
        with pytest.raises(InputError, match=f"^{name}(:| must) "):
            permutation_scores(**{**case_of(), name: 0})
    with pytest.raises(InputError, match=r"^q(:| must) "):
        permutation_scores(**case_of(1), layout="bhnd")
