"""The pieces of the study: audits of texts, of what stands for nothing learned, of changes; and probes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from toeplens.ground import InputError, read_json, write_json
from toeplens.papers.positional_symbolic.pretrained.changes import changes_of
from toeplens.papers.positional_symbolic.pretrained.plan import AUDITED, Plan
from toeplens.sources.huggingface.hosts.host import install_same
from toeplens.sources.huggingface.loading import Loaded
from toeplens.studies.auditing import audit
from toeplens.studies.auditing.record import AuditRecord, Method
from toeplens.studies.kit.questions import Writer
from toeplens.studies.probing import ProbeRecord, Probing

PIECES = "pieces"
METHODS: dict[str, Method] = {"silenced": "exact", "position": "position", "bands": "bands"}
Report = Callable[[str, int, int], None]


def path_of(directory: Path, name: str) -> Path:
    """Where a piece lies."""
    return directory / PIECES / f"{name}.json"


@dataclass(frozen=True)
class Making:
    """Makes the pieces of one study, in their order.

    loaded  the model
    report  is told how much of a piece is done
    """

    loaded: Loaded
    plan: Plan
    directory: Path
    report: Report

    def check(self) -> None:
        """Refuse texts, lengths and tokenizers that pieces could not be made of, before any is made."""
        assert self.windows.size
        if self.plan.predicts:
            assert self.probing.items

    def make(self, name: str, kind: str) -> None:
        """Make a piece and write it down."""
        record = self._audit(name) if kind == AUDITED else self._probe(name)
        write_json(path_of(self.directory, name), record.to_dict())

    @cached_property
    def tokenizer(self) -> Any:
        """The model's."""
        return self.loaded.tokenizer()

    @cached_property
    def windows(self) -> Int[np.ndarray, "T N"]:
        """The sequences, in the order of the plan's places: of each text, pieces that share no token."""
        found = []
        for at, (name, text) in enumerate(self.plan.texts.items()):
            writer = Writer(self.tokenizer, text, self.plan.seed + at)
            count = self.plan.sequences * self.plan.together
            length = self.plan.tokens - len(writer.start)
            room = len(writer.text) - count * length
            if room < 0:
                raise InputError(
                    f"text: {name} has {len(writer.text)} tokens; {count} sequences of {length} are needed."
                )
            gaps = np.sort(writer.random.integers(0, room + 1, count))
            for number, gap in enumerate(gaps.tolist()):
                first = gap + number * length
                found.append([*writer.start, *writer.text[first : first + length].tolist()])
        return np.array(found)

    @cached_property
    def probing(self) -> Probing:
        """The questions, of all texts together."""
        text = "\n\n".join(self.plan.texts.values())
        seed = self.plan.seed
        return Probing.of(self.loaded, text, self.plan.asked, tokenizer=self.tokenizer, seed=seed, report=self.report)

    def _audit(self, name: str) -> AuditRecord:
        if name in METHODS:
            short = self.windows[:, : self.plan.effect_tokens]
            return self._audited(self.loaded, short, METHODS[name], name)
        kind, _, number = name.partition("-")
        count, loaded = self.plan.together, self.loaded
        tokens = self.windows[int(number) * count :][:count]
        if kind == "shuffled":
            random = np.random.Generator(np.random.Philox(key=[self.plan.seed, int(number)]))
            first = len(Writer(self.tokenizer, "so", 0).start)
            tokens = np.concatenate((tokens[:, :first], random.permuted(tokens[:, first:], axis=1)), axis=1)
        if kind == "random":
            loaded = _untrained(self.loaded, self.plan.seed + int(number))
        return self._audited(loaded, tokens, "none", name)

    def _audited(self, loaded: Loaded, tokens: Int[np.ndarray, "T N"], effects: Any, name: str) -> AuditRecord:
        return audit(
            loaded,
            tokens,
            tokenizer=self.tokenizer,
            sequences=len(tokens),
            effects=effects,
            seed=self.plan.seed,
            keep=self.directory / PIECES / f"{name}.parts" if effects != "none" else None,
            on_progress=lambda what, done, total: self.report(f"{name}, {what}", done, total),
        )

    def _probe(self, name: str) -> ProbeRecord:
        if name == "intact":
            return self.probing.record(heads=True)
        return self.probing.record(changes_of(name, self.plan, *self._seen))

    @cached_property
    def _seen(self) -> tuple[list[AuditRecord], ProbeRecord]:
        """What heads are chosen by: the audits of the texts and the intact probe, which are made before they are."""
        count = len(self.plan.places)
        audits = [read(self.directory, f"text-{number}", AuditRecord) for number in range(count)]
        return audits, read(self.directory, "intact", ProbeRecord)


def read(directory: Path, name: str, kind: Any) -> Any:
    """A piece that is there, as the record that it is."""
    path = path_of(directory, name)
    return kind.from_dict(read_json(path), path)


def _untrained(loaded: Loaded, seed: int) -> Loaded:
    """The same architecture with the random weights that its training begins with."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(loaded.model.dtype)  # of the weights: tables of frequencies are in float32 whatever it is
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = type(loaded.model)(copy.deepcopy(loaded.model.config)).eval()
            install_same(made, loaded.model)
    finally:
        torch.set_default_dtype(before)
    return Loaded(made.to(loaded.model.device))
