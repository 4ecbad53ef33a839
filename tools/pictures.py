"""Make the pictures of the documentation that are charts of the records' pages.

python tools/pictures.py
"""

from __future__ import annotations

import json
from pathlib import Path

import vl_convert

from toeplens.cli.studies import page_in
from toeplens.report.charts import facet_grid, line_chart, numeric
from toeplens.report.exporting import draw_figure
from toeplens.report.page import Figure
from toeplens.report.theme import style

ROOT = Path(__file__).resolve().parents[1]
_SCALE = 1.5  # of 96 dots per inch
IMAGES = ROOT / "docs" / "images"
PICTURES = {  # record and chart by name
    "audit": ("audit-smollm2", "map"),
    "heads": ("laptop", "heads-by-layer"),
    "language-lengths": ("language", "bits"),
    "plane": ("canonical", "plane"),
    "real-smollm2-bands": ("smollm2", "bands"),
    "real-smollm2-frequencies": ("smollm2", "frequencies"),
    "scan": ("canonical", "scan"),
}


def learning_curves() -> Figure:
    """Test accuracy by number of training examples, for each length of the sequences (results/learning-time)."""
    lines = (ROOT / "results" / "learning-time" / "runs.jsonl").read_text("utf-8").splitlines()
    runs = [json.loads(line) for line in lines]
    desk = {"batch": 32, "lr": 1e-3, "width": 128, "seed": 3}
    runs = [run for run in runs if desk.items() <= run.items() and run["words"] == (64 if run["length"] < 96 else 128)]
    runs.sort(key=lambda run: (run["length"], run["max_distance"] or 0))
    limits = [run["max_distance"] and f", distances up to {run['max_distance']}" for run in runs]
    series = [f"{run['length']} tokens{limit or ''}" for run, limit in zip(runs, limits, strict=True)]
    rows = [
        {"encoding": {"rope": "RoPE", "sinusoidal": "Sinusoid"}[run["encoding"]], "series": name}
        | {"examples": examples, "accuracy": accuracy}
        for run, name in zip(runs, series, strict=True)
        for examples, _, accuracy in run["curve"]
    ]
    x, y = numeric("examples", "training examples", kind="log"), numeric("accuracy", "test accuracy", format=".0%")
    names = dict.fromkeys(series)
    chart = line_chart(rows, x, y, [style(name, index=index) for index, name in enumerate(names)], points=False)
    chart = facet_grid(chart, "encoding", ["RoPE", "Sinusoid"], columns=2)
    return Figure("learning-time", "Learning curves", chart, "")


def main() -> None:
    """Write the pictures, two columns wide."""
    pages = {record: page_in(ROOT / "results" / record) for record, _ in PICTURES.values()}
    charts = {name: {each.id: each for each in pages[page].figures}[chart] for name, (page, chart) in PICTURES.items()}
    for name, figure in {**charts, "learning-time": learning_curves()}.items():
        picture = draw_figure(figure, "svg", 2).decode()
        (IMAGES / f"{name}.png").write_bytes(vl_convert.svg_to_png(picture, scale=_SCALE))
        print(name)


if __name__ == "__main__":
    main()
