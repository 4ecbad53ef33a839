"""Attention with every encoding: with a cache, padding, packed texts and grouped keys it is what it is without."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.builders import REPRESENTATIVES
from torch import Tensor, nn

from toeplens import encodings
from toeplens.nn import Attention, Cache
from toeplens.utils import InputError

NAMES = (*REPRESENTATIVES, "rope-dynamic")  # whose frequencies depend on the length
N = 11
TOLERANCE = 1e-9  # float64, of outputs about 1


def layer(name: str, heads: int = 4, **more: Any) -> Attention:
    """With random parameters, so that nothing is neutral by its start."""
    torch.manual_seed(0)
    attention = Attention(32, heads, encoding=name, max_len=64, **more).double().eval()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(std=0.3)
    return attention


def tokens(length: int = N) -> Tensor:
    return torch.randn(2, length, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).detach().abs().max()) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_decoding_with_a_cache_matches_the_full_pass(name: str) -> None:
    attention, x = layer(name), tokens()
    cache = attention.new_cache(2, 20)
    out = [attention(x[:, at], cache=cache) for at in (slice(0, 5), slice(5, 6), slice(6, 7), slice(7, N))]
    assert len(cache) == N
    if attention.encoding.length_dependent:
        for part, stop in zip(out, (5, 6, 7, N), strict=True):
            assert_close(part, attention(x[:, :stop])[:, -part.shape[1] :])
    else:
        assert_close(torch.cat(out, dim=1), attention(x))


PADDING = torch.tensor([[1, 1, 0, 0, 1, 0, 0, 0, 1, 1, 0], [0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("name", "window"),
    [
        *((name, None) for name in (*NAMES, "cable", "selective-rope", "repo", "dape-v2")),
        *((name, 3) for name in ("rope", "alibi", "fox", "path", "dape-v2")),
    ],
)
def test_padding_changes_nothing(name: str, window: int | None) -> None:
    """On the left, on the right and between tokens; in one pass, and where a prompt ends or goes on in padding."""
    attention, x = layer(name, window=window), tokens()
    padded = x.masked_fill(PADDING.unsqueeze(-1), 3.0)
    alone = [attention(x[row : row + 1, ~hidden])[0] for row, hidden in enumerate(PADDING)]
    assert_close(attention(padded, key_padding_mask=PADDING)[~PADDING], torch.cat(alone))
    for cut in (4, 5, 9):
        cache = attention.new_cache(2, N)
        parts = (slice(0, cut), slice(cut, N))
        out = torch.cat([attention(padded[:, at], key_padding_mask=PADDING[:, at], cache=cache) for at in parts], dim=1)
        assert_close(out[~PADDING], torch.cat(alone))


def test_explicit_positions_keep_padding_in_the_cache() -> None:
    attention, x, positions = layer("rope"), tokens(), torch.arange(N)
    cache = attention.new_cache(2, N)
    parts = (slice(0, 5), slice(5, N))
    out = [attention(x[:, at], positions=positions[at], key_padding_mask=PADDING[:, at], cache=cache) for at in parts]
    assert_close(torch.cat(out, dim=1), attention(x, positions=positions, key_padding_mask=PADDING))


def test_positions_of_one_row_fill_the_cache_of_every_sequence() -> None:
    attention, x, positions = layer("rope"), tokens(), torch.arange(N)
    cache = attention.new_cache(2, N)
    attention(x[:, :5], positions=positions[None, :5], cache=cache)
    cache.reorder(torch.tensor([1, 0]))
    cache.reorder(torch.tensor([1, 0]))
    later = attention(x[:, 5:], positions=positions[5:].expand(2, -1), cache=cache)
    assert_close(later, attention(x)[:, 5:])


@pytest.mark.parametrize("name", ["alibi", "cope", "stick-breaking", "fox", "cable", "grape-path", "dape-v2"])
def test_cumulative_encodings_sum_only_over_visible_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree of texts, each token seeing its ancestors: as each path alone. Of each head by itself, too."""
    paths = [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 3, 4], [0, 5], [0, 5, 6]]
    mask = torch.zeros(1, 1, 7, 7, dtype=torch.bool)
    for token, path in enumerate(paths):
        mask[..., token, path] = True
    attention, x = layer(name), tokens(7)
    alone = torch.stack([attention(x[:, path])[:, -1] for path in paths], dim=1)
    depths = torch.tensor([len(path) - 1 for path in paths])
    for given in (mask, mask[0, 0], mask.expand(2, 4, 7, 7)):
        assert_close(attention(x, mask=given, positions=depths), alone)
    whole = attention(x, mask=torch.ones(7, 7, dtype=torch.bool))
    monkeypatch.setattr("toeplens.encodings.base.is_readable", lambda x: False)  # as in a compiler
    assert_close(attention(x, mask=mask, positions=depths), alone)
    assert_close(attention(x, mask=torch.ones(7, 7, dtype=torch.bool)), whole)


