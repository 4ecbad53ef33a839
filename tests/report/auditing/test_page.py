"""The pages of one audit and of two: their numbers are the record's, and what is not known has no figure."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vl_convert
from tests.backends.hf.models import GROUPED, tiny
from tests.report.charts import figure_rows

from toeplens.report import Page, comparison_page
from toeplens.report.audit import NUMBERS, digits_of, is_idle, notable_heads
from toeplens.report.charts import fit_to_width, with_light_theme
from toeplens.report.tables import Table
from toeplens.studies.auditing import audit, sentences
from toeplens.studies.auditing.record import HeadRecord, LayerRecord
from toeplens.studies.auditing.result import Audit, open_audit
from toeplens.utils import InputError

HOSTILE_NAME = "<script>alert(1)</script>\"'&%{x}"
METADATA = {"model": "made/up", "class": "MadeUpModel", "model_type": "made-up", "parameters": 22713216}
METADATA |= {"dtype": "float32", "text": "a story", "sequences": 16, "tokens": 128, "seed": 7, "torch": "2.13.0"}
METADATA |= {"seconds": 12.5, "command": "toeplens audit made/up"}
RECORD = open_audit(Path(__file__).parents[3] / "results" / "audit-smollm2")
SHARES = ("positional", "symbolic", "interaction")
POSITION_COLUMNS = (
    "toeplitz",
    "toeplitz_variance",
    "distance",
    "previous",
    "current",
    "next",
    "induction",
)  # of queries and keys
Shape = tuple[str, str, int, int, int]  # side, kind, layers, heads, key heads


def random_audit(
    shapes: tuple[Shape, ...] = (("encoder", "self", 6, 12, 12),),
    *,
    effect: Any = "loss",
    rotary: bool = False,
    shares: bool = True,
    seed: int = 0,
    **about: Any,
) -> Audit:
    """Recorded heads as those of another model; with rotation every other layer has a window, and other frequencies."""
    rng = np.random.Generator(np.random.Philox(seed))
    layers, heads = [], []
    recorded = cycle(RECORD.heads[at] for at in rng.permutation(len(RECORD.heads)))
    for side, kind, depth, count, key_heads in shapes:
        for at in range(depth):
            windowed = rotary and at % 2 == 0
            base = 1e4 if windowed else 1e6
            heads += [
                _head(rng, next(recorded), (side, kind, at, head), effect, rotary, shares) for head in range(count)
            ]
            layers.append(
                LayerRecord(
                    *(side, kind, at, f"{side}.layers.{at}.{kind}_attn (MadeUpAttention)"),
                    *(count, key_heads, 64, 0.125),
                    softcap=50.0 if windowed else None,
                    causal=side == "decoder" and kind == "self",
                    window=64 if windowed else None,
                    position="rotation of 32 pairs of 64 dimensions, half" if rotary else "none in attention",
                    frequencies=tuple(float(base ** (-i / 32)) for i in range(32)) if rotary else (),
                    unknown=None if shares else "the bias depends on the content of keys",
                    weights=None if at == 1 else 1e-6,
                    outputs=1e-6,
                    tolerance=1e-4,
                    deposit={"top_share": 0.5, "effective_heads": 3.0, "gini": 0.5, "lead": 0.1} if effect else {},
                )
            )
    return Audit(
        about=METADATA | about,
        layers=tuple(layers),
        heads=tuple(heads),
        effect=effect,
        method="exact" if effect else None,
        baseline=3.2104 if effect == "loss" else None,
        max_difference=0.0,
        words=("once", "upon", "<s>", " a"),
    )


def _head(
    rng: np.random.Generator, found: HeadRecord, place: tuple[Any, ...], effect: Any, rotary: bool, shares: bool
) -> HeadRecord:
    """A recorded head without what a head at this place cannot have, and with an effect."""
    side, kind, layer, head = place
    gone: dict[str, Any] = {} if shares else dict.fromkeys(SHARES)
    if not (rotary and shares):
        gone |= {"norm_use": (), "variance_use": (), "centre": None}
    if kind != "self":
        gone |= {**dict.fromkeys(POSITION_COLUMNS), "profile": ()}
    elif head == 0:
        gone |= {"induction": None}
    if effect:
        moved = float(0.4 * rng.beta(0.3, 4) - 0.004)
        gone |= {"effect": moved, "effect_low": moved - 0.003, "effect_high": moved + 0.004}
    return replace(found, side=side, kind=kind, layer=layer, head=head, **gone)


BERT = random_audit()
CAUSAL = (("decoder", "self", 24, 16, 4),)
ROTARY = random_audit(CAUSAL, rotary=True, seed=1)
ENCODER_DECODER = random_audit(
    (("encoder", "self", 4, 8, 8), ("decoder", "self", 3, 8, 8), ("decoder", "cross", 3, 8, 8)), seed=2
)
WITHOUT_EFFECTS = random_audit(effect=None, seed=3)
WITHOUT_SHARES = random_audit(shares=False, effect="states", seed=4)
SINGLE = random_audit((("decoder", "self", 1, 1, 1),), effect=None)
EMPTY = replace(BERT, heads=tuple(HeadRecord(h.side, h.kind, h.layer, h.head) for h in BERT.heads), effect=None)
UNIFORM = {"entropy": 0.97, "effect": 0.0, "effect_low": -0.01, "effect_high": 0.01, "symbolic": 0.9}


def table_of(page: Page, name: str) -> dict[str, dict[str, str]]:
    """A table's texts by row and column."""
    result: Table = next(each for each in page.tables if each.name == name)
    columns = result.columns()
    texts = [[cell.plain_text for cell in row] for row in result.body]
    return {row[0]: dict(zip(columns, row, strict=True)) for row in texts}


