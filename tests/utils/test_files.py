"""A file is whole or not there, whatever interrupts its writing; reading one ends in its content or in one sentence."""

from __future__ import annotations

import errno
import gzip
import json
import lzma
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import disk_full, failing_call, refusal_message

from toeplens.utils import (
    EnvironmentFailure,
    InputError,
    files,
    read_json,
    read_rows,
    repr_of,
    round_floats,
    to_json_types,
    write_bytes,
    write_json,
)
from toeplens.utils.files import FORMAT, decompress, environment_failure, make_directory, nan_to_none

OLD = b"what was finished before"


@pytest.fixture
def old_file(tmp_path: Path) -> Path:
    """A finished file, alone in its directory."""
    path = tmp_path / "result.json"
    path.write_bytes(OLD)
    return path


def is_only_file(path: Path) -> bool:
    """Whether ``path`` is all that its directory holds."""
    return list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt(), SystemExit(1)], ids=repr)
def test_old_content_survives_an_interrupted_write(
    old_file: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
):
    def fail(descriptor: int) -> None:
        assert os.fstat(descriptor).st_size == 3
        assert old_file.read_bytes() == OLD  # nor does a reader see half a file
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(error)):
        write_bytes(old_file, b"new")
    assert old_file.read_bytes() == OLD
    assert is_only_file(old_file)


@pytest.mark.parametrize(("place", "call"), [(os, "fsync"), (os, "replace"), (files, "open")])
def test_old_content_survives_a_full_disk_at_any_call(
    old_file: Path, monkeypatch: pytest.MonkeyPatch, place: Any, call: str
):
    monkeypatch.setattr(place, call, disk_full, raising=False)
    with pytest.raises(EnvironmentFailure, match="the disk is full"):
        write_bytes(old_file, b"new")
    assert old_file.read_bytes() == OLD
    assert is_only_file(old_file)


def test_content_reaches_the_disk_before_its_name_does(old_file: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, original=original: (calls.append(name), original(*a))[1])
    write_bytes(old_file, b"new")
    assert calls == ["fsync", "replace", "fsync"]  # the file, its name, the directory that holds the name


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_permissions_follow_the_umask(tmp_path: Path, mask: int, mode: int):
    before = os.umask(mask)
    try:
        write_bytes(tmp_path / "file", b"")
        left = os.umask(mask)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode
    assert left == mask


REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
    errno.EFBIG: "the file is larger than the system allows",
    errno.EIO: "the disk reported an input/output error",
    errno.EMFILE: "too many open files",
}


def test_a_refusal_is_one_sentence_that_names_the_file(old_file: Path, monkeypatch: pytest.MonkeyPatch):
    for code, reason in REASONS.items():
        monkeypatch.setattr(os, "fsync", failing_call(code))
        with pytest.raises(EnvironmentFailure, match=rf"^[Cc]annot write {old_file}: {reason}\. .*\.$"):
            write_bytes(old_file, b"new")
    assert "Cannot write x: odd" in str(environment_failure(OSError("Odd"), "x"))
    monkeypatch.setattr(os, "mkdir", failing_call(errno.EROFS))
    with pytest.raises(EnvironmentFailure, match="read-only"):
        make_directory(old_file.parent / "new")


