"""The retrieval score of an audit's heads: needles in the text that is audited."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toeplens.ground import InputError
from toeplens.sources.huggingface.loading import Loaded
from toeplens.studies.auditing.inputs import texts_of
from toeplens.studies.auditing.kept import Kept
from toeplens.studies.auditing.record import HeadRecord, Measured
from toeplens.studies.kit.questions import Item, Writer
from toeplens.studies.kit.retrieving import Place, retrieval_of

_NEEDLES = "needles"


def needles_of(tokenizer: Any, data: Any, count: int, length: int, seed: int) -> list[Item]:
    """So many texts of this length with a needle in them, from their beginning to their end.

    Raises `InputError` for data that are no text.
    """
    if not count:
        return []
    texts = texts_of(data)
    if texts is None:
        raise InputError(f"needles: {count} were given without a text to put them in; a text is needed.")
    writer = Writer(tokenizer, "\n\n".join(texts.values()), seed)
    return [writer.needle(length, number / max(1, count - 1), field="max_tokens") for number in range(count)]


def scores_of(
    loaded: Loaded, needles: Sequence[Item], kept: Kept, report: Callable[[int, int], None]
) -> dict[Place, float]:
    """The retrieval score of each head, of none without needles; what is kept is not measured again."""
    if not needles:
        return {}
    found = kept.get(_NEEDLES)
    if found is None:
        found = [[one.layer, one.head, one.score] for one in retrieval_of(loaded, needles, report)]
        kept.put(_NEEDLES, found)
    return {(layer, head): score for layer, head, score in found}


def with_retrieval(measured: Sequence[Measured], scores: Mapping[Place, float]) -> list[Measured]:
    """The measured calls with their heads' retrieval scores."""

    def scored(head: HeadRecord) -> HeadRecord:
        return replace(head, retrieval=scores.get((head.layer, head.head)) if head.kind == "self" else None)

    return [replace(call, heads=tuple(map(scored, call.heads))) if scores else call for call in measured]
