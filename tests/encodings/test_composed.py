"""Several encodings at once: against formulas by hand, each part's own notes, and what cannot act together."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from tests.builders import refusal
from tests.encodings.samples import SIZES, agree, draw, pair_by_pair, randomised, rope

from toeplens import encodings
from toeplens.encodings import Composed, PositionalEncoding, attention_logits, attention_weights, compose
from toeplens.encodings.base import Seen
from toeplens.encodings.conformance import check
from toeplens.encodings.rotary import RoPE

H, D, N = SIZES["num_heads"], SIZES["head_dim"], 9
PLACES = torch.arange(N)


def build(*names: str, **options: Any) -> Composed:
    made = randomised(encodings.build(names, **SIZES, **options), 0.5).double()
    assert isinstance(made, Composed)
    return made


def part(encoding: Composed, index: int) -> PositionalEncoding:
    found = encoding.parts[index]
    assert isinstance(found, PositionalEncoding)
    return found


def told(encoding: PositionalEncoding, x: torch.Tensor | None = None, **more: Any) -> dict[str, Any]:
    notes = None if x is None else encoding.note(x)
    here = {"q_positions": PLACES, "k_positions": PLACES, "scale": encoding.scale, "notes": notes}
    return {"encoding": encoding, **here, **more}


@pytest.mark.parametrize("other", ["alibi", "fox", "scalable-softmax", "alibi fox", "urpe"])
def test_logits_are_the_formula_by_hand(other: str) -> None:
    encoding = build("rope", *other.split(), rope={"base": 500})
    q, k, x = draw(1, H, N, D), draw(1, H, N, D, seed=2), draw(1, N, SIZES["d_model"], seed=3)
    ours = attention_logits(q, k, **told(encoding, x)).detach()
    products = pair_by_pair(q, k, lambda b, h, i, j, t: rope(i - j, t, base=500.0)).real / math.sqrt(D)
    for h, i in itertools.product(range(H), range(N)):
        for j in range(i + 1):
            logit = float(products[0, h, i, j])
            for each in (part(encoding, n) for n in range(1, len(encoding.parts))):
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
    factors = part(encoding, 1).state_dict()["factors.weight"]
    q, k = draw(1, H, N, D), draw(1, H, N, D, seed=2)
    ours, logits = attention_weights(q, k, **told(encoding)), attention_logits(q, k, **told(encoding))
    index = (PLACES[:, None] - PLACES) + SIZES["max_len"] - 1
    agree(ours, logits.softmax(-1) * factors.T[:, index], 1e-12)


def test_input_vectors_add_and_the_published_factor_is_that_of_the_one_which_has_one() -> None:
    encoding = build("sinusoidal", "t5", "learned")
    x = draw(2, N, SIZES["d_model"])
    wanted = x + part(encoding, 0).embed(x * 0, PLACES) + part(encoding, 2).state_dict()["weight"][:N]
    agree(encoding.embed(x, PLACES), wanted, 1e-12)
    for other, acting in (("rope", "rope"), ("nope", "sinusoidal")):
        kernel = build(other, "sinusoidal").kernel(PLACES)
        assert kernel is not None
        assert torch.equal(kernel, encodings.build(acting, **SIZES).kernel(PLACES))
    assert (encoding.scale, encoding.coupling, encoding.also_couples) == (1.0, "bias", ("input",))
    assert encoding.bounded
    assert "max_len" in refusal(lambda: encoding.check_positions(torch.tensor([64])))
    bias = encoding.bias(PLACES, PLACES)
    assert bias is not None
    agree(bias, part(encoding, 1).kernel((PLACES[:, None] - PLACES).flatten()).unflatten(-1, (N, N)), 0)  # type: ignore[union-attr]


CONFORMING = ["rope+alibi", "fox+rope", "rope+scalable-softmax", "t5+sinusoidal", "carope+fox", "shaw+rope"]
MORE = """
    fox+drope fox+cable urpe+rope relative-projection+fox+carope cope+rope dape+rope alibi+fox+rope-dynamic harope+t5
    pope+kerple-log shaw+rerope stick-breaking+rope grape-additive+rope deberta+alibi mrope+nope clex+fire xpos+alibi
    llama4-temperature+scalable-softmax+path transformer-xl+p-rope path+alibi rope-absolute+fox tupe+rope