@pytest.mark.parametrize(
    "made", [BERT, ROTARY, ENCODER_DECODER, WITHOUT_SHARES], ids=["bert", "rotary", "both", "untold"]
)
def test_every_number_of_every_head_is_in_the_table(made: Audit) -> None:
    table, called = table_of(made.page(), "All heads"), sentences.HeadNames.of_audits(made)
    assert len(table) == len(made.heads)
    for head in made.heads:
        row = table[called.short(head)]
        assert (row["layer"], row["index in layer"]) == (str(head.layer + 1), str(head.head + 1))
        for name in NUMBERS:
            text, value = row.get(name.replace("_", " "), "–"), getattr(head, name)
            assert (
                text == "–"
                if value is None
                else float(text.replace("−", "-")) == pytest.approx(value, abs=0.51 * 10 ** -digits_of(name, made))
            )


def test_charts_show_the_record() -> None:
    page = ROTARY.page()
    assert [row["positional"] for row in figure_rows(page, "map")] == pytest.approx(
        [h.positional for h in ROTARY.heads], rel=1e-4
    )
    assert [row["frequency"] for row in figure_rows(page, "frequency")] == pytest.approx(
        [2.0 ** (h.centre or 0) for h in ROTARY.heads], rel=1e-4
    )
    for name in SHARES:
        expected = [getattr(head, name) for head in ROTARY.heads]
        assert [row[name] for row in figure_rows(page, "shares")] == pytest.approx(expected, rel=1e-4)
    for name in ("effect", "effect_low", "effect_high"):
        expected = [getattr(head, name) for head in ROTARY.heads]
        assert [row[name] for row in figure_rows(page, "effects")] == pytest.approx(expected, rel=1e-4)
    layer = ROTARY.layers[3]
    use = [row["value"] for row in figure_rows(page, "use") if row["layer"] == "L4"]
    mean = np.mean([head.variance_use for head in ROTARY.heads_of(layer)], axis=0)
    np.testing.assert_allclose(use, mean[1:-1], rtol=1e-4)
    partial = tuple(replace(head, variance_use=(0.5, *head.variance_use[1:-1], -0.1)) for head in ROTARY.heads)
    pairs = [row["pair"] for row in figure_rows(replace(ROTARY, heads=partial).page(), "use") if row["layer"] == "L4"]
    assert (pairs[0], pairs[-1]) == ("none", "bias")
    top = max(ROTARY.heads, key=lambda head: head.effect or 0)
    assert page.answer.startswith(f"The most important head is layer {top.layer + 1} head {top.head + 1}: ")
    assert f"({top.effect_low:.3f} to {top.effect_high:.3f} over sequences)" in page.answer
    positional = sum((head.positional or 0) > 0.5 for head in ROTARY.heads)
    assert f"The logits of {positional} depend mostly on position" in page.answer


def test_the_strongest_heads_of_each_kind_are_named() -> None:
    page, chosen = RECORD.page(), notable_heads(RECORD)
    previous = max(RECORD.heads, key=lambda head: head.previous or 0)
    assert len(chosen) == 10
    assert set(chosen.values()) == {"previous", "induction", "duplicate", "positional"}
    for name in set(chosen.values()):
        top = max(range(len(RECORD.heads)), key=lambda i: getattr(RECORD.heads[i], name))
        assert top in chosen
    named = f"L{previous.layer + 1} H{previous.head + 1}: previous token {previous.previous:.2f}, positional "
    assert page.picture is not None
    assert page.picture.spec["title"]["subtitle"][0].startswith(f"1  {named}")
    assert named in page.picture.alternative
    marked = {row["mark"]: row for row in figure_rows(page, "map") if row["mark"]}
    assert set(marked) == set(map(str, range(1, 11)))
    assert (marked["1"]["layer"], marked["1"]["head"]) == (previous.layer + 1, previous.head + 1)
    rows = list(table_of(page, "Heads to look at").values())
    assert rows[0]["Why"] == "Largest attention on the previous token"
    assert "Ablation effects were not measured." in page.notes


