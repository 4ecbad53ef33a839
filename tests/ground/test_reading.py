"""Whatever stands in a file that should be a record, reading it ends in the record or in one sentence."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from toeplens.ground import (
    InputError,
    checked,
    files,
    plain,
    read_json,
    read_rows,
    shown,
    write_json,
)
from toeplens.ground.files import FORMAT, unzipped
from toeplens.ground.records import Count, Number, Positive, Share, Text, Truth


class Row(BaseModel):
    epoch: Count
    loss: Number | None


class Record(BaseModel):
    name: Text
    share: Share
    seconds: Positive = 0.0
    flat: Truth = False
    rows: list[Row] = []


def refusal(path: Path, content: str | bytes, kind: Any = None) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as caught:
        read_json(path) if kind is None else checked(kind, read_json(path), path)
    message = str(caught.value)
    assert message.startswith(f"{path} is damaged: ")
    assert "\n" not in message
    assert len(message) < len(str(path)) + 250
    return message.removeprefix(f"{path} is damaged: ")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[" * 100_000, "it is not JSON (maximum recursion depth exceeded"),
        ("1" * 5000, "it is not JSON (Exceeds the limit (4300 digits)"),
        ("[1, NaN]", "it is not JSON (a number is not finite: NaN)."),
        ("1e999", "it is not JSON (a number is not finite: 1e999)."),
        (b"\x80", "it is not JSON ('utf-8' codec can't decode"),
        ('{"a": ', "it is not JSON (Expecting value"),
    ],
    ids=range(6),
)
def test_what_is_no_json_is_one_sentence(tmp_path: Path, content: Any, why: str):
    assert refusal(tmp_path / "a.json", content).startswith(why)


def test_what_records_hold_is_read_as_it_is(tmp_path: Path):
    with pytest.raises(InputError, match=r"^file .*a\.json does not exist\.$"):
        read_json(tmp_path / "a.json")
    with pytest.raises(InputError, match="cannot be read: is a directory"):
        read_json(tmp_path)
    with pytest.raises(InputError, match="cannot be read: file name too long"):
        read_json("a" * 5000)
    content = {"seed": 2**64 - 1, "least": -(2**63), "rows": [[0.1, -1e308, None, True]], "name": "Zürich 😀"}
    for ascii_alone in (True, False):
        (tmp_path / "a.json").write_text(json.dumps(content, ensure_ascii=ascii_alone), encoding="utf-8")
        assert read_json(tmp_path / "a.json") == content


def test_a_file_that_is_too_large_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "LARGEST", 8)
    assert refusal(tmp_path / "a.json", "[1, 2, 3]") == "it has more than 8 bytes."
    with pytest.raises(InputError, match="it has more than 8 bytes"):
        read_json("/dev/zero")


@pytest.mark.parametrize("packed", [gzip.compress, lzma.compress])
def test_what_was_compressed_is_unpacked_up_to_a_size(packed: Callable[[bytes], bytes]):
    assert unzipped(packed(b"a" * 10), 10) == b"a" * 10
    for content in (packed(b"a" * 11), packed(b"a" * 5000)[:-9], b"a"):
        with pytest.raises(ValueError, match=r"\w"):
            unzipped(content, 10)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({}, "name is missing."),
        ([], "it must have named fields, got []."),
        ({"name": 3, "share": 0.5}, "name must be a valid string, got 3."),
        ({"name": "a", "share": 1.5}, "share must be less than or equal to 1, got 1.5."),
        ({"name": "a", "share": True}, "share must be a valid number, got True."),
        ({"name": "a", "share": 0.5, "seconds": -1}, "seconds must be greater than or equal to 0"),
        ({"name": "a", "share": 0.5, "rows": [{"epoch": 1}]}, "rows.0.loss is missing."),
        ({"name": "a", "share": [0] * 10_000}, "share must be a valid number, got [0, 0, 0,"),
        ({"name": "a", "share": 10**400}, "share must be a valid number, got 1000"),
    ],
    ids=range(9),
)
def test_a_field_that_a_record_cannot_have_is_named(tmp_path: Path, content: Any, why: str):
    assert refusal(tmp_path / "a.json", json.dumps(content), Record).startswith(why)


def test_a_record_is_read_whatever_else_a_later_version_wrote(tmp_path: Path):
    (tmp_path / "a.json").write_text('{"name": "a", "share": 1, "rows": [{"epoch": 1, "loss": 2}], "later": 1}')
    assert checked(Record, read_json(tmp_path / "a.json"), "a") == Record(
        name="a", share=1.0, rows=[Row(epoch=1, loss=2.0)]
    )
    assert checked(Record, {"name": "a", "share": 0}, "here").share == 0


def test_rows_are_read_line_by_line_and_the_damaged_line_is_named(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    assert read_rows(path) == []
    path.write_text('{"epoch": 1}\n{"epoch": 2}\n')
    assert read_rows(path) == [{"epoch": 1}, {"epoch": 2}]
    path.write_text('{"epoch": 1}\n{"epo')
    with pytest.raises(InputError, match=rf"^{path}, line 2, is damaged: it is not JSON"):
        read_rows(path)


def test_what_is_shown_is_short_and_can_be_shown():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert shown([1, "a"]) == "[1, 'a']"
    assert len(shown("a" * 10_000)) == 80
    assert shown(10**5000) == "a value of type int that is too large to show"
    assert shown(deep) == "a value of type list that is too large to show"
    for content in (deep, {"base": 10**5000, "to": float("inf")}):
        with pytest.raises(InputError, match="must be serializable as JSON"):
            plain(content)


def test_a_later_format_is_refused_and_what_has_none_is_older(tmp_path: Path):
    path = tmp_path / "record.json"
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1, "format": FORMAT}
    assert read_json(path) == {"a": 1}
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}
    for number, why in (
        (FORMAT + 1, f"format {FORMAT + 1} of a later version"),
        (-1, "format must be .*, got -1"),
        ("1", "format must be .*, got '1'"),
    ):
        path.write_text(json.dumps({"a": 1, "format": number}))
        with pytest.raises(InputError, match=f"^{path} .*{why}"):
            read_json(path)
