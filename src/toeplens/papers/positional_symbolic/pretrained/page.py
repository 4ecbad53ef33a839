"""The page of a pretrained model's study: its claims, its heads, what it loses without bands and heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from toeplens.papers.positional_symbolic.pretrained import change_figures, head_figures
from toeplens.papers.positional_symbolic.pretrained.clustered import by_text
from toeplens.papers.positional_symbolic.pretrained.state import Pretrained
from toeplens.report.kit.blocks import Block, numbered
from toeplens.report.kit.page import ledger, render_page, write_report
from toeplens.studies import RULE
from toeplens.studies.kit.verdicts import ENOUGH
from toeplens.studies.probing import ABOUT
from toeplens.studies.probing.words import interval, title_of

_MAKERS: tuple[Callable[[Pretrained], Block], ...] = (
    head_figures.maps,
    head_figures.plane,
    head_figures.frequencies,
    change_figures.bands,
    change_figures.layered,
    change_figures.retrieval,
)


def write_pretrained(study: Pretrained) -> Path:
    """Write the study's page to ``report.html`` in its directory, whole or not at all; returns its path."""
    return write_report(study.directory, render_pretrained(study))


def render_pretrained(study: Pretrained) -> str:
    """The page as one self-contained HTML document; the same state gives the same document."""
    intact, first = study.probes.get("intact"), study.audits.get("text-0")
    return render_page(
        "papers/positional_symbolic/pretrained/page.html.j2",
        numbered(make(study) for make in _MAKERS),
        study=study,
        model="/".join(Path(study.plan.model).parts[-2:]),
        claims=ledger(study.entries),
        tally=Counter(entry.verdict for entry in study.entries),
        rule=RULE.replace("seed", study.plan.units.removesuffix("s")),
        clustered=list(by_text(study)),
        enough=ENOUGH,
        first=first,
        summaries=[] if intact is None else [each for name in ABOUT for each in intact.summaries(name)],
        about=ABOUT,
        title=title_of,
        interval=interval,
        dead=[]
        if first is None
        else [(layer.layer + 1, len(layer.dead), len(layer.frequencies)) for layer in first.layers if layer.dead],
    )
