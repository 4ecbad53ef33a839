"""Runs whose model has several encodings at once: one way to write them, and training that goes on where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.builders import refusal_message, tiny
from tests.cli.command import TINY, Toeplens

from toeplens.studies.grid.spec import spec_from_yaml
from toeplens.training import Run, run_spec
from toeplens.utils import InputError

ENCODINGS: Any = ["rope", "alibi"]


def test_equivalent_spellings_are_normalized() -> None:
    options = {"encoding_options": {"rope": {"base": 500}}}
    specs = [tiny(name, model=options) for name in (ENCODINGS, "rope+alibi", "rope + alibi", ("rope", "alibi"))]
    assert len({spec.name for spec in specs}) == 1
    assert specs[0].content["model"]["encoding"] == "rope + alibi"
    assert specs[0].content["model"]["encoding_options"] == {"rope": {"base": 500}}
    again = run_spec(**specs[0].content)
    assert again == specs[0]
    one: Any = ["rope"]
    assert tiny(one, model={"protocol": "released"}) == tiny("rope", model={"protocol": "released"})
    assert tiny("alibi+rope").name != specs[0].name
    assert [tiny(name).model.attention_scale for name in ("rope+t5", "rope+fox")] == [1.0, None]
    assert tiny(ENCODINGS, model={"protocol": "released"}).model.causal is False
    added = tiny(model={"input_encoding": "sinusoidal+learned"})
    assert added.model.input_encoding == "sinusoidal + learned"
    assert "must be a name or a list of names" in refusal_message(lambda: tiny(model={"encoding": []}))
    assert "model.encoding: 'rope' and 'drope' cannot be combined: both use rotate" in refusal_message(
        lambda: tiny("rope+drope")
    )


GRID = """
tasks:
  trigger-distance: {options: {length: 8, vocab_size: 12}}
encodings:
  rope+fox:
  both: {encoding: [rope, alibi], options: {rope: {base: 500}}}
  scanned: {encoding: rope+alibi, options: {rope: {pairing: half}}, scan: {rope.base: [100, 200]}}
"""


def test_a_study_accepts_a_list_of_encodings() -> None:
    spec = spec_from_yaml(GRID)
    columns = {column.label: column for column in spec.columns()}
    assert [column.encoding for column in columns.values()] == ["rope + fox", *["rope + alibi"] * 3]
    assert [column.title for column in columns.values()][:2] == ["rope + fox", "both"]
    assert columns["both"].options == {"rope": {"base": 500}}
    assert columns["scanned/200"].options == {"rope": {"pairing": "half", "base": 200}}
    assert spec_from_yaml(spec.to_yaml()) == spec
    for wrong, words in (
        ("[rope, ropee]", "got 'ropee'"),
        ("rope+", "got ''"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            spec_from_yaml(GRID.replace("[rope, alibi]", wrong))
        assert "encodings.both" in str(caught.value)


def test_the_command_line_accepts_several_encodings(toeplens: Toeplens, tmp_path: Path) -> None:
    options = ("--encoding", "rope+alibi", "--set", "model.encoding_options.rope.base=500")
    answer = toeplens("train", *TINY, *options, "--out", tmp_path, "--json").json()
    run = Run.open(answer["directory"])
    assert run.spec.model.encoding == "rope + alibi"
    assert run.spec.model.encoding_options == {"rope": {"base": 500}}
    spec = run.directory / "spec.json"
    assert toeplens("train", spec, "--out", tmp_path, "--json").json()["directory"] == answer["directory"]
    wrong = toeplens("card", "rope+fox", "--set", "base=3", "--out", tmp_path / "card.html").refusal()
    assert "must be one of fox, rope, got 'base'" in wrong
