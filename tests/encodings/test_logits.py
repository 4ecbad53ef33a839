"""Encodings that change logits or weights, against plain loops and public implementations."""

from __future__ import annotations

import itertools
import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.encodings.samples import SIZES, assert_close, random_tensor
from tests.encodings.samples import build as samples_build
from torch import Tensor, nn
from transformers import DebertaConfig, DebertaV2Config, VitsConfig, Wav2Vec2BertConfig, XLNetConfig
from transformers.models.deberta import modeling_deberta as deberta
from transformers.models.deberta_v2 import modeling_deberta_v2 as deberta_v2
from transformers.models.vits.modeling_vits import VitsAttention
from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert as wav2vec2_bert
from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

from toeplens import encodings
from toeplens.encodings import PositionalEncoding, attend, attention_logits, attention_weights
from toeplens.encodings.logits import DAPEv2

# ---- relative vectors -----------------------------------------------------------------------------------------------

B, H, D = 2, 3, 8
SCALE = 0.3
QUERIES, KEYS = [3, 9, 60, -4], [0, 3, 61, 4, 30, -40, 2]

build = partial(samples_build, std=1.0, grad=False)


def heads(*lengths: int, dim: int = D) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(B, H, n, dim, generator=generator, dtype=torch.float64) for n in lengths)


def logits(encoding: PositionalEncoding, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, **more: Any) -> Tensor:
    return attention_logits(
        q, k, encoding=encoding, q_positions=queries, k_positions=keys, scale=SCALE, causal=False, **more
    )


def by_loops(added: Any, q: Tensor, k: Tensor, queries: list[int], keys: list[int]) -> Tensor:
    """Scaled logits whose position part is added(head, q_i, k_j, i, j), pair by pair."""
    result = torch.zeros(*q.shape[:-1], k.shape[-2], dtype=torch.float64)
    for b in range(q.shape[0]):
        for h, (n, i), (m, j) in itertools.product(range(q.shape[1]), enumerate(queries), enumerate(keys)):
            result[b, h, n, m] = SCALE * (float(q[b, h, n] @ k[b, h, m]) + added(h, q[b, h, n], k[b, h, m], i, j))
    return result


# ---- Shaw -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared_heads", [True, False])
@pytest.mark.parametrize("k", [0, 2, 16])
def test_shaw_adds_the_vector_of_the_clipped_offset(shared_heads: bool, k: int) -> None:
    encoding = build("shaw", max_distance=k, shared_heads=shared_heads)
    q, keys = heads(4, 7)

    def added(h: int, query: Tensor, _: Tensor, i: int, j: int) -> float:
        return float(query @ encoding.keys[0 if shared_heads else h, max(-k, min(k, j - i)) + k])

    ours = logits(encoding, q, keys, torch.tensor(QUERIES), torch.tensor(KEYS))
    assert_close(ours, by_loops(added, q, keys, QUERIES, KEYS), 1e-10)


@pytest.mark.parametrize("shared_heads", [True, False])
def test_shaw_adds_vectors_to_the_values_too(shared_heads: bool) -> None:
    encoding = build("shaw", max_distance=3, shared_heads=shared_heads)
    q, k, v = heads(4, 7, 7)
    options = {"encoding": encoding, "q_positions": torch.tensor(QUERIES), "k_positions": torch.tensor(KEYS)}
    weights = attention_weights(q, k, scale=SCALE, causal=False, **options)
    expected = weights @ v
    for b, h, (n, i), (m, j) in itertools.product(range(B), range(H), enumerate(QUERIES), enumerate(KEYS)):
        row = encoding.values[0 if shared_heads else h, max(-3, min(3, j - i)) + 3]
        expected[b, h, n] += weights[b, h, n, m] * row
    assert_close(attend(q, k, v, scale=SCALE, causal=False, **options), expected, 1e-10)
    without = build("shaw", max_distance=3, shared_heads=shared_heads, on_values=False)
    assert without.add_values(weights, options["q_positions"], options["k_positions"]) is None
    assert len(list(without.parameters())) == 1


def test_shaw_sums_many_small_weights_exactly_in_bfloat16() -> None:
    """4096 weights of 1/4096 on one vector: summed in bfloat16 they would stop growing at 1/16."""
    encoding = build("shaw", max_distance=1).to(torch.bfloat16)
    weights = torch.full((1, H, 1, 4096), 1 / 4096, dtype=torch.bfloat16)
    added = encoding.add_values(weights, torch.tensor([10_000]), torch.arange(4096))
    assert_close(added.double(), encoding.values[0, 0].double().expand(1, H, 1, -1), 1e-2)


