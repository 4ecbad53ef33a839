"""The page of a pretrained model's study: its claims, its heads, what it loses without bands and heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from markupsafe import Markup

from toeplens.ground.words import duration
from toeplens.papers.positional_symbolic.pretrained import change_figures, head_figures
from toeplens.papers.positional_symbolic.pretrained.clustered import by_text
from toeplens.papers.positional_symbolic.pretrained.state import Pretrained
from toeplens.report.kit.blocks import Block, numbered
from toeplens.report.kit.page import Page, ledger, ledger_table, machine_rows, write_report
from toeplens.report.kit.tables import Cell, Table, code, make_table
from toeplens.report.probing.page import behaviours_table
from toeplens.studies import RULE
from toeplens.studies.kit.verdicts import ENOUGH

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
    return pretrained_page(study).html()


def pretrained_page(study: Pretrained) -> Page:
    """The figures and tables of the study."""
    intact, first, claims = study.probes.get("intact"), study.audits.get("text-0"), ledger(study.entries)
    tables = {"claims": ledger_table(claims)}
    if intact is not None:
        tables["behaviours"] = behaviours_table(intact, changed=False)
    layers = () if first is None else first.layers
    return Page(
        "papers/positional_symbolic/pretrained/page.html.j2",
        numbered(make(study) for make in _MAKERS),
        {name: table for name, table in (tables | {"run": _run_table(study)}).items() if table.body},
        {
            "study": study,
            "model": "/".join(Path(study.plan.model).parts[-2:]),
            "claims": claims,
            "tally": Counter(entry.verdict for entry in study.entries),
            "rule": RULE.replace("seed", study.plan.units.removesuffix("s")),
            "clustered": list(by_text(study)),
            "enough": ENOUGH,
            "first": first,
            "dead": [(layer.layer + 1, len(layer.dead), len(layer.frequencies)) for layer in layers if layer.dead],
        },
    )


def _run_table(study: Pretrained) -> Table:
    plan, about = study.plan, study.environment
    texts = {name: digest[:12] for name, digest in plan.texts.items()}
    shown = Markup(", ").join(Markup("{} <code>{}</code>").format(*each) for each in texts.items())
    sizes = (
        f"{plan.sequences * plan.together} sequences of each, {plan.tokens} tokens; effects on their first "
        f"{plan.effect_tokens}; probes of {plan.probe_tokens}; seed {plan.seed}"
    )
    rows: list[list[str | Cell]] = [
        ["Command", code(about.get("command") or "not recorded")],
        ["Texts", Cell(", ".join(f"{name} {digest}" for name, digest in texts.items()), html=shown)],
        ["Sizes", sizes],
        ["Time", f"{duration(about['seconds'])} in all" if about.get("seconds") else "not recorded"],
        *machine_rows(about, without=("execution", "threads", "numpy")),
    ]
    return make_table("How it was run", [], rows, css="facts")
