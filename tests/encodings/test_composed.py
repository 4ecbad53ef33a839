"""Several encodings at once: against formulas by hand, each part's own notes, and what cannot act together."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from tests.builders import refusal_message
from tests.encodings.samples import SIZES, assert_close, pair_by_pair, random_tensor, randomised, rope

from toeplens import encodings
from toeplens.encodings import Composed, PositionalEncoding, attention_logits, attention_weights, compose
from toeplens.encodings.base import AttentionInputs
from toeplens.encodings.conformance import check
from toeplens.encodings.rotary import RoPE

H, D, N = SIZES["num_heads"], SIZES["head_dim"], 9
PLACES = torch.arange(N)


def build(*names: str, **options: Any) -> Composed:
    encoding = randomised(encodings.build(names, **SIZES, **options), 0.5).double()
    assert isinstance(encoding, Composed)
    return encoding


def component(encoding: Composed, index: int) -> PositionalEncoding:
    result = encoding.parts[index]
    assert isinstance(result, PositionalEncoding)
    return result


def options_for(encoding: PositionalEncoding, x: torch.Tensor | None = None, **more: Any) -> dict[str, Any]:
    notes = None if x is None else encoding.key_features(x)
    here = {"q_positions": PLACES, "k_positions": PLACES, "scale": encoding.scale, "key_features": notes}
    return {"encoding": encoding, **here, **more}


@pytest.mark.parametrize("other", ["alibi", "fox", "scalable-softmax", "alibi fox", "urpe"])
def test_logits_match_the_formula(other: str) -> None:
    encoding = build("rope", *other.split(), rope={"base": 500})
    q, k, x = (
        random_tensor(1, H, N, D),
        random_tensor(1, H, N, D, seed=2),
        random_tensor(1, N, SIZES["d_model"], seed=3),
    )
    ours = attention_logits(q, k, **options_for(encoding, x)).detach()
    products = pair_by_pair(q, k, lambda b, h, i, j, t: rope(i - j, t, base=500.0)).real / math.sqrt(D)
    for h, i in itertools.product(range(H), range(N)):
        for j in range(i + 1):
            logit = float(products[0, h, i, j])
            for each in (component(encoding, n) for n in range(1, len(encoding.parts))):
                state = each.state_dict()
                match type(each).__name__:
                    case "ALiBi":
                        logit -= 2 ** (-8 * (h + 1) / 2) * (i - j) if h < 2 else 2 ** (-8 / 4) * (i - j)
                    case "FoX":
                        gates = x[0] @ state["gate.weight"][h] + state["gate.bias"][h]
                        logit += sum(math.log(1 / (1 + math.exp(-float(gates[m])))) for m in range(j + 1, i + 1))
                    case "ScalableSoftmax":
                        logit *= float(state["slope"][h]) * math.log(i + 1)
                    case "URPE":
                        logit += float(state["base.weight"][i - j, h])  # each of the first 16 distances has its own
            assert float(ours[0, h, i, j]) == pytest.approx(logit, abs=1e-10)


def test_weights_are_changed_after_the_softmax() -> None:
    encoding = build("rope", "urpe")
    factors = component(encoding, 1).state_dict()["factors.weight"]
    q, k = random_tensor(1, H, N, D), random_tensor(1, H, N, D, seed=2)
    ours, logits = attention_weights(q, k, **options_for(encoding)), attention_logits(q, k, **options_for(encoding))
    index = (PLACES[:, None] - PLACES) + SIZES["max_len"] - 1
    assert_close(ours, logits.softmax(-1) * factors.T[:, index], 1e-12)


def test_input_vectors_add_and_the_published_scale_is_kept() -> None:
    encoding = build("sinusoidal", "t5", "learned")
    x = random_tensor(2, N, SIZES["d_model"])
    expected = x + component(encoding, 0).embed(x * 0, PLACES) + component(encoding, 2).state_dict()["weight"][:N]
    assert_close(encoding.embed(x, PLACES), expected, 1e-12)
    for other, acting in (("rope", "rope"), ("nope", "sinusoidal")):
        kernel = build(other, "sinusoidal").kernel(PLACES)
        assert kernel is not None
        assert torch.equal(kernel, encodings.build(acting, **SIZES).kernel(PLACES))
    assert (encoding.scale, encoding.coupling, encoding.also_couples) == (1.0, "bias", ("input",))
    assert encoding.bounded
    assert "max_len" in refusal_message(lambda: encoding.check_positions(torch.tensor([64])))
    bias = encoding.bias(PLACES, PLACES)
    assert bias is not None
    assert_close(bias, component(encoding, 1).kernel((PLACES[:, None] - PLACES).flatten()).unflatten(-1, (N, N)), 0)  # type: ignore[union-attr]


CONFORMING = [
    "rope+alibi",
    "fox+rope",
    "rope+scalable-softmax",
    "t5+sinusoidal",
    "carope+fox",
    "shaw+rope",
    "rope+tapa",
]
COMBINATIONS = """
    fox+drope fox+cable urpe+rope relative-projection+fox+carope cope+rope dape+rope alibi+fox+rope-dynamic harope+t5
    pope+kerple-log shaw+rerope stick-breaking+rope grape-additive+rope deberta+alibi mrope+nope clex+fire xpos+alibi
    llama4-temperature+scalable-softmax+path transformer-xl+p-rope path+alibi rope-absolute+fox tupe+rope