def test_a_dangling_link_is_reported_as_one(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    for name in ("link", "round"):
        with pytest.raises(InputError, match=rf"^out must be a directory, but .*{name} is a broken link\.$"):
            make_directory(tmp_path / name)


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_in_the_way_of_a_directory_is_an_input_error(old_file: Path, below: str):
    assert make_directory(old_file.parent / "a" / "b").is_dir()
    with pytest.raises(InputError, match=r"^out must be a directory, but .* is a file or lies under one\.$"):
        make_directory(old_file / below)
    assert old_file.read_bytes() == OLD


numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(content=values)
def test_json_round_trips(tmp_path_factory: pytest.TempPathFactory, content: Any):
    path = tmp_path_factory.mktemp("json") / "content.json"
    write_json(path, content)
    assert read_json(path) == content


def test_values_outside_json_become_null(tmp_path: Path):
    assert nan_to_none([np.float64("nan"), np.float64("-inf"), 1e308, True]) == [None, None, 1e308, True]
    write_json(tmp_path / "a.json", {"loss": math.nan, "rows": [math.inf, (-math.inf, 1.5)], "n": 3})
    assert read_json(tmp_path / "a.json") == {"loss": None, "rows": [None, [None, 1.5]], "n": 3}
    assert "NaN" not in (tmp_path / "a.json").read_text()


def test_plain_content_equals_a_json_round_trip():
    assert to_json_types({"heads": (0, 1), "rows": [(2,)]}) == {"heads": [0, 1], "rows": [[2]]}
    for content in ({"base": [math.nan]}, {"heads": {1}}):
        assert "must be serializable as JSON" in refusal_message(lambda content=content: to_json_types(content))


@given(rows=st.lists(st.dictionaries(st.text(max_size=3), st.floats(-1, 1) | st.none() | st.lists(st.integers()))))
def test_a_long_list_is_written_with_one_item_per_line(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]):
    path = tmp_path_factory.mktemp("json") / "rows.json"
    write_json(path, {"zeal": [1, 2], "rows": rows, "about": {"n": math.nan}}, rows="rows")
    assert read_json(path) == {"zeal": [1, 2], "rows": rows, "about": {"n": None}}
    assert len(path.read_text().splitlines()) == 9 + max(1, len(rows))


@pytest.mark.parametrize("number", [-1234567.891, 1.5e-300, math.inf])
def test_numbers_are_rounded_to_significant_digits(number: float):
    [[actual], whole] = round_floats(([number], 1234567891))
    assert actual == pytest.approx(number, rel=5e-6)
    assert float(f"{actual:.6g}") == actual
    assert whole == 1234567891
    assert math.isnan(round_floats({"x": math.nan})["x"])


def damage(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as caught:
        read_json(path)
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
def test_invalid_json_is_refused_in_one_sentence(tmp_path: Path, content: Any, why: str):
    assert damage(tmp_path / "a.json", content).startswith(why)


def test_record_values_are_read_unchanged(tmp_path: Path):
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


def test_an_oversized_file_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "MAX_BYTES", 8)
    assert damage(tmp_path / "a.json", "[1, 2, 3]") == "it has more than 8 bytes."
    with pytest.raises(InputError, match="it has more than 8 bytes"):
        read_json("/dev/zero")


@pytest.mark.parametrize("packed", [gzip.compress, lzma.compress])
def test_compressed_content_is_unpacked_up_to_a_size_limit(packed: Callable[[bytes], bytes]):
    assert decompress(packed(b"a" * 10), 10) == b"a" * 10
    for content in (packed(b"a" * 11), packed(b"a" * 5000)[:-9], b"a"):
        with pytest.raises(ValueError, match=r"\w"):
            decompress(content, 10)


def test_an_error_names_the_damaged_line(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    assert read_rows(path) == []
    path.write_text('{"epoch": 1}\n{"epoch": 2}\n')
    assert read_rows(path) == [{"epoch": 1}, {"epoch": 2}]
    path.write_text('{"epoch": 1}\n{"epo')
    with pytest.raises(InputError, match=rf"^{path}, line 2, is damaged: it is not JSON"):
        read_rows(path)


def test_shown_values_are_short_and_printable():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert repr_of([1, "a"]) == "[1, 'a']"
    assert len(repr_of("a" * 10_000)) == 80
    assert repr_of(10**5000) == "a value of type int that is too large to show"
    assert repr_of(deep) == "a value of type list that is too large to show"
    for content in (deep, {"base": 10**5000, "to": float("inf")}):
        with pytest.raises(InputError, match="must be serializable as JSON"):
            to_json_types(content)


def test_a_later_format_is_refused_and_a_missing_one_means_the_oldest(tmp_path: Path):
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
