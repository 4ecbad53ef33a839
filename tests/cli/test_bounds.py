"""Numbers out of range, and work that cannot end or fit: one sentence, at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.command import TINY, Toeplens, changes, files

from toeplens.training import Run

HUGE = "9" * 23
REFUSED: dict[str, tuple[list[str], str]] = {
    **{
        f"{field}-{len(value)}": (["train", *TINY, *changes(**{field: value})], says)
        for field, value, says in (
            ("train_examples", "100000000000", "train_examples: "),
            ("train_examples", "1000000000", "its model and its examples need at least"),
            ("ignore_label", HUGE, "ignore_label: "),
            ("batch_size", HUGE, "batch_size: "),
            ("seed", HUGE, "seed: "),
            ("model__d_model", "1000000000", "a model of these sizes needs at least"),
            ("model__vocab_size", "99999999999", "model.vocab_size: "),
            ("model__num_classes", "99999999999999", "model.num_classes: "),
            ("model__d_ff", "100000000", "a model of these sizes needs at least"),
            ("model__num_layers", "100000", "model.num_layers: "),
            ("model__max_len", "1000000000", "a model of these sizes needs at least"),
            ("epochs", "9" * 5000, "set: epochs="),
            ("epochs", "[" * 5000, "set: epochs="),
            ("epochs", "9" * 400, "set: epochs="),
            ("lr", "9" * 400, "set: lr="),
            ("model__encoding_options__base", "9" * 300, "base"),
            ("task_options__length", "9" * 300, "max_len: 12 was given"),
            ("task_options__cut", "9" * 301, "set: task_options.cut="),
            ("task_options__length", "9999999999", "max_len: 12 was given"),
        )
    },
    "seed": (["train", *TINY, "--seed", "18446744073709551616"], "seed: "),
    "reproduce-seeds": (["reproduce", "--seeds", "99999999"], "seeds: 99999999 was given; it must be from 1 to 100"),
    "theory-seeds": (["theory", "--seeds", "99999999"], "seeds: 99999999 was given; it must be from 1 to 100"),
    "study-seeds": (["study", "canonical", "--seeds", "99999999"], "seeds: "),
    "workers": (["reproduce", "--scale", "smoke", "--workers", "100000"], "workers: 100000 was given"),
    "card-length": (["card", "rope", "--length", "9999999999999"], "length: 9999999999999 was given"),
    "card-million": (["card", "rope", "--length", "1000000"], "length: 1000000 was given"),
    "card-d_model": (["card", "rope", "--set", "d_model=3"], "option of encoding 'rope': there is no 'd_model'"),
    "card-name": (["card", "rope", "--set", "name=3"], "option of encoding 'rope': there is no 'name'"),
    "card-digits": (["card", "rope", "--set", f"base={'9' * 300}"], "base"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_out_of_range_is_one_sentence(toeplens: Toeplens, tmp_path: Path, case: str):
    arguments, says = REFUSED[case]
    assert says in toeplens(*arguments, "--out", tmp_path / "out").refusal()
    assert files(tmp_path) == {}


def test_texts_without_end_are_refused(toeplens: Toeplens, run: Run):
    for option, value in (("--examples", 99999999999), ("--length", 10**30), ("--length", 10**6)):
        refusal = toeplens("extrapolate", run.directory, option, value).refusal()
        assert f"{value} was given; it must be from 1 to" in refusal


def test_the_work_is_said_when_it_begins(toeplens: Toeplens, tmp_path: Path):
    (line,) = toeplens("train", *TINY, "--out", tmp_path, "--json").err.splitlines()
    assert line.endswith(": 768 tokens to train on, at least 1 MB of memory")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), None])
def test_memory_that_is_used_up_is_the_machines_failure(
    toeplens: Toeplens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
):
    def used_up(*_: object, **__: object) -> None:
        raise error or RuntimeError("a mistake of ours")

    monkeypatch.setattr("toeplens.training.train", used_up)
    if error is None:
        with pytest.raises(RuntimeError, match="of ours"):
            toeplens("train", *TINY, "--out", tmp_path)
    else:
        assert "memory is used up" in toeplens("train", *TINY, "--out", tmp_path).refusal(3)
