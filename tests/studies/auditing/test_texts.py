"""Several texts: sequences shared out among them, each of a text that is named, and intervals over texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats
from tests.sources.huggingface.models import GROUPED, tiny
from tests.studies.probing.models import WORDS, tokenizer

from toeplens.cli.audit_output import audit_notes
from toeplens.ground import InputError
from toeplens.studies.auditing import Audit, audit
from toeplens.studies.auditing.effects import over_texts, way_of
from toeplens.studies.auditing.inputs import from_texts, inputs_of, shared


def text(seed: int, words: int = 200) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


OPTIONS: dict[str, Any] = {"tokenizer": tokenizer(), "sequences": 4, "max_tokens": 16}
TEXTS = {"novel": text(1), "code": text(2)}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("LlamaForCausalLM", **GROUPED | {"vocab_size": 700, "max_position_embeddings": 128})


@pytest.fixture(scope="module")
def found(model: Any) -> Audit:
    return audit(model, TEXTS, **OPTIONS)


def test_sequences_are_shared_out_as_evenly_as_there_is_room() -> None:
    assert shared({"a": 99, "b": 99}, 16) == {"a": 8, "b": 8}
    assert shared({"a": 99, "b": 99}, 5) == {"a": 3, "b": 2}
    assert shared({"a": 99, "b": 2, "c": 5}, 16) == {"a": 9, "b": 2, "c": 5}
    assert shared({"a": 1, "b": 2}, 16) == {"a": 1, "b": 2}


@pytest.mark.parametrize("start", [2**70, "a"])
def test_a_decoder_begins_with_a_token(start: Any) -> None:
    config = SimpleNamespace(is_encoder_decoder=True, decoder_start_token_id=start)
    with pytest.raises(InputError, match=r"^model: decoder_start_token_id must be a token of its"):
        inputs_of(SimpleNamespace(config=config, device="cpu"), from_texts(tokenizer(), TEXTS, 2, 8))


def test_each_sequence_is_the_beginning_of_its_text() -> None:
    made = from_texts(tokenizer(), TEXTS, 5, 16)
    assert made.texts == ("novel", "novel", "novel", "code", "code")
    assert made.origin == "3 from novel and 2 from code"
    for name, content in TEXTS.items():
        own = made.tokens[[number for number, each in enumerate(made.texts) if each == name]]
        ids = tokenizer()(content, add_special_tokens=False)["input_ids"]
        assert own[:, 1:].flatten().tolist() == ids[: own[:, 1:].numel()]  # after <s>


def test_a_beginning_that_the_tokenizer_does_not_add_is_said(model: Any) -> None:
    from tokenizers import processors

    def audited_with(tokens: Any) -> Audit:
        return audit(model, text(1), tokenizer=tokens, effects="none")

    bare, none = tokenizer(), tokenizer()
    bare.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A")
    none.backend_tokenizer.post_processor, none.bos_token = bare.backend_tokenizer.post_processor, None
    made = audited_with(bare)
    assert made.about["unused_bos"] == "<s>"
    assert "text: the tokenizer has a beginning-of-text token, <s>, but does not add it to sequences" in list(
        audit_notes(made)
    )
    for other in (tokenizer(), none):  # one that adds it, and one that has none
        assert "unused_bos" not in audited_with(other).about


def test_an_audit_of_several_texts_is_that_of_their_sequences(model: Any, found: Audit) -> None:
    """With the second text in it: the mean of those of each, and Student's interval over their two means."""
    each = [audit(model, content, **OPTIONS | {"sequences": 2}) for content in TEXTS.values()]
    assert all("texts" not in one.about for one in each)
    for at, head in enumerate(found.heads):
        means = np.array([one.heads[at].effect for one in each], dtype=float)
        assert head.effect == pytest.approx(means.mean(), abs=1e-5)
        reach = stats.t.ppf(0.975, 1) * means.std(ddof=1) / np.sqrt(2)
        ends = [means.mean() - reach, means.mean() + reach]
        assert [head.effect_low, head.effect_high] == pytest.approx(ends, abs=1e-4)


def test_texts_of_many_sequences_weigh_as_much_as_they_are() -> None:
    """The mean is that over sequences, and the parts' spread that of the linearised mean, by hand."""
    parts, texts = np.random.default_rng(0).normal(size=(7, 2, 3)), ("a", "a", "a", "a", "b", "c", "c")
    own, each = over_texts(parts, texts), parts.mean(1)
    np.testing.assert_allclose(own.mean((0, 1)), parts.mean((0, 1)), atol=1e-12)
    wanted = [each.mean(0) + 3 / 7 * (rows - each.mean(0)).sum(0) for rows in (each[:4], each[4:5], each[5:])]
    np.testing.assert_allclose(own[:, 0], wanted, atol=1e-12)
    assert over_texts(parts, ()) is parts
    assert way_of(parts, 16, texts) == "over 3 texts"
    assert way_of(parts, 16) == "over blocks of about 8 tokens within the sequences"


def test_what_cannot_be_done_with_several_texts(model: Any) -> None:
    with pytest.raises(InputError, match=r"^first must not be set for several texts, got 3"):
        audit(model, TEXTS, first=3, **OPTIONS)
    with pytest.raises(InputError, match="max_tokens must be larger than the 1 tokens"):
        from_texts(tokenizer(), TEXTS, 4, 1)
    with pytest.raises(InputError, match=r"^text: text 2 has fewer than 2 tokens"):
        audit(model, ["sea sun moon", ""], tokenizer=tokenizer(), max_tokens=16)