def test_shaw_on_keys_matches_wav2vec2_bert() -> None:
    """There the vectors of offsets j - i are called relative keys, and are one table for all heads."""
    ours = build("shaw", max_distance=5, on_values=False)
    config = Wav2Vec2BertConfig(
        hidden_size=24,
        num_attention_heads=H,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=5,
        right_max_position_embeddings=5,
    )
    theirs = wav2vec2_bert.Wav2Vec2BertSelfAttention(config).double()
    with torch.no_grad():
        theirs.distance_embedding.weight.copy_(ours.keys[0])
    q, k = heads(20, 20)
    p = torch.arange(20)
    _, bias = wav2vec2_bert._apply_relative_key_position_encoding(theirs, q, k)
    mine = attention_logits(q, k, encoding=ours, q_positions=p, k_positions=p, scale=theirs.scaling, causal=False)
    assert_close(mine, q @ k.transpose(-2, -1) * theirs.scaling + bias, 1e-12)


def test_shaw_on_keys_and_values_matches_vits_within_its_window() -> None:
    """Beyond its window VITS adds nothing where Shaw's last vector goes on, so the sequence is no longer than it."""
    length = 5
    ours = build("shaw", max_distance=4)
    theirs = VitsAttention(VitsConfig(hidden_size=24, num_attention_heads=H, window_size=4, attention_dropout=0.0))
    theirs = theirs.double().eval()
    with torch.no_grad():
        theirs.emb_rel_k.copy_(ours.keys)
        theirs.emb_rel_v.copy_(ours.values)
        x = torch.randn(B, length, 24, dtype=torch.float64)
        out, _ = theirs(x)
        q, k, v = (
            layer(x).unflatten(-1, (H, D)).transpose(1, 2) for layer in (theirs.q_proj, theirs.k_proj, theirs.v_proj)
        )
        p = torch.arange(length)
        z = attend(q, k, v, encoding=ours, q_positions=p, k_positions=p, scale=D**-0.5, causal=False)
        assert_close(theirs.out_proj(z.transpose(1, 2).flatten(-2)), out, 1e-12)


# ---- Transformer-XL -------------------------------------------------------------------------------------------------


def xl_terms(encoding: PositionalEncoding) -> Any:
    def added(h: int, query: Tensor, key: Tensor, i: int, j: int) -> float:
        phases = torch.tensor([(i - j) / 10000 ** (2 * t / 24) for t in range(12)], dtype=torch.float64)
        r = encoding.weight[h] @ torch.cat((phases.sin(), phases.cos()))
        return float(query @ r + encoding.u[h, 0] @ key + encoding.v[h, 0] @ r)

    return added


def test_transformer_xl_matches_its_four_terms() -> None:
    encoding = build("transformer-xl")
    q, k = heads(4, 7)
    ours = logits(encoding, q, k, torch.tensor(QUERIES), torch.tensor(KEYS))
    assert_close(ours, by_loops(xl_terms(encoding), q, k, QUERIES, KEYS), 1e-10)
    rows = torch.tensor([QUERIES, [5, 1, 2, 1000]])
    both = logits(encoding, q, k, rows, torch.tensor(KEYS))
    assert_close(both[1:], by_loops(xl_terms(encoding), q[1:], k[1:], rows[1].tolist(), KEYS), 1e-10)


