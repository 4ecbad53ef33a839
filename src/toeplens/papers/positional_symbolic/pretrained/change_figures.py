"""What a pretrained model loses when frequencies stand still, and when heads that retrieve are gone."""

from __future__ import annotations

from dataclasses import replace
from math import pi

import numpy as np

from toeplens.ground.words import fixed
from toeplens.lens import Estimate
from toeplens.papers.positional_symbolic.pretrained.changes import by_speed
from toeplens.papers.positional_symbolic.pretrained.plan import BANDS, DRAWS
from toeplens.papers.positional_symbolic.pretrained.state import Pretrained
from toeplens.report.auditing.maps import by_band
from toeplens.report.kit.blocks import Block, Panel, Sign, View
from toeplens.report.kit.canvas import Canvas, plain
from toeplens.report.kit.colours import BLUE, GREEN, GREY, ORANGE
from toeplens.studies.probing import Behaviour, ProbeRecord

_ASKED: dict[Behaviour, tuple[str, str]] = {
    "copying": ("Copying", BLUE),
    "needle": ("Needle", ORANGE),
    "loss": ("Text", GREEN),
}
_NULL = 1e-9


def bands(study: Pretrained) -> Block:
    """What stopping one eighth of all rotations costs: copying, needles and text."""
    caption = (
        "The frequencies of every layer are parted into eighths by their speed; one eighth stands still in all layers "
        "and heads. Up: how many nats a token more the changed model has, of the same items. Ranges are 95% intervals "
        "over the items."
    )
    probes = [study.probes.get(f"still-{band}") for band in range(BANDS)]
    found = [(band, probe) for band, probe in enumerate(probes) if probe is not None and probe.changes]
    if not found:
        return Block("bands", "", caption, [], "full")
    canvas, told = Canvas(376, left=60, bottom=78), []
    xs = [f"{band + 1}<br>{_turns(study, band)}" for band, _ in found]
    for behaviour, (title, tint) in _ASKED.items():
        more = [_more(probe, behaviour) for _, probe in found]
        means = [each.value for each in more]
        error = {
            "type": "data",
            "symmetric": False,
            "array": plain([e.high - e.value for e in more]),
            "arrayminus": plain([e.value - e.low for e in more]),
            "thickness": 1,
            "width": 3,
        }
        canvas.lines(
            xs,
            plain(means),
            tint,
            f"{title}: %{{y:.3f}} nats more<extra></extra>",
            marker={"size": 7},
            meta=behaviour,
            error_y=error,
        )
        worst = int(np.argmax(means))
        told.append(f"{title}: most without eighth {found[worst][0] + 1}, {fixed(means[worst])} nats more")
    canvas.x("eighth that stands still, fastest first; tokens a turn", type="category", tickangle=0)
    canvas.y("nats a token more")
    signs = [Sign(behaviour, title, tint, "●") for behaviour, (title, tint) in _ASKED.items()]
    panel = Panel("More nats", canvas.figure(), f"{'; '.join(told)}.")
    return Block("bands", "Bands that stand still", caption, [View.of([panel])], "full", legend=signs)


def _more(probe: ProbeRecord, behaviour: Behaviour) -> Estimate:
    more = probe.summary(behaviour).more_nats
    assert more is not None
    return more


def _turns(study: Pretrained, band: int) -> str:
    """How many tokens a turn of a band takes, from its fastest frequency to its slowest, over all layers."""
    speeds: list[float] = []
    for layer in next((audit.layers for audit in study.audits.values()), ()):
        if layer.frequencies:
            pairs = np.array_split(by_speed(layer), BANDS)[band]
            speeds += [abs(layer.frequencies[pair]) for pair in pairs if layer.frequencies[pair]]
    return f"{_short(2 * pi / max(speeds))}–<br>{_short(2 * pi / min(speeds))}" if speeds else "–"


def _short(tokens: float) -> str:
    size, unit = next(
        ((tokens / each, unit) for each, unit in ((1e6, "M"), (1e3, "k")) if tokens >= each), (tokens, "")
    )
    return f"{size:.2g}{unit}" if size < 10 else f"{size:.0f}{unit}"


def layered(study: Pretrained) -> Block:
    """Layers by eighths: what stopping them in that layer alone adds to the loss."""
    audit, title = study.audits.get("bands"), "Which layer’s frequencies the text needs"
    return Block("layered", title, "", []) if audit is None else replace(by_band(audit), id="layered", title=title)


def retrieval(study: Pretrained) -> Block:
    """What is left of needles without the heads that retrieve, and without some of their frequencies."""
    caption = (
        "What was done is down; across is how many nats a token more the needle’s number then has, with its 95% "
        "interval over needles. A pair that is silent adds nothing to the logit; one that is still says what a key "
        "holds, and not where. Grey: as many other heads of the same layers, or as many other frequencies of the same "
        "heads, drawn."
    )
    rows = [
        ("no-retrieval", "heads that retrieve silenced", ORANGE),
        *((f"no-others-{n}", f"as many others ({n + 1})", GREY) for n in range(DRAWS)),
        ("slow-silent", "their slowest quarter silent", ORANGE),
        ("retrieval-still", "their slowest quarter still", GREEN),
        ("fast-silent", "their fastest quarter silent", BLUE),
        *((f"some-silent-{n}", f"a drawn quarter ({n + 1})", GREY) for n in range(DRAWS)),
    ]
    found = [(title, tint, probe) for name, title, tint in rows if (probe := study.probes.get(name)) and probe.changes]
    if not found:
        return Block("retrieval", "", caption, [], "full")
    canvas = Canvas(60 + 26 * len(found), left=190)
    words = []
    for title, tint, probe in found:
        each, kept = _more(probe, "needle"), probe.summary("needle").changed_right
        assert kept is not None
        error = {
            "type": "data",
            "symmetric": False,
            "array": [max(0.0, each.high - each.value)],
            "arrayminus": [max(0.0, each.value - each.low)],
            "thickness": 1,
            "width": 3,
        }
        hover = f"{title}: %{{x:.3f}} nats more, {kept.value:.0%} of the needles found<extra></extra>"
        canvas.marks([round(each.value, 4)], [title], {"color": tint, "size": 9}, hover, error_x=error)
        words.append(f"{title} {kept.value:.0%}")
    canvas.x("nats a token more")
    canvas.y("", type="category", autorange="reversed")
    panel = Panel("Needles", canvas.figure(), f"Needles whose digits all come first: {'; '.join(words)}.")
    return Block("retrieval", "What needles need", caption, [View.of([panel])], "full")