def test_idle_heads_are_listed_separately() -> None:
    heads = tuple(replace(head, **UNIFORM) if at < 5 else head for at, head in enumerate(BERT.heads))
    changed = replace(BERT, heads=heads)
    assert [is_idle(changed, head) for head in heads[4:6]] == [True, False]
    assert not is_idle(changed, replace(heads[0], effect=0.1, effect_low=0.05, effect_high=0.2))
    symbolic = sum((head.symbolic or 0) > 0.5 for head in heads[5:])
    idle = "5 with nearly uniform attention and no significant effect are not counted"
    assert f"of {symbolic} mostly on content; {idle}" in changed.page().answer
    assert [row["mark"] for row in figure_rows(changed.page(), "map")][:5] == ["–"] * 5
    page = comparison_page(BERT, changed, ("base", "other"))
    kinds = table_of(page, "Kinds of heads")
    assert (kinds["Near-uniform"]["base"], kinds["Near-uniform"]["other"]) == ("0", "5")
    assert kinds["Symbolic share over 0.5"]["other"] == str(symbolic)
    assert {row["name"] for row in figure_rows(page, "heads") if row["kind"] == "Near-uniform"} == {
        f"L1 H{n}" for n in range(1, 6)
    }


def test_missing_values_have_no_chart() -> None:
    made = {
        "rotary": ROTARY,
        "bert": BERT,
        "bare": WITHOUT_EFFECTS,
        "untold": WITHOUT_SHARES,
        "single": SINGLE,
        "empty": EMPTY,
    }
    drawn = {name: [figure.id for figure in each.page().figures] for name, each in made.items()}
    assert drawn == {
        "rotary": ["map", "frequency", "shares", "use", "effects"],
        "bert": ["map", "shares", "effects"],
        "bare": ["map", "shares"],
        "untold": ["map", "effects"],
        "single": ["map", "shares"],
        "empty": [],
    }
    assert WITHOUT_SHARES.page().warnings == [
        "Shares unknown in layers 1–6. Reason: the bias depends on the content of keys."
    ]
    assert "moves the last hidden states by" in WITHOUT_SHARES.page().answer
    assert EMPTY.page().answer == "No values are known for any head."
    assert set(EMPTY._repr_mimebundle_()) == {"text/plain"}
    failed = replace(BERT, layers=(replace(BERT.layers[0], outputs=1e-3), *BERT.layers[1:]))
    assert failed.page().warnings[0].startswith("Not proved:")
    assert list(table_of(failed.page(), "Layers above the tolerance")) == ["L1"]
    assert "All layers are within tolerance." in BERT.page().html()
    holed = BERT.page().html(), replace(BERT, about=BERT.about | {"random_weights": ["a", "b"]}).page()
    assert "Random weights" not in holed[0]
    assert "initialised randomly (2): a, b." in holed[1].warnings[0]


def test_every_chart_is_drawn_at_any_width_also_for_large_models() -> None:
    large = random_audit((("decoder", "self", 32, 32, 8),), rotary=True, seed=5)
    pages = [each.page() for each in (RECORD, ENCODER_DECODER, SINGLE, large)]
    pages += [
        comparison_page(*pair, ("a", "b")) for pair in ((ROTARY, ROTARY), (BERT, ENCODER_DECODER), (SINGLE, SINGLE))
    ]
    for page in pages:
        for name, chart in page.charts().items():
            svg = vl_convert.vegalite_to_svg(fit_to_width(chart.to_dict(), 340))
            assert svg.startswith("<svg"), name
            assert "NaN" not in svg, name
    assert len(pages[3].html()) < 1_500_000
    assert pages[0].html() == RECORD.page().html()


def test_a_notebook_shows_the_map() -> None:
    (shown,) = RECORD._repr_mimebundle_().values()
    assert with_light_theme(RECORD.page().picture.chart).to_dict()["title"]["subtitle"][0] in shown


@pytest.mark.filterwarnings("ignore:overflow")
def test_values_whose_sums_overflow_are_refused() -> None:
    heads = tuple(replace(h, variance_use=(1e308,) * len(h.variance_use)) for h in ROTARY.heads)
    with pytest.raises(InputError, match=r"^report: the record is damaged"):
        replace(ROTARY, heads=heads).page().html()