@pytest.mark.parametrize("name", ["path", "path-fox", "carope", "selective-rope"])
def test_sequential_encodings_require_contiguous_masks(name: str) -> None:
    attention, x = layer(name), tokens()
    band = torch.ones(N, N, dtype=torch.bool).tril().triu(-4)
    windowed = layer(name, window=5)
    assert_close(attention(x, mask=band), windowed(x))
    padded, whole = attention(x, mask=band, key_padding_mask=PADDING), torch.ones_like(band)
    assert_close(attention(x, mask=whole, key_padding_mask=PADDING), attention(x, key_padding_mask=PADDING))
    assert padded.isfinite().all()
    holes = band.clone()
    holes[7, 5] = False
    with pytest.raises(InputError, match=r"^mask: each query must see one contiguous run of tokens"):
        attention(x, mask=holes)


@pytest.mark.parametrize("name", [*REPRESENTATIVES, "selective-rope"])
def test_packed_sequences_match_separate_calls(name: str) -> None:
    attention, x = layer(name), tokens()
    segments = torch.tensor([[3] * 4 + [1] * 5 + [2] * 2, [0] * N])
    out = attention(x, segments=segments)
    for some in (slice(0, 4), slice(4, 9), slice(9, N)):
        assert_close(out[:1, some], attention(x[:1, some]))
    assert_close(out[1:], attention(x[1:]))


@pytest.mark.parametrize("causal", [True, False])
def test_nope_matches_torch_multihead_attention(causal: bool) -> None:
    ours, theirs = layer("nope", bias=True, causal=causal), nn.MultiheadAttention(32, 4, batch_first=True).double()
    state = ours.state_dict()
    theirs.load_state_dict(
        {
            "in_proj_weight": torch.cat([state[f"projections.{key}.weight"] for key in "qkv"]),
            "in_proj_bias": torch.cat([state[f"projections.{key}.bias"] for key in "qkv"]),
            "out_proj.weight": state["out.weight"],
            "out_proj.bias": state["out.bias"],
        }
    )
    x, padding = tokens(), torch.zeros(2, N, dtype=torch.bool)
    padding[0, 8:] = True
    hidden = torch.ones(N, N, dtype=torch.bool).triu(1) if causal else None
    expected, weights = theirs(x, x, x, key_padding_mask=padding, attn_mask=hidden, average_attn_weights=False)
    assert_close(ours(x, key_padding_mask=padding), expected)
    assert_close(ours.weights(x, key_padding_mask=padding), weights)


def test_masks_windows_soft_caps_and_sinks_take_effect() -> None:
    x = tokens()
    near = torch.ones(N, N, dtype=torch.bool).triu(-2)
    assert_close(layer("rope", window=3)(x), layer("rope")(x, mask=near))
    assert float((layer("rope", softcap=0.1)(x) - layer("rope")(x)).detach().abs().max()) > 1e-3
    lost = layer("rope", sinks=True)
    assert float(lost.weights(x).sum(-1).max().detach()) < 1


def test_input_vectors_are_added_once() -> None:
    """A layer by itself adds them; a layer of a model leaves it to the model."""
    x, alone, inner = tokens(), layer("sinusoidal"), layer("sinusoidal", embed=False)
    assert_close(alone(x), inner(alone.encoding.embed(x, torch.arange(N))))


def test_dropout_is_active_only_in_training() -> None:
    attention, x = layer("fire", dropout=0.5), tokens()
    assert torch.equal(attention(x), attention(x))
    assert not torch.equal(attention.train()(x), attention(x))


def test_a_cache_is_reordered_repeated_and_cropped() -> None:
    attention, x = layer("fox"), tokens()
    cache = attention.new_cache(2, N)
    attention(x[:, :6], cache=cache)
    cache.reorder(torch.tensor([1, 0]))
    assert_close(attention(x[:, 6:7], cache=cache), attention(torch.cat((x[[1, 0], :6], x[:, 6:7]), dim=1))[:, -1:])
    cache.crop(6)
    cache.repeat(2)
    new = x[:, 7:8].repeat(2, 1, 1)
    assert_close(attention(new, cache=cache), attention(torch.cat((x[[1, 1, 0, 0], :6], new), dim=1))[:, -1:])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_heads": 3}, r"^num_heads must divide d_model 32, or head_dim be given, got 3"),
    ({"num_key_heads": 3}, r"^num_key_heads must divide num_heads 4, got 3"),
    ({"encoding": "rop"}, r"^encoding must be .*, got 'rop'"),
    ({"bass": 3.0}, r"^option of encoding 'rope' must be .*, got 'bass'"),
    ({"dropout": 1.5}, r"^dropout must be .*, got 1.5"),
    ({"window": 0}, r"^window must be at least 1, got 0"),
    ({"encoding": "rerope", "window": 16}, r"^window is also an option of encoding 'rerope': pass toeplens.*\.build\("),
    ({"encoding": "swin", "window": [4, 4], "causal": False}, r"^window is also an option of encoding 'swin': pass "),
    ({"encoding": "scalable-softmax", "bias": True}, r"^bias is also an option of encoding 'scalable-softmax': pass "),
    ({"window": 2, "causal": False}, r"^window must be left out unless attention is causal, got 2"),
    ({"softcap": 0.0}, r"^softcap must be finite and over 0, got 0.0"),
    ({"scale": float("nan")}, r"^scale must be finite, got nan"),
    ({"encoding": "mla", "bias": True}, r"^num_key_heads, head_dim and bias must not be set with encoding 'mla'"),
    (
        {"encoding": encodings.build("rope", d_model=32, num_heads=2, head_dim=16, max_len=8)},
        r"^encoding must have the num_heads of this layer, 4, got 2",
    ),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_invalid_layer_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Attention(**{"d_model": 32, "num_heads": 4, **options})