"""


@pytest.mark.parametrize("name", [*CONFORMING, *(pytest.param(name, marks=pytest.mark.heavy) for name in MORE.split())])
def test_it_conforms(name: str) -> None:
    check(name, skip=("compile",))


def test_facts_of_a_few() -> None:
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
    for names, wanted in facts.items():
        made = build(*names)
        found = made.fusable, made.factorable, made.fixed_bias, made.toeplitz, made.data_dependent
        assert found == wanted, names
    assert build("rope", "sinusoidal").turns_alike
    assert not build("rope", "scalable-softmax").turns_alike


def test_each_has_its_own_notes() -> None:
    """FoX keeps a number a head in float64, RelativeProjection 16, CARoPE as many as pairs: kept side by side."""
    encoding = build("relative-projection", "fox", "alibi", "carope")
    x, q, k = draw(2, N, SIZES["d_model"]), draw(2, H, N, D), draw(2, H, N, D, seed=2)
    notes = encoding.note(x)
    assert notes is not None
    seen = Seen.of(q, k, notes=notes)
    for index in (0, 1, 3):
        own, theirs = encoding._own(index, seen).notes, part(encoding, index).note(x)
        assert own is not None
        assert theirs is not None
        assert torch.equal(own, theirs)
    assert encoding._own(2, seen).notes is None


@pytest.mark.parametrize("names", ["fox cable rope", "fox rope"])
def test_the_function_for_flex_attention_is_the_bias(names: str) -> None:
    encoding = build(*names.split())
    x, q = draw(1, N, SIZES["d_model"]), draw(1, H, N, D)
    seen = Seen.of(q, q, notes=encoding.note(x))
    add = encoding.score_mod(PLACES, PLACES, seen)
    bias = encoding.bias(PLACES, PLACES, seen=seen)
    assert add is not None
    assert bias is not None
    b, h, i, j = torch.meshgrid(torch.tensor([0]), torch.arange(H), PLACES, PLACES, indexing="ij")
    agree(add(torch.zeros(1, H, N, N), b, h, i, j).tril().double(), bias.tril(), 1e-4)
    assert build("fox", "t5").score_mod(PLACES, PLACES, seen) is None


def test_layers_have_their_own_where_a_part_has() -> None:
    made = build("t5", "fox")
    first, second = made.for_layer(0), made.for_layer(1)
    assert first is made
    assert isinstance(second, Composed)
    assert second.parts[0] is made.parts[0]
    assert second.parts[1] is not made.parts[1]
    shared = build("t5", "rope")
    assert shared.shared
    assert shared.for_layer(3) is shared
    some = build("partial-rope", "alibi", **{"partial-rope": {"layers": [1]}})
    assert some.layers is None
    assert [some.for_layer(layer).overrides("rotate") for layer in range(3)] == [False, True, False]
    alone = build("partial-rope", "nope", **{"partial-rope": {"layers": [1, 2]}})
    assert alone.layers == {1, 2}


def test_its_state_is_that_of_its_parts() -> None:
    one = build("t5", "fox", "rope")
    assert set(one.state_dict()) == {"parts.0.weight", "parts.1.gate.weight", "parts.1.gate.bias"}
    x, q = draw(1, N, SIZES["d_model"]), draw(1, H, N, D)
    same = pickle.loads(pickle.dumps(one))
    assert torch.equal(attention_logits(q, q, **told(one, x)), attention_logits(q, q, **told(same, x)))
    before = one.state_dict()["parts.1.gate.weight"].clone()
    one.reset_parameters()
    assert not torch.equal(before, one.state_dict()["parts.1.gate.weight"])


def test_the_order_is_that_of_attention() -> None:
    """Temperatures and rotations commute, whichever is named first; what is composed may be composed again."""
    q, k, x = draw(1, H, N, D), draw(1, H, N, D, seed=2), draw(1, N, SIZES["d_model"])
    made = [build("scalable-softmax", "rope", "alibi"), build("alibi", "rope", "scalable-softmax")]
    for each in made:
        part(each, 0 if each is made[0] else 2).get_parameter("slope").data.fill_(0.3)
    agree(*(attention_weights(q, k, **told(each, x)) for each in made), 1e-12)
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
def test_what_cannot_act_together_is_refused(names: str) -> None:
    said = refusal(lambda: encodings.build(names.split(), **SIZES))
    assert said.startswith("encoding: ")
    assert all(word in said for word in REFUSED[names]), said


def test_other_wrong_input() -> None:
    rope, other = RoPE(**SIZES), encodings.build("alibi", **{**SIZES, "max_len": 65})
    assert refusal(lambda: compose(rope, other)) == "max_len must be the same for 'RoPE' and 'ALiBi', got 64 and 65."
    assert "are the same object" in refusal(lambda: compose(rope, rope))
    assert "at least two" in refusal(lambda: compose(rope))
    assert "was built" in refusal(lambda: Composed(rope, "alibi"))  # type: ignore[arg-type]
    assert "names must have one entry per encoding (2), got 1" in refusal(lambda: compose(rope, other, names=["one"]))
    for given, options, words in (
        (["rope", 3], {}, "must be a name or a list of names"),
        ("rope + rope", {}, "encoding must not name 'rope' twice, got 'rope + rope'"),
        ("rope+", {}, "got ''"),
        ("rope+fox", {"base": 3}, "got 'base'"),
        ("rope+fox", {"rope": 3}, "rope must be options of 'rope', by name, got 3."),
        ("rope+fox", {"rope": {"bas": 3}}, "got 'bas'"),
        ("rope+fox", {"rope": {"base": -3}}, "rope.base must be positive and finite, got -3"),
    ):
        said = refusal(lambda given=given, options=options: encodings.build(given, **SIZES, **options))
        assert words in said, said
    kind = encodings.get("rope+fox")
    assert kind is encodings.get(["rope", "fox"])
    assert encodings.canonical("rope+fox") == "rope + fox"
    assert (kind.coupling, kind.also_couples, kind.data_dependent) == ("rotation", ("bias",), True)
    assert "2104.09864" in kind.citation
    assert set(encodings.options("rope+fox")) == {"rope.base", "rope.pairing", "fox.bias_init"}