def test_hostile_names_are_escaped() -> None:
    layers = tuple(
        replace(one, module=HOSTILE_NAME, position=HOSTILE_NAME, unknown=f"{HOSTILE_NAME}: {HOSTILE_NAME}")
        for one in BERT.layers
    )
    nasty = replace(BERT, about=dict.fromkeys(METADATA, HOSTILE_NAME), layers=layers, words=(HOSTILE_NAME,))
    assert sentences.unknown_layers(nasty) == [("layers 1–6", HOSTILE_NAME)]
    for page in (nasty.page(), comparison_page(nasty, WITHOUT_EFFECTS, (HOSTILE_NAME, "b"))):
        assert "<script>alert" not in page.html()
        assert "&lt;script&gt;alert" in page.html()


def test_two_audits_are_compared_side_by_side() -> None:
    turned = tuple(replace(one, frequencies=tuple(x / 4 for x in one.frequencies)) for one in ROTARY.layers)
    other = replace(random_audit(CAUSAL, rotary=True, seed=8, model="longer", tokens=256), layers=turned)
    page = comparison_page(ROTARY, other, ("base", "long"))
    assert page.warnings[0].startswith("Different inputs (tokens differ).")
    rows = [
        row for row in figure_rows(page, "heads") if row["measure"] == "Positional share" and row["kind"] is not None
    ]
    assert [row["first"] for row in rows] == pytest.approx([head.positional for head in ROTARY.heads], rel=1e-4)
    assert [row["second"] for row in rows] == pytest.approx([head.positional for head in other.heads], rel=1e-4)
    table = table_of(page, "What changed most")
    for measure, name in (("Positional share", "positional"), ("Effect", "effect"), ("Induction", "induction")):
        pairs = [[getattr(head, name) for head in heads] for heads in zip(ROTARY.heads, other.heads, strict=True)]
        changes = [abs(b - a) if None not in (a, b) else 0 for a, b in pairs]
        top = ROTARY.heads[int(np.argmax(changes))]
        row = table[measure]
        assert row["Largest change in"] == f"L{top.layer + 1} H{top.head + 1}"
        assert float(row["base"].replace("−", "-")) == pytest.approx(getattr(top, name), abs=6e-4)
    settings = table_of(page, "Settings that differ")
    assert settings["tokens"] == {"Setting": "tokens", "base": "128", "long": "256"}
    assert "seconds" not in settings
    assert f"0.25 and {1e4 ** (-31 / 32) / 4:.3g} rad per position" in page.html()
    named = page.picture.spec["title"]["subtitle"] if page.picture else []
    assert named[0].partition("  ")[2] in page.answer
    assert any("only indicative" in note for note in page.notes)
    assert comparison_page(BERT, BERT, ("a", "b")).answer == "No head changed."
    assert "Effects are not compared." in comparison_page(BERT, WITHOUT_SHARES, ("a", "b")).warnings[0]
    assert "Effect" not in table_of(comparison_page(BERT, WITHOUT_SHARES, ("a", "b")), "What changed most")


def test_models_of_different_shapes_are_compared_by_distribution() -> None:
    page = comparison_page(BERT, ENCODER_DECODER, ("a", "b"))
    drawn = [row for row in figure_rows(page, "heads") if row["measure"] == "Positional share"]
    for name, made in (("a", BERT), ("b", ENCODER_DECODER)):
        assert sum(row["share"] for row in drawn if row["series"] == name) == pytest.approx(1, abs=1e-3)
        median = np.median([head.positional for head in made.heads if head.positional is not None])
        assert table_of(page, "Kinds of heads")["Median: positional share"][name] == f"{median:.3f}"
    assert "heads are not compared one by one" in page.warnings[0]
    assert comparison_page(EMPTY, EMPTY, ("a", "b")).answer == "No values are known in both."


def test_bands_share_one_scale_with_their_change() -> None:
    tokens = torch.randint(3, 31, (3, 20), generator=torch.Generator().manual_seed(4))
    banded = audit(tiny("LlamaForCausalLM", **GROUPED), tokens, effects="bands")
    bands = tuple(replace(b, effect=(b.effect or 0) + (0.5 if at == 3 else 0)) for at, b in enumerate(banded.bands))
    effects = [band.effect for band in banded.bands]
    assert [row["effect"] for row in figure_rows(banded.page(), "bands")] == pytest.approx(effects, rel=1e-4, abs=1e-9)
    assert "frequency band" in banded.page().answer
    page = comparison_page(banded, replace(banded, bands=bands), ("before", "after"))
    moved = [row["effect"] for row in figure_rows(page, "bands") if row["model"] == "after − before"]
    assert moved == pytest.approx([0.5 if at == 3 else 0.0 for at in range(len(bands))], abs=1e-6)
    band = banded.bands[3]
    text = f"Band that changed most: pairs {band.first + 1}–{band.last + 1} in L{band.layer + 1}, from "
    assert text in page.answer
    assert vl_convert.vegalite_to_svg(fit_to_width(page.charts()["bands"].to_dict(), 600)).startswith("<svg")