def test_transformer_xl_matches_xlnet() -> None:
    length = 12
    ours = build("transformer-xl")
    config = XLNetConfig(vocab_size=5, d_model=24, n_head=H, n_layer=1, d_inner=8, dropout=0.0)
    theirs = XLNetRelativeAttention(config).double()
    with torch.no_grad():
        theirs.r.copy_(ours.weight.permute(2, 0, 1))
        theirs.r_w_bias.copy_(ours.u.squeeze(1))
        theirs.r_r_bias.copy_(ours.v.squeeze(1))
    r = XLNetModel(config).relative_positional_encoding(length, length, bsz=B).double()  # sinusoids made in float32
    q, k = heads(length, length)
    places = torch.einsum("ibh,hnd->ibnd", r, theirs.r)
    i_first, j_first = (x.permute(2, 0, 1, 3) for x in (q, k))
    _, weights = theirs.rel_attn_core(i_first, j_first, j_first, places, output_attentions=True)
    p = torch.arange(length)
    mine = attention_weights(q, k, encoding=ours, q_positions=p, k_positions=p, scale=D**-0.5, causal=False)
    assert_close(mine, weights.permute(2, 3, 0, 1), 1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_transformer_xl_layers_share_only_u_and_v(tied: bool) -> None:
    encoding = encodings.build("transformer-xl", **SIZES, tied_biases=tied)
    second = encoding.for_layer(1)
    assert encoding.for_layer(0) is encoding
    assert not torch.equal(second.weight, encoding.weight)
    assert (second.u is encoding.u) is tied
    assert (second.v is encoding.v) is tied


# ---- DeBERTa --------------------------------------------------------------------------------------------------------


def reference_bucket(offset: int, buckets: int, most: int) -> int:
    middle = buckets // 2
    if abs(offset) <= middle:
        return offset
    steps = math.log(abs(offset) / middle) / math.log((most - 1) / middle) * (middle - 1)
    return int(math.copysign(math.ceil(steps) + middle, offset))


@pytest.mark.parametrize("terms", [["c2p", "p2c"], ["p2c"], ["c2p"]])
@pytest.mark.parametrize(("k", "buckets"), [(5, None), (64, None), (40, 16)])
@pytest.mark.parametrize("p2c_index", ["paper", "released"])
def test_deberta_matches_its_terms(terms: list[str], k: int, buckets: int | None, p2c_index: str) -> None:
    encoding = build("deberta", terms=terms, max_distance=k, position_buckets=buckets, p2c_index=p2c_index)
    span = k if buckets is None else buckets
    assert encoding.table.shape == (2 * span, 24)

    def row(offset: int) -> Tensor:
        offset = offset if buckets is None else reference_bucket(offset, buckets, k)
        return encoding.table[min(max(offset + span, 0), 2 * span - 1)]

    def added(h: int, query: Tensor, key: Tensor, i: int, j: int) -> float:
        total = 0.0
        if "c2p" in terms:
            total += float(query @ (row(i - j) @ encoding.projections["c2p"][h]))
        if "p2c" in terms:
            total += float(key @ (row(j - i if p2c_index == "paper" else i - j) @ encoding.projections["p2c"][h]))
        return total

    q, keys = heads(4, 7)
    ours = logits(encoding, q, keys, torch.tensor(QUERIES), torch.tensor(KEYS))
    assert_close(ours, by_loops(added, q, keys, QUERIES, KEYS), 1e-10)


@pytest.mark.parametrize(("buckets", "most"), [(256, 512), (16, 40), (32, 512)])
def test_deberta_buckets_match_deberta_v2(buckets: int, most: int) -> None:
    offsets = torch.arange(-most - 50, most + 51)
    theirs = deberta_v2.make_log_bucket_position(offsets, buckets, most).long()
    ours = build("deberta", max_distance=most, position_buckets=buckets, max_len=1024).table_rows(offsets)
    assert torch.equal(ours, (theirs + buckets).clamp(0, 2 * buckets - 1))


@pytest.mark.parametrize(("k", "buckets"), [(10, -1), (40, 16)])
@pytest.mark.parametrize("terms", [["c2p", "p2c"], ["c2p"], ["p2c"]])
def test_deberta_matches_deberta_v2_disentangled_bias(terms: list[str], k: int, buckets: int) -> None:
    """Its scale is formed in float32: with such a head it is 1/6 or 1/4, exactly."""
    length, dim = 30, 12 if len(terms) == 2 else 8
    width = H * dim
    options = {"position_buckets": None if buckets < 0 else buckets, "max_distance": k, "terms": terms}
    options["p2c_index"] = "released"
    ours = build("deberta", **options, head_dim=dim, d_model=width)
    config = DebertaV2Config(
        hidden_size=width,
        num_attention_heads=H,
        relative_attention=True,
        pos_att_type=terms,
        max_relative_positions=k,
        position_buckets=buckets,
        hidden_dropout_prob=0.0,
    )
    theirs = deberta_v2.DisentangledSelfAttention(config).double()
    with torch.no_grad():
        for term, name in (("c2p", "pos_key_proj"), ("p2c", "pos_query_proj")):
            if term in terms:
                layer = getattr(theirs, name)
                layer.weight.copy_(ours.projections[term].transpose(1, 2).flatten(0, 1))
                layer.bias.zero_()  # the paper has none
    q, keys = heads(length, length, dim=dim)
    bias = theirs.disentangled_attention_bias(q.flatten(0, 1), keys.flatten(0, 1), None, ours.table, 1 + len(terms))
    scale = ((1 + len(terms)) * dim) ** -0.5
    p = torch.arange(length)
    mine = attention_logits(q, keys, encoding=ours, q_positions=p, k_positions=p, scale=scale, causal=False)
    assert_close(mine - q @ keys.transpose(-2, -1) * scale, bias.unflatten(0, (B, H)), 1e-12)


def test_deberta_matches_deberta_disentangled_bias() -> None:
    length, dim, width = 20, 12, 36
    ours = build("deberta", max_distance=64, p2c_index="released", head_dim=dim, d_model=width)
    config = DebertaConfig(
        hidden_size=width,
        num_attention_heads=H,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        max_relative_positions=64,
        hidden_dropout_prob=0.0,
    )
    theirs = deberta.DisentangledSelfAttention(config).double()
    with torch.no_grad():
        for term, layer in (("c2p", theirs.pos_proj), ("p2c", theirs.pos_q_proj)):
            layer.weight.copy_(ours.projections[term].transpose(1, 2).flatten(0, 1))
        theirs.pos_q_proj.bias.zero_()  # the paper has none
    q, k = heads(length, length, dim=dim)
    p, scale = torch.arange(length), 1 / 6
    relative = deberta.build_relative_position(q, k)
    bias = theirs.disentangled_att_bias(q * scale, k, relative, ours.table, 3)
    mine = attention_logits(q, k, encoding=ours, q_positions=p, k_positions=p, scale=scale, causal=False)
    assert_close(mine - q @ k.transpose(-2, -1) * scale, bias, 1e-12)


def test_deberta_layers_share_only_the_table() -> None:
    encoding = encodings.build("deberta", **SIZES)
    second = encoding.for_layer(1)
    assert encoding.table.shape == (128, 24)  # 512, but at most max_len
    assert second.table is encoding.table
    for term in ("c2p", "p2c"):
        assert not torch.equal(second.projections[term], encoding.projections[term])


# ---- maps of scores -------------------------------------------------------------------------------------------------

N = 9
DAPES: list[tuple[str, dict[str, Any]]] = [
    ("dape-v2", {}),
    ("dape-v2", {"base": "kerple-log", "kernel_size": 5}),
    ("dape-v2", {"base": "none"}),
    ("dape", {}),
    ("dape", {"base": "rope"}),
]
every_dape = pytest.mark.parametrize(("name", "options"), DAPES)
PAST = torch.ones(N, N, dtype=torch.bool).tril()

build_map = partial(samples_build, std=0.5)


def logits_of(encoding: PositionalEncoding, q: Tensor, k: Tensor, **more: Any) -> Tensor:
    p = torch.arange(k.shape[-2])
    return attention_logits(q, k, encoding=encoding, q_positions=p[-q.shape[-2] :], k_positions=p, scale=0.3, **more)


def maps(encoding: DAPEv2, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """S, and B or (where there is none) nothing."""
    p = torch.arange(N)
    if encoding.uses_rope:
        q, k = encodings.build("rope", pairing="half", **SIZES).rotate(q, k, p, p)
    scores = q @ k.transpose(-1, -2) * 0.3
    if encoding.base is None or encoding.uses_rope:
        return scores, scores[:, :0]
    return scores, encoding.base.bias(p, p).double().expand(B, -1, -1, -1)


def leaky(x: float) -> float:
    return x if x > 0 else 0.01 * x


# ---- DAPE -----------------------------------------------------------------------------------------------------------


@every_dape
def test_dape_applies_its_network_to_visible_logits_only(name: str, options: dict) -> None:
    encoding = build_map(name, **options)
    q, k = random_tensor(2, B, H, N, D)
    with torch.no_grad():
        ours = logits_of(encoding, q, k)
        scores, bias = maps(encoding, q, k)
    both = torch.cat((scores, bias), dim=1)
    inward, outward = encoding.inward, encoding.outward
    size = inward.weight.shape[-1]
    half = size // 2
    first, second = inward.weight[:, :, 0].detach(), outward.weight[:, :, 0].detach()

    def hidden(b: int, i: int, j: int) -> Tensor:
        total = inward.bias.detach().clone()
        for tap in range(size):
            if 0 <= j + tap - half <= i:
                total += first[:, :, tap] @ both[b, :, i, j + tap - half]
        return torch.tensor([leaky(x) for x in total.tolist()], dtype=torch.float64)

    for b, i, j in product(range(B), (0, 1, 5, N - 1), range(N)):
        if j > i:
            continue
        expected = scores[b, :, i, j] + (bias[b, :, i, j] if bias.numel() else 0) + outward.bias.detach()
        for tap in range(size):
            expected = expected + second[:, :, tap] @ hidden(b, i, j + tap - half)
        assert float((ours[b, :, i, j] - expected).abs().max()) < 1e-12


@every_dape
def test_dape_matches_the_released_code_except_at_borders(name: str, options: dict) -> None:
    """The program: both maps cut to the lower triangle, and two padded convolutions over them, heads first."""
    encoding = build_map(name, **options)
    q, k = random_tensor(2, B, H, N, D)
    size = encoding.inward.weight.shape[-1]
    width, half = encoding.inward.out_channels, size // 2
    theirs = nn.Sequential(
        nn.Conv2d(encoding.inward.in_channels, width, (1, size), (1, 1), (0, half)),
        nn.LeakyReLU(),
        nn.Conv2d(width, H, (1, size), (1, 1), (0, half)),
    ).double()
    with torch.no_grad():
        for layer, source in ((theirs[0], encoding.inward), (theirs[2], encoding.outward)):
            layer.weight.copy_(source.weight)
            layer.bias.copy_(source.bias)
        scores, bias = maps(encoding, q, k)
        expected = theirs(torch.cat((scores, bias), dim=1).tril()) + scores + (bias if bias.numel() else 0)
        apart = (logits_of(encoding, q, k).masked_fill(~PAST, 0) - expected.masked_fill(~PAST, 0)).abs()
    assert float(apart[..., half : N - half].max()) < 1e-12
    assert bool((apart[..., :half] > 1e-3).any()) == (half > 0)
    assert bool((apart[..., N - half :] > 1e-3).any()) == (half > 0)


def test_masks_can_differ_by_head() -> None:
    encoding, (q, k) = build_map("dape-v2"), random_tensor(2, B, H, N, D)
    window = PAST & ~torch.ones(N, N, dtype=torch.bool).tril(-3)
    mask = torch.stack((PAST, window, PAST)).unsqueeze(0)
    with torch.no_grad():
        ours = logits_of(encoding, q, k, mask=mask)
        scores, bias = maps(encoding, q, k)
        shown = torch.cat([part.masked_fill(~mask, 0) for part in (scores, bias)], dim=1)
        grown = nn.functional.pad(shown, (2, 2))
        refined = encoding.outward(nn.functional.leaky_relu(encoding.inward(grown)))
        expected = (scores + bias + refined).masked_fill(~mask, float("-inf"))
    assert torch.equal(ours.isinf(), ~mask.expand_as(ours))
    assert float((ours - expected)[mask.expand_as(ours)].abs().max()) < 1e-12


# ---- URPE -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["t5", "relative-table", "none"])
def test_urpe_weights_are_a_softmax_times_an_offset_factor(base: str) -> None:
    encoding = build_map("urpe", base=base)
    q, k, v = random_tensor(3, B, H, N, D)
    p = torch.tensor([0, 1, 2, 5, 9, 30, 63, 64, 200])  # offsets of 63 and more share a factor
    more: dict[str, Any] = {"encoding": encoding, "q_positions": p, "k_positions": p, "scale": 0.3}
    with torch.no_grad():
        weights = attention_weights(q, k, **more)
        out = attend(q, k, v, **more)
        expected = torch.zeros_like(weights)
        for i in range(N):
            row = (q[:, :, i : i + 1] @ k[:, :, : i + 1].transpose(-1, -2)).squeeze(-2) * 0.3
            if encoding.base is not None:
                row = row + encoding.base.bias(p[i : i + 1], p[: i + 1])[:, 0]
            row = row.exp() / row.exp().sum(-1, keepdim=True)
            for j in range(i + 1):
                factor = encoding.factors.weight[min(int(p[i] - p[j]), 63) + 63]
                expected[:, :, i, j] = row[:, :, j] * factor
    assert float((weights - expected).abs().max()) < 1e-12
    assert float((out - expected @ v).abs().max()) < 1e-12


# ---- stick-breaking -------------------------------------------------------------------------------------------------


ALL_OPTIONS = [{"own": own, "remainder": remainder} for own in (False, True) for remainder in ("dropped", "own")]
OPTIONS = pytest.mark.parametrize("options", ALL_OPTIONS, ids=lambda o: f"own-{o['own']}-{o['remainder']}")


def weights_of(q: Tensor, k: Tensor, options: dict[str, Any], **more: Any) -> Tensor:
    return attention_weights(q, k, **attention_options(options, q.shape[2], k.shape[2]), **more)


def attention_options(options: dict[str, Any], queries: int, keys: int) -> dict[str, Any]:
    encoding, places = encodings.build("stick-breaking", **SIZES, **options), torch.arange(keys)
    return {
        "encoding": encoding,
        "q_positions": places[keys - queries :],
        "k_positions": places,
        "scale": encoding.scale,
    }


def reference_sticks(q: Tensor, k: Tensor, options: dict[str, Any], visible: Tensor) -> Tensor:
    """A stick of length 1 for each query: keys, from the nearest on, take their share of what is left of it."""
    weights = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.float64)
    for b, h, i in itertools.product(range(q.shape[0]), range(H), range(q.shape[2])):
        stick = 1.0
        for j in range(i if options["own"] else i - 1, -1, -1):
            if visible[b, i, j]:
                beta = 1 / (1 + math.exp(-float(q[b, h, i] @ k[b, h, j]) / math.sqrt(D)))
                weights[b, h, i, j] = beta * stick
                stick *= 1 - beta
        if options["remainder"] == "own" and visible[b, i, i]:
            weights[b, h, i, i] += stick
    return weights


@OPTIONS
def test_stick_breaking_weights_match_the_reference(options: dict[str, Any]) -> None:
    q, k = random_tensor(2, H, N, D) * 2, random_tensor(2, H, N, D, seed=2) * 2
    expected = reference_sticks(q, k, options, torch.ones(2, N, N, dtype=torch.bool))
    assert_close(weights_of(q, k, options), expected, 1e-14)
    assert_close(weights_of(q, k, options, causal=False), expected, 1e-14)
    if options["remainder"] == "own":
        assert_close(expected.sum(-1), torch.ones(2, H, N).double(), 1e-14)
    elif not options["own"]:
        assert not expected[:, :, 0].any()


@OPTIONS
@given(data=st.data())
def test_masked_keys_take_none_of_the_stick(options: dict[str, Any], data: st.DataObject) -> None:
    bits = st.lists(st.booleans(), min_size=2 * 25, max_size=2 * 25)
    mask = torch.tensor(data.draw(bits)).view(2, 1, 5, 5)
    q, k, v = (random_tensor(2, H, 5, D, seed=seed) for seed in range(3))
    expected = reference_sticks(q, k, options, mask[:, 0])
    assert_close(weights_of(q, k, options, mask=mask), expected, 1e-13)
    assert_close(attend(q, k, v, mask=mask, **attention_options(options, 5, 5)), expected @ v, 1e-12)


@OPTIONS
def test_extreme_logits_lose_no_weight(options: dict[str, Any]) -> None:
    """Logits of some hundreds: sigmoids round to 0 and 1, and weights and gradients stay what they are."""
    q = (random_tensor(1, H, N, D) * 20).requires_grad_()
    k = (random_tensor(1, H, N, D, seed=2) * 10).requires_grad_()
    weights = weights_of(q, k, options)
    expected = reference_sticks(q.detach(), k.detach(), options, torch.ones(1, N, N, dtype=torch.bool))
    assert_close(weights.detach(), expected, 1e-12)
    (weights * random_tensor(1, H, N, N, seed=5)).sum().backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k))


@OPTIONS
def test_stick_breaking_gradients_match_the_reference(options: dict[str, Any]) -> None:
    q, k = (
        random_tensor(1, H, 4, D).requires_grad_(),
        random_tensor(1, H, 4, D, seed=2).requires_grad_(),
    )
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2, 1] = mask[3, 3] = False
    assert torch.autograd.gradcheck(lambda q, k: weights_of(q, k, options, mask=mask[None, None]), (q, k))