"""


@pytest.mark.parametrize(
    "name", [*CONFORMING, *(pytest.param(name, marks=pytest.mark.heavy) for name in COMBINATIONS.split())]
)
def test_compositions_conform(name: str) -> None:
    check(name, skip=("compile",))


def test_capability_flags_of_compositions() -> None:
    """Whether fused attention still carries it, and whether the offset is all that counts."""
    facts = {
        ("rope", "alibi"): (True, True, True, True, False),
        ("rope", "fox"): (True, True, False, False, True),
        ("rope", "t5"): (True, False, True, True, False),
        ("rope", "scalable-softmax"): (True, False, False, False, False),
        ("rope", "sinusoidal"): (True, False, False, False, False),
        ("shaw", "alibi"): (False, True, False, True, False),
        ("rope", "shaw"): (False, False, False, False, False),
        ("rope", "grape-additive"): (False, False, False, False, True),  # not linear in the turned query
    }
    for names, expected in facts.items():
        composed = build(*names)
        actual = (
            composed.fusable,
            composed.factorable,
            composed.has_fixed_bias,
            composed.toeplitz,
            composed.data_dependent,
        )
        assert actual == expected, names
    assert build("rope", "sinusoidal").rotation_is_shared
    assert not build("rope", "scalable-softmax").rotation_is_shared


def test_each_component_has_its_own_key_features() -> None:
    """FoX keeps a number a head in float64, RelativeProjection 16, CARoPE as many as pairs: kept side by side."""
    encoding = build("relative-projection", "fox", "alibi", "carope")
    x, q, k = random_tensor(2, N, SIZES["d_model"]), random_tensor(2, H, N, D), random_tensor(2, H, N, D, seed=2)
    notes = encoding.key_features(x)
    assert notes is not None
    attention_inputs = AttentionInputs.with_defaults(q, k, key_features=notes)
    for index in (0, 1, 3):
        own, theirs = (
            encoding._part_inputs(index, attention_inputs).key_features,
            component(encoding, index).key_features(x),
        )
        assert own is not None
        assert theirs is not None
        assert torch.equal(own, theirs)
    assert encoding._part_inputs(2, attention_inputs).key_features is None


@pytest.mark.parametrize("names", ["fox cable rope", "fox rope"])
def test_the_flex_attention_score_function_matches_the_bias(names: str) -> None:
    encoding = build(*names.split())
    x, q = random_tensor(1, N, SIZES["d_model"]), random_tensor(1, H, N, D)
    attention_inputs = AttentionInputs.with_defaults(q, q, key_features=encoding.key_features(x))
    add = encoding.score_mod(PLACES, PLACES, attention_inputs)
    bias = encoding.bias(PLACES, PLACES, inputs=attention_inputs)
    assert add is not None
    assert bias is not None
    b, h, i, j = torch.meshgrid(torch.tensor([0]), torch.arange(H), PLACES, PLACES, indexing="ij")
    assert_close(add(torch.zeros(1, H, N, N), b, h, i, j).tril().double(), bias.tril(), 1e-4)
    assert build("fox", "t5").score_mod(PLACES, PLACES, attention_inputs) is None


def test_layers_have_separate_parameters_where_a_component_has() -> None:
    composed = build("t5", "fox")
    first, second = composed.for_layer(0), composed.for_layer(1)
    assert first is composed
    assert isinstance(second, Composed)
    assert second.parts[0] is composed.parts[0]
    assert second.parts[1] is not composed.parts[1]
    shared = build("t5", "rope")
    assert shared.shared
    assert shared.for_layer(3) is shared
    some = build("partial-rope", "alibi", **{"partial-rope": {"layers": [1]}})
    assert some.layers is None
    assert [some.for_layer(layer).overrides("rotate") for layer in range(3)] == [False, True, False]
    alone = build("partial-rope", "nope", **{"partial-rope": {"layers": [1, 2]}})
    assert alone.layers == {1, 2}


def test_the_state_dict_is_that_of_the_components() -> None:
    composed = build("t5", "fox", "rope")
    assert set(composed.state_dict()) == {"parts.0.weight", "parts.1.gate.weight", "parts.1.gate.bias"}
    x, q = random_tensor(1, N, SIZES["d_model"]), random_tensor(1, H, N, D)
    same = pickle.loads(pickle.dumps(composed))
    assert torch.equal(
        attention_logits(q, q, **options_for(composed, x)), attention_logits(q, q, **options_for(same, x))
    )
    before = composed.state_dict()["parts.1.gate.weight"].clone()
    composed.reset_parameters()
    assert not torch.equal(before, composed.state_dict()["parts.1.gate.weight"])


def test_components_apply_in_the_order_of_attention() -> None:
    """Temperatures and rotations commute, whichever is named first; what is composed may be composed again."""
    q, k, x = random_tensor(1, H, N, D), random_tensor(1, H, N, D, seed=2), random_tensor(1, N, SIZES["d_model"])
    compositions = [build("scalable-softmax", "rope", "alibi"), build("alibi", "rope", "scalable-softmax")]
    for each in compositions:
        component(each, 0 if each is compositions[0] else 2).get_parameter("slope").data.fill_(0.3)
    assert_close(*(attention_weights(q, k, **options_for(each, x)) for each in compositions), 1e-12)
    again = compose(build("rope", "alibi"), encodings.build("fox", **SIZES).double())
    assert again.names == ("rope", "alibi", "FoX")
    two = compose(*(encodings.build("fox", **SIZES) for _ in range(2)))
    assert two.names == ("FoX 1", "FoX 2")


REFUSED = {
    "rope drope": ("'rope'", "'drope'", "rotate"),
    "path rerope": ("'path'", "'rerope'", "score"),
    "shaw cope": ("'shaw'", "'cope'", "transform_logits"),
    "rope path": ("'rope'", "'path'", "rotate", "score"),
    "mla fox": ("'mla'", "'fox'", "dimensions of a query"),
    "alibi swin": ("'alibi'", "'swin'", "coordinates"),
    "t5 tupe": ("'t5'", "'tupe'", "factor of q . k"),
    "stick-breaking alibi": ("'stick-breaking'", "'alibi'", "bias"),
    "sinusoidal shape": ("'sinusoidal' and 'shape'", "same waves"),
    "swin axial-rope": ("'swin'", "'axial-rope'", "grid"),
}


@pytest.mark.parametrize("names", REFUSED)
def test_incompatible_components_are_refused(names: str) -> None:
    message = refusal_message(lambda: encodings.build(names.split(), **SIZES))
    assert message.startswith("encoding: ")
    assert all(word in message for word in REFUSED[names]), message


def test_other_invalid_input_is_refused() -> None:
    rope, alibi = RoPE(**SIZES), encodings.build("alibi", **{**SIZES, "max_len": 65})
    assert (
        refusal_message(lambda: compose(rope, alibi))
        == "max_len must be the same for 'RoPE' and 'ALiBi', got 64 and 65."
    )
    assert "are the same object" in refusal_message(lambda: compose(rope, rope))
    assert "at least two" in refusal_message(lambda: compose(rope))
    assert "was built" in refusal_message(lambda: Composed(rope, "alibi"))  # type: ignore[arg-type]
    assert "names must have one entry per encoding (2), got 1" in refusal_message(
        lambda: compose(rope, alibi, names=["one"])
    )
    for names, options, words in (
        (["rope", 3], {}, "must be a name or a list of names"),
        ("rope + rope", {}, "encoding must not name 'rope' twice, got 'rope + rope'"),
        ("rope+", {}, "got ''"),
        ("rope+fox", {"base": 3}, "got 'base'"),
        ("rope+fox", {"rope": 3}, "rope must be options of 'rope', by name, got 3."),
        ("rope+fox", {"rope": {"bas": 3}}, "got 'bas'"),
        ("rope+fox", {"rope": {"base": -3}}, "rope.base must be over 0, got -3"),
    ):
        message = refusal_message(lambda names=names, options=options: encodings.build(names, **SIZES, **options))
        assert words in message, message
    kind = encodings.get("rope+fox")
    assert kind is encodings.get(["rope", "fox"])
    assert encodings.canonical_name("rope+fox") == "rope + fox"
    assert (kind.coupling, kind.also_couples, kind.data_dependent) == ("rotation", ("bias",), True)
    assert "2104.09864" in kind.citation
    assert set(encodings.options("rope+fox")) == {"rope.base", "rope.pairing", "fox.bias_init"}
