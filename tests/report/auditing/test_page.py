"""The page of an audit: its numbers are the record's, what is not known has no figure, and it works in a browser."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from itertools import cycle
from math import pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from playwright.sync_api import Browser, Page, expect
from tests.report.browsing import Visit
from tests.report.reading import figures, stands_alone, without_plotly
from tests.sources.huggingface.models import GROUPED, tiny

from toeplens.ground import InputError
from toeplens.report.auditing.comparison import render_comparison, write_comparison
from toeplens.report.auditing.page import alike, bins, file_name, frequencies, render_audit
from toeplens.studies.auditing import audit, words
from toeplens.studies.auditing.record import COLUMNS, HeadRecord, LayerRecord
from toeplens.studies.auditing.result import NUMBERS, Audit, Scale, notebook_html, open_audit

NASTY = "<script>alert(1)</script>\"'&%{x}"
ABOUT = {"model": "made/up", "class": "MadeUpModel", "model_type": "made-up", "parameters": 22713216}
ABOUT |= {"dtype": "float32", "text": "a story", "sequences": 16, "tokens": 128, "seed": 7, "torch": "2.13.0"}
ABOUT |= {"seconds": 12.5, "command": "toeplens audit made/up"}
RECORD = open_audit(Path(__file__).parents[3] / "results" / "audit-smollm2")
SHARES = ("positional", "symbolic", "interaction")
PLACED = (
    "toeplitz",
    "toeplitz_variance",
    "distance",
    "previous",
    "current",
    "next",
    "induction",
)  # of queries and keys
Shape = tuple[str, str, int, int, int]  # side, kind, layers, heads, key heads


def made_up(
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
        about=ABOUT | about,
        layers=tuple(layers),
        heads=tuple(heads),
        effect=effect,
        method="exact" if effect else None,
        baseline=3.2104 if effect == "loss" else None,
        whole=0.0,
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
        gone |= {**dict.fromkeys(PLACED), "profile": ()}
    elif head == 0:
        gone |= {"induction": None}
    if effect:
        moved = float(0.4 * rng.beta(0.3, 4) - 0.004)
        gone |= {"effect": moved, "effect_low": moved - 0.003, "effect_high": moved + 0.004}
    return replace(found, side=side, kind=kind, layer=layer, head=head, **gone)


BERT = made_up()
CAUSAL = (("decoder", "self", 24, 16, 4),)
ROTARY = made_up(CAUSAL, rotary=True, seed=1)
BOTH = made_up((("encoder", "self", 4, 8, 8), ("decoder", "self", 3, 8, 8), ("decoder", "cross", 3, 8, 8)), seed=2)
BARE = made_up(effect=None, seed=3)
UNTOLD = made_up(shares=False, effect="states", seed=4)


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    made = {"bert": BERT, "rotary": ROTARY, "both": BOTH, "bare": BARE, "untold": UNTOLD}
    return {name: render_audit(audit, b"PAR1 bytes") for name, audit in made.items()}


def _sheets(page: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="[^"]*" id="sheets">(.*?)</script>', page, re.S)
    return json.loads(found)


def _traces(page: str, place: str) -> list[dict[str, Any]]:
    return figures(page)[place]["data"]


def _blocks(page: str) -> set[str]:
    return {place.split("-")[0] for place in figures(page)}


@pytest.mark.parametrize(("name", "audit"), [("bert", BERT), ("rotary", ROTARY), ("both", BOTH), ("untold", UNTOLD)])
def test_the_page_holds_every_number_of_every_head(pages: dict[str, str], name: str, audit: Audit) -> None:
    sheet, table = _sheets(pages[name])["sheets"][0], audit.table()
    for column in NUMBERS:
        known = any(value is not None for value in table[column])
        assert sheet["values"].get(column) == (table[column] if known else None)
    places = [(sheet["places"][i]["side"], sheet["places"][i]["kind"]) for i in sheet["place"]]
    assert places == list(zip(table["side"], table["kind"], strict=True))
    assert (sheet["layer"], sheet["head"]) == (table["layer"], table["head"])
    tones = [tone for column in sheet["tones"].values() for tone in column if tone is not None]
    assert -1 <= min(tones) <= max(tones) <= 1


def test_figures_show_the_record(pages: dict[str, str]) -> None:
    plane = _traces(pages["rotary"], "plane-0-0-0")[1]
    assert plane["x"] == [round(head.positional or 0, 4) for head in ROTARY.heads]
    assert plane["y"] == [round(head.symbolic or 0, 4) for head in ROTARY.heads]
    largest = max(range(len(ROTARY.heads)), key=lambda i: ROTARY.heads[i].effect or 0)
    assert plane["marker"]["size"][largest] == max(plane["marker"]["size"])
    layer = ROTARY.layers[3]
    (heat,) = _traces(pages["rotary"], "frequencies-4-0-1")
    wanted = [list(head.variance_use[1:-1]) for head in ROTARY.of(layer)]
    np.testing.assert_allclose(np.array(heat["z"], dtype=float), wanted, rtol=6e-3)
    turned = layer.frequencies[7]
    assert heat["x"][7] == f"pair 7: {turned:.3g} rad per position, {2 * pi / turned:,.0f} tokens"
    (mean,) = _traces(pages["rotary"], "frequencies-0-1-0")
    assert mean["y"][:2] == ["L2", "L4"], "layers with other frequencies have another map"
    assert not {"no rotation", "bias"} & {*heat["x"], *mean["x"]}, "nothing is in them"
    partial = made_up((("decoder", "self", 1, 2, 2),), rotary=True)
    heads = tuple(replace(head, variance_use=(0.5, *head.variance_use[1:-1], -0.1)) for head in partial.heads)
    heat = frequencies(replace(partial, heads=heads)).views[1].groups[0].panels[1].figure.data[0]
    assert (heat.x[0], heat.x[-1], heat.z[0][0], heat.z[0][-1]) == ("no rotation", "bias", 0.5, -0.1)
    np.testing.assert_allclose(
        mean["z"][1], np.mean([head.norm_use[1:] for head in ROTARY.of(layer)], axis=0), rtol=6e-3
    )
    (heat,) = _traces(pages["bert"], "distance-0-0-0")
    nearest = sorted(BERT.heads, key=lambda head: head.distance or 0)
    assert heat["y"] == [f"L{head.layer + 1} H{head.head + 1}" for head in nearest]
    np.testing.assert_allclose(heat["z"], [head.profile for head in nearest], rtol=6e-3)
    assert heat["x"] == bins(9) == ["0", "1", "2–3", "4–7", "8–15", "16–31", "32–63", "64–127", "128–255"]
    (marks,) = _traces(pages["bert"], "effects-0-0-0")
    np.testing.assert_allclose(marks["y"], [head.effect for head in BERT.heads], rtol=1e-5)
    np.testing.assert_allclose(marks["error_y"]["array"], 0.004, rtol=1e-4)
    np.testing.assert_allclose(marks["error_y"]["arrayminus"], 0.003, rtol=1e-4)
    assert np.all(np.abs(np.array(marks["x"]) - [head.layer + 1 for head in BERT.heads]) < 0.5)


def test_what_is_missing_has_no_figure(pages: dict[str, str]) -> None:
    assert _blocks(pages["rotary"]) == {"plane", "frequencies", "distance", "effects"}
    assert _blocks(pages["bert"]) == {"plane", "distance", "effects"}
    assert _blocks(pages["bare"]) == {"plane", "distance"}
    assert "Ablation effects were not measured" in pages["bare"]
    assert _blocks(pages["untold"]) == {"distance", "effects"}
    assert "<b>Shares unknown in layers 1–6.</b> Reason: the bias depends on the content of keys." in pages["untold"]
    assert "moves the last hidden states by" in pages["untold"]
    empty = replace(BERT, heads=tuple(HeadRecord(h.side, h.kind, h.layer, h.head) for h in BERT.heads), effect=None)
    assert "No values are known for any head" in render_audit(empty)
    assert "<svg" not in notebook_html(empty)
    failed = replace(BERT, layers=(replace(BERT.layers[0], outputs=1e-3), *BERT.layers[1:]))
    assert "<b>Not proved.</b>" in render_audit(failed)
    assert "<b>Not proved.</b>" not in pages["bert"]
    assert "NOT proved" in notebook_html(failed)


@pytest.mark.filterwarnings("ignore:overflow")
def test_numbers_whose_sums_are_too_large_are_refused() -> None:
    audit = made_up()
    head = replace(audit.heads[1], profile=(*audit.heads[1].profile[:-1], 1e308))
    with pytest.raises(InputError, match=r"^report: the record is damaged: a figure has values that are not finite"):
        render_audit(replace(audit, heads=(audit.heads[0], head, head, *audit.heads[3:])))


def test_hostile_names_are_text() -> None:
    layers = tuple(replace(one, module=NASTY, position=NASTY, unknown=f"{NASTY}: {NASTY}") for one in BERT.layers)
    nasty = replace(BERT, about=dict.fromkeys(ABOUT, NASTY), layers=layers, words=(NASTY,))
    assert words.unknown(nasty) == [("layers 1–6", NASTY)]
    whole = render_audit(nasty), render_comparison(nasty, BARE, (NASTY, "b"))
    own = *map(without_plotly, whole), notebook_html(nasty)
    for text in own:
        assert "<script>alert" not in text
        assert "&lt;script&gt;alert" in text
    assert all(map(stands_alone, whole))
    assert "alert(1)</script>" not in own[1]
    assert "<script" not in notebook_html(BERT), "a notebook runs none"
    assert re.fullmatch(r"[\w.-]+", file_name(NASTY))
    assert file_name("../..") == "audit"


def test_two_audits_side_by_side(tmp_path: Path) -> None:
    turned = tuple(replace(one, frequencies=tuple(x / 4 for x in one.frequencies)) for one in ROTARY.layers)
    other = replace(made_up(CAUSAL, rotary=True, seed=8, model="longer", tokens=256), layers=turned)
    page = write_comparison(ROTARY, other, ("base", "long"), tmp_path).read_text()
    first, second, change = _sheets(page)["sheets"]
    assert first["ends"] == second["ends"], "one scale for both"
    for name in ("positional", "effect", "centre"):
        pairs = zip(first["values"][name], second["values"][name], strict=True)
        assert change["values"][name] == [b - a for a, b in pairs]
    marks = _traces(page, "pairs-0-0-0")[1]
    np.testing.assert_allclose(marks["x"], [head.positional for head in ROTARY.heads], rtol=1e-4)
    np.testing.assert_allclose(marks["y"], [head.positional for head in other.heads], rtol=1e-4)
    moved = np.array(
        [(b.positional or 0) - (a.positional or 0) for a, b in zip(ROTARY.heads, other.heads, strict=True)]
    )
    top = ROTARY.heads[int(np.abs(moved).argmax())]
    assert f"Positional share: largest change in layer {top.layer + 1} head {top.head + 1}, " in page
    assert "<b>Different inputs</b> (tokens differ)" in page
    assert f"0.25 and {1e4 ** (-31 / 32) / 4:.3g} rad per position" in page
    assert "seconds" not in without_plotly(page).partition('id="settings"')[2]
    page = render_comparison(BERT, BOTH, ("a", "b"))
    assert len(_sheets(page)["sheets"]) == 2
    bars = _traces(page, "pairs-0-0-0")
    assert [pytest.approx(1, abs=1e-3) for _ in bars] == [sum(trace["y"]) for trace in bars]
    page = render_comparison(BERT, UNTOLD, ("a", "b"))
    assert "<b>Effects are not compared.</b>" in page
    assert not {"effect", "effect_low"} & {column["name"] for column in _sheets(page)["columns"]}


def test_bands_of_both_are_in_one_scale_with_their_change() -> None:
    tokens = torch.randint(3, 31, (3, 20), generator=torch.Generator().manual_seed(4))
    banded = audit(tiny("LlamaForCausalLM", **GROUPED), tokens, effects="bands")
    other = replace(
        banded,
        bands=tuple(
            replace(band, effect=(band.effect or 0) + (0.5 if at == 3 else 0.0)) for at, band in enumerate(banded.bands)
        ),
    )
    page = render_comparison(banded, other, ("before", "after"))
    drawn = [figures(page)[f"bands-{view}-0-0"]["data"][0] for view in range(3)]
    effects = np.array([[band.effect for band in banded.bands_of(layer)] for layer in banded.layers])
    np.testing.assert_allclose(np.array(drawn[0]["z"], dtype=float), effects, atol=1e-4)
    moved = np.zeros_like(effects)
    moved.flat[3] = 0.5
    np.testing.assert_allclose(np.array(drawn[2]["z"], dtype=float), moved, atol=1e-4)
    ends = [figures(page)[f"bands-{view}-0-0"]["layout"]["coloraxis"]["cmax"] for view in range(3)]
    assert ends == pytest.approx([np.abs(effects + moved).max()] * 2 + [0.5], rel=1e-3)
    band = banded.bands[3]
    said = f"Largest change: pairs {band.first + 1} to {band.last + 1} in layer {band.layer + 1}, from "
    assert said in without_plotly(page)
    assert "<h2>Frequency bands</h2>" in page


def test_a_notebook_shows_the_heads_that_matter_most() -> None:
    text = notebook_html(BERT)
    ranked = sorted(BERT.heads, key=lambda head: -(head.effect or 0))
    shown = re.findall(r"<tr><td[^>]*>(L\d+ H\d+)</td><td[^>]*>([\d.−]+)</td>", text)
    assert shown == [(f"L{head.layer + 1} H{head.head + 1}", f"{head.effect:.3f}") for head in ranked[:5]]
    assert text.count("<svg") == 3
    assert text.count("<rect") == 3 * len(BERT.heads)
    head = BERT.heads[17]
    assert f"<title>L{head.layer + 1} H{head.head + 1}: {head.positional:.3f}</title>" in text
    assert notebook_html(UNTOLD).count("<svg") == 1


def test_colours_and_numbers() -> None:
    shares = Scale.of([0.1, None, 0.8])
    assert (shares.low, shares.high, shares.tone(0.4), shares.tone(None)) == (0, 0.8, 0.5, None)
    assert Scale.of([0.9, 0.95, 1.0]).tone(0.95) == 0.5
    assert Scale.of([-0.2, 0.4]).tone(-0.2) == -0.5
    assert Scale.of([-9.0, -1.0]).tone(-5.0) == 0.5
    assert [Scale.of([value]).tone(value) for value in (0.0, 0.3, -2.0)] == [0.0, 1.0, 0.0]
    assert Scale.of([0.0, 1e-9], least=1e-3).tone(1e-9) == 0, "rounding has no colour"
    assert Scale.of([1.0, 7.0], logarithmic=True).tone(1.0) == pytest.approx(1 / 3, abs=1e-3)
    assert (words.told(-0.0004), words.told(-0.25, 2), words.told(None)) == ("0.000", "−0.25", "–")
    assert [alike((1.0, 0.1), one) for one in ((1.0, 0.1000001), (1.0, 0.09), (1.0,))] == [True, False, False]
    assert (words.count(22713216), words.count(7e9), words.count(None)) == ("22.7 M", "7 B", "–")


def _saved(view: Page, button: str) -> bytes:
    with view.expect_download() as found:
        view.locator(button).click()
    return Path(found.value.path()).read_bytes()


@pytest.mark.heavy
def test_it_sorts_filters_and_saves_in_a_browser(browser: Browser, pages: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(pages["bert"])
    visit = Visit(browser, path, 390)
    view = visit.page
    rows, status = view.locator("#table tbody tr"), view.locator("#shown")
    expect(status).to_have_text("All 72 heads; showing the first 25.")
    view.locator("#table th[data-name=positional] button").click()
    by_share = sorted(BERT.heads, key=lambda head: -(head.positional or 0))
    named = [f"L{head.layer + 1} H{head.head + 1}" for head in by_share]
    assert rows.locator("th").all_text_contents() == named[:25]
    first = rows.first.locator("td").all_text_contents()[:2]
    assert f"L{first[0]} H{first[1]}" == named[0], "counted from 1 in every column"
    view.locator("#table th[data-name=positional] button").click()
    assert rows.locator("th").all_text_contents() == named[:-26:-1]
    assert view.locator("#table th[aria-sort]").get_attribute("aria-sort") == "ascending"
    view.locator("#more").click()
    assert rows.count() == 72
    view.locator("input[name=where]").fill("positional > 0.5 and layer <= 3")
    kept = [head for head in reversed(by_share) if (head.positional or 0) > 0.5 and head.layer <= 2]
    expect(status).to_have_text(
        f"{len(kept)} of 72 heads; showing the first 25." if len(kept) > 25 else f"{len(kept)} of 72 heads."
    )
    table = list(csv.DictReader(_saved(view, "#csv").decode().splitlines()))
    assert list(table[0]) == list(COLUMNS)
    got = [(int(row["layer"]), int(row["head"]), float(row["positional"]), row["centre"]) for row in table]
    assert got == [(head.layer, head.head, head.positional, "") for head in kept]
    assert _saved(view, "#parquet") == b"PAR1 bytes"
    view.locator("input[name=where]").fill("positional is high")
    expect(status).to_contain_text("“positional is high” is not a valid filter")
    view.locator("#column").select_option("induction")
    cells = view.locator(".map i")
    assert cells.count() == 72
    assert cells.nth(0).get_attribute("class") == "unknown"
    top = max(range(72), key=lambda i: BERT.heads[i].induction or 0)
    assert cells.nth(top).text_content() == f"{BERT.heads[top].induction:.2f}".lstrip("0")
    cells.nth(17).click()
    expect(view.locator(".tip b")).to_have_text("L2 H6")
    assert f"{BERT.heads[17].entropy:.3f}" in (view.locator(".tip").text_content() or "")
    view.locator("#silenced").scroll_into_view_if_needed()
    expect(view.locator("#effects-0-0-0 .main-svg").first).to_be_visible()
    assert visit.fits_any_window()
    assert visit.barriers() == visit.barriers("dark") == []
    other = tmp_path / "pair.html"
    pair = render_comparison(BERT, made_up(seed=9), ("one", "other"))
    other.write_text(pair)
    visit.open(other)
    view.locator("#column").select_option("distance")
    moved = [abs((b.distance or 0) - (a.distance or 0)) for a, b in zip(BERT.heads, made_up(seed=9).heads, strict=True)]
    top = BERT.heads[int(np.argmax(moved))]
    expect(view.locator("#changes tbody th").first).to_have_text(f"L{top.layer + 1} H{top.head + 1}")
    visit.end()