def test_invalid_inputs_are_refused() -> None:
    attention, x = layer("rope"), tokens()
    with pytest.raises(InputError, match=r"^key_padding_mask must be a bool tensor of shape \[2, 11\], got .*\[2, 3\]"):
        attention(x, key_padding_mask=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(InputError, match=r"^cache must be used with 3 sequences, got 2"):
        attention(x, cache=attention.new_cache(3, 20))
    cache = attention.new_cache(2, 12)
    attention(x, cache=cache)
    with pytest.raises(InputError, match=r"^cache must have room for the tokens \(11 of 12 are used\), got 2"):
        attention(x[:, :2], cache=cache)
    with pytest.raises(InputError, match=r"^length must be from 0 to 11, .*, got 12"):
        cache.crop(12)
    with pytest.raises(InputError, match=r"^segments and cache must not both be set"):
        attention(x, segments=torch.zeros(2, N, dtype=torch.long), cache=Cache(2, 30))
    with pytest.raises(InputError, match=r"positions must be from 0 to 63 .*, got 64"):
        layer("learned")(tokens(65))
    with pytest.raises(InputError, match=r"^x must be the only input, .*, got 3 inputs"):
        attention(x, x, x)
    with pytest.raises(InputError, match=r"^x must have at least 1 token, got 0"):
        attention(x[:, :0])


def test_split_segments_and_padding_beside_segments() -> None:
    attention, x = layer("learned"), tokens()
    back = torch.tensor([[0] * 4 + [1] * 3 + [0] * 4, [0] * N])
    assert_close(attention(x, segments=back)[:1, 7:], attention(x[:1, 7:]))
    padding = torch.zeros(2, N, dtype=torch.bool)
    padding[0, :2] = True
    out = attention(x, segments=back, key_padding_mask=padding)
    assert_close(out[:1, 2:4], attention(x[:1, 2:4]))
    assert_close(out[:1, 7:], attention(x[:1, 7:]))


def test_failed_and_read_only_calls_leave_the_cache_unchanged() -> None:
    attention, x = layer("fox"), tokens()
    cache = attention.new_cache(2, N)
    attention(x[:, :5], cache=cache)
    with pytest.raises(InputError, match=r"^mask must broadcast to"):
        attention(x[:, 5:6], mask=torch.ones(3, 3, dtype=torch.bool), cache=cache)
    weights = attention.weights(x[:, 5:6], cache=cache)
    assert weights.shape == (2, 4, 1, 6)
    assert len(cache) == 5
    assert_close(attention(x[:, 5:6], cache=cache), attention(x[:, :6])[:, -1:])
    cache.crop(0)
    assert_close(attention(x, cache=cache), attention(x))


@pytest.mark.parametrize("value", ["x", [1.5], torch.ones(2, 3), object()], ids=lambda value: type(value).__name__)
def test_values_of_a_wrong_type_are_refused_in_one_sentence(value: Any) -> None:
    attention, x = Attention(16, 2, encoding="alibi"), torch.randn(2, 5, 16)
    cache = attention.new_cache(2, 9)
    sizes = {"d_model": 16, "num_heads": 2}
    names = ("window", "softcap", "sinks", "dropout", "scale", "num_key_heads", "max_len", "causal", "embed")
    calls: list[Callable[[], Any]] = [
        *(partial(Attention, **sizes | {name: value}) for name in (*names, *sizes)),
        *(partial(attention, x, **{name: value}) for name in ("positions", "key_padding_mask", "segments", "cache")),
        *(partial(call, value) for call in (attention, cache.crop, cache.reorder, cache.repeat)),
        partial(attention.weights, x, mask=value),
        partial(attention.new_cache, 2, value),
    ]
    for call in calls:
        with pytest.raises(InputError) as caught:
            call()
        assert "\n" not in str(caught.value)
