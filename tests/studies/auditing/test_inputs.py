"""Sequences of different lengths are audited as each alone, and of several texts as they are shared out."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.backends.hf.models import GPT, GROUPED, SIZES, T5, calls_in, tiny
from tests.studies.probing.models import WORDS, tokenizer
from torch import Tensor

from toeplens.cli.audit_output import audit_notes
from toeplens.lens import behaviour, frequency_use
from toeplens.studies.auditing import Audit, audit, inputs, read_tokens
from toeplens.studies.auditing.effects import describe_intervals, merge_texts
from toeplens.studies.auditing.inputs import from_texts
from toeplens.utils import InputError

LENGTHS = (12, 19, 26)
IDS = [torch.randint(4, 31, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 5}),
    "GPT2": ("GPT2LMHeadModel", GPT),
    "BERT": ("BertModel", SIZES),
    "Bloom": ("BloomForCausalLM", {"vocab_size": 31, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "T5": ("T5ForConditionalGeneration", T5),
}
ROTARY = ("Llama", "Mistral")
# means over queries, and whether one query of a sequence has no such key
QUERIES = {"previous": True, "first": True, "next": True, "current": False, "distance": False, "entropy": False}


@cache
def model_of(kind: str) -> Any:
    name, sizes = KINDS[kind]
    return tiny(name, **sizes)


@cache
def audit_of_batch(kind: str) -> Audit:
    return audit(model_of(kind), IDS)


@cache
def audits_of_single_sequences(kind: str) -> list[Audit]:
    return [audit(model_of(kind), ids[None]) for ids in IDS]


def inputs_of(kind: str, ids: Tensor) -> dict[str, Tensor]:
    if kind != "T5":
        return {"input_ids": ids[None]}
    return {"input_ids": ids[None], "decoder_input_ids": torch.cat((torch.zeros(1, dtype=torch.long), ids[:-1]))[None]}


@pytest.mark.parametrize("kind", KINDS)
def test_patterns_are_means_over_the_queries_of_all_sequences(kind: str) -> None:
    for at, head in enumerate(audit_of_batch(kind).heads):
        heads = [actual.heads[at] for actual in audits_of_single_sequences(kind)]
        one_sees_itself = head.side == "decoder" and head.kind == "self"  # the first, whose entropy is not taken
        for name, less in QUERIES.items():
            less = one_sees_itself if name == "entropy" else less and head.kind == "self"
            values = [getattr(one, name) for one in heads]
            if None in values:
                assert getattr(head, name) is None, name
            else:
                expected = np.average(values, weights=[n - less for n in LENGTHS])
                assert getattr(head, name) == pytest.approx(expected, abs=1e-5), name
        bins = [np.pad(one.profile, (0, len(head.profile) - len(one.profile))) for one in heads]
        assert head.profile == pytest.approx(np.average(bins, axis=0, weights=LENGTHS).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "effects"),
    [("Mistral", "exact"), ("BERT", "exact"), ("T5", "exact"), ("Llama", "position"), ("Llama", "bands")],
)
def test_effects_are_means_over_the_sequences(kind: str, effects: Any) -> None:
    actual, each = audit_of_batch(kind), audits_of_single_sequences(kind)
    if effects != "exact":
        actual, *each = (audit(model_of(kind), data, effects=effects) for data in (IDS, *(ids[None] for ids in IDS)))
    assert actual.effect == ("states" if kind == "BERT" else "loss")
    rows = [one.bands if effects == "bands" else one.heads for one in (actual, *each)]
    for whole, *parts in zip(*rows, strict=True):
        assert whole.effect == pytest.approx(np.mean([part.effect for part in parts]), abs=1e-5)
    if kind != "BERT":
        assert actual.baseline == pytest.approx(np.mean([one.baseline for one in each]), abs=1e-5)


@pytest.mark.parametrize("kind", ROTARY)
def test_shares_pool_the_variances_of_all_sequences(kind: str) -> None:
    """Of each sequence alone, weighed by its queries and their variance; means of norms by its visible pairs."""
    pairs = [sum(min(i + 1, 5) if kind == "Mistral" else i + 1 for i in range(n)) for n in LENGTHS]
    calls = [calls_in(model_of(kind), inputs_of(kind, ids)) for ids in IDS]
    for layer in range(2):
        placed = [each[layer].behaviour_arguments() for each in calls]
        shares = [behaviour(**one) for one in placed]
        weights = np.stack([one.variance * one.queries for one in shares])
        norms = torch.stack([frequency_use(**one).norms for one in placed])
        use = (norms * torch.tensor(pairs).view(-1, 1, 1)).sum(0)
        for head in audit_of_batch(kind).heads_of(audit_of_batch(kind).layers[layer]):
            for name in ("positional", "symbolic", "interaction"):
                values = [getattr(one, name)[head.head] for one in shares]
                assert getattr(head, name) == pytest.approx(np.average(values, weights=weights[:, head.head]), abs=1e-5)
            assert head.norm_use == pytest.approx((use / use.sum(-1, keepdim=True))[head.head].tolist(), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_available_for_batches_as_for_single_sequences(kind: str) -> None:
    actual = audit_of_batch(kind)
    assert [one.unknown is None for one in actual.layers] == [
        one.unknown is None for one in audits_of_single_sequences(kind)[0].layers
    ]
    for one, other in zip(actual.layers, audits_of_single_sequences(kind)[0].layers, strict=True):
        assert one.position.removesuffix(", with a mask on keys") == other.position
    assert [one.window for one in actual.layers] == [5 if kind == "Mistral" else None] * len(actual.layers)
    said = [one.unknown for one in actual.layers]
    if kind in ("GPT2", "BERT"):
        assert all("at least 8 sequences of one length are needed" in (each or "") for each in said)


def test_lists_arrays_tensors_and_files_are_equivalent(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps([ids.tolist() for ids in IDS]))
    kinds = [[ids.tolist() for ids in IDS], [ids.numpy() for ids in IDS], read_tokens(tmp_path / "ids.json")]
    for data in kinds:
        assert audit(model_of("Llama"), data).heads == audit_of_batch("Llama").heads
    cut = audit(model_of("Llama"), IDS, max_tokens=12, effects="none")
    assert "lengths" not in cut.about
    assert cut.about["tokens"] == 12


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("tensors", ["pt", None])
def test_the_output_of_a_tokenizer_is_token_ids(side: str, tensors: str | None) -> None:
    encode, texts = tokenizer(), ["apple dog river sea sun apple dog", "sea sun moon"]
    encode.padding_side, encode.pad_token = side, "<s>"
    model = tiny("LlamaForCausalLM", **GROUPED | {"vocab_size": 700})
    encoded = encode(texts, padding=True, return_tensors=tensors, return_token_type_ids=True)
    actual, expected = (audit(model, data) for data in (encoded, encode(texts)["input_ids"]))
    assert actual.heads == expected.heads
    assert actual.about["lengths"] == [8, 5]
    assert audit(model, encode(texts[1]), effects="none").about["tokens"] == 5


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"token_type_ids": [[0, 0, 1]]}, "^tokens must have no inputs besides .*, got token_type_ids"),
        ({"pixel_values": torch.zeros(1, 2, 2)}, "^tokens must have no inputs besides .*, got pixel_values"),
        ({"attention_mask": [[1, 0, 1]]}, "^attention_mask must be 1 at the tokens"),
        ({"attention_mask": [[1, 1, 1], [1, 1, 1]]}, "^attention_mask must be 1 at the tokens"),
        ({"attention_mask": torch.zeros(1, 3)}, "^attention_mask must be 1 at the tokens"),
    ],
)
def test_other_output_of_a_tokenizer_is_refused(data: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        audit(model_of("Llama"), {"input_ids": [[3, 4, 5]]} | data)


def test_a_shorter_text_is_read_at_its_own_length() -> None:
    model, long, short = tiny("LlamaForCausalLM", **GROUPED | {"vocab_size": 700}), "apple dog river " * 30, "sea sun"
    texts = {"long": long, "short": short}
    actual = audit(model, texts, tokenizer=tokenizer(), max_tokens=20, sequences=3, effects="none")
    assert actual.about["lengths"] == [20, 20, len(tokenizer()(short)["input_ids"])]
    assert actual.about["texts"] == ["long", "long", "short"]


def test_padding_that_changes_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without a mask for it, and one that goes by the tokens after a sequence."""
    model = tiny("BertModel", **SIZES)
    forward = type(model).forward
    monkeypatch.setattr(model, "forward", lambda input_ids: forward(model, input_ids))
    with pytest.raises(InputError, match=r"^tokens must be sequences of one length: BertModel takes no attention_mask"):
        audit(model, IDS)
    monkeypatch.setattr(model, "forward", lambda input_ids, attention_mask=None: forward(model, input_ids))
    with pytest.raises(InputError, match=r"padding changes the outputs of BertModel"):
        audit(model, IDS)


def test_a_sequence_of_one_token_is_refused() -> None:
    with pytest.raises(InputError, match=r"tokens must have at least 2 per sequence, got 1 in sequence 2\."):
        audit(model_of("GPT2"), [[3, 4], [5]])


def text(seed: int, words: int = 200) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


OPTIONS: dict[str, Any] = {"tokenizer": tokenizer(), "sequences": 4, "max_tokens": 16}
TEXTS = {"novel": text(1), "code": text(2)}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("LlamaForCausalLM", **GROUPED | {"vocab_size": 700, "max_position_embeddings": 128})


@pytest.fixture(scope="module")
def texts_audit(model: Any) -> Audit:
    return audit(model, TEXTS, **OPTIONS)


@pytest.mark.parametrize("start", [2**70, "a"])
def test_a_decoder_input_begins_with_its_start_token(start: Any) -> None:
    config = SimpleNamespace(is_encoder_decoder=True, decoder_start_token_id=start)
    with pytest.raises(InputError, match=r"^model: decoder_start_token_id must be a token of its"):
        inputs.inputs_of(
            SimpleNamespace(config=config, device=torch.device("cpu")), from_texts(tokenizer(), TEXTS, 2, 8)
        )


def test_each_sequence_is_a_prefix_of_its_text() -> None:
    sequences = from_texts(tokenizer(), TEXTS, 5, 16)
    assert sequences.texts == ("novel", "novel", "novel", "code", "code")
    assert sequences.origin == "3 from novel and 2 from code"
    for name, content in TEXTS.items():
        rows = sequences.tokens[[number for number, each in enumerate(sequences.texts) if each == name]]
        ids = tokenizer()(content, add_special_tokens=False)["input_ids"]
        assert rows[:, 1:].flatten().tolist() == ids[: rows[:, 1:].numel()]  # after <s>


def test_a_missing_bos_token_is_reported(model: Any) -> None:
    from tokenizers import processors

    def audited_with(tokens: Any) -> Audit:
        return audit(model, text(1), tokenizer=tokens, effects="none")

    bare, none = tokenizer(), tokenizer()
    bare.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A")
    none.backend_tokenizer.post_processor, none.bos_token = bare.backend_tokenizer.post_processor, None
    audited = audited_with(bare)
    assert audited.about["unused_bos"] == "<s>"
    assert "text: the tokenizer has a beginning-of-text token, <s>, but does not add it to sequences" in list(
        audit_notes(audited)
    )
    for other in (tokenizer(), none):  # one that adds it, and one that has none
        assert "unused_bos" not in audited_with(other).about


def python_tokenizer(pattern: str) -> Any:
    """Letters as tokens, in Python, which returns only the first piece of a long text."""
    from transformers import PreTrainedTokenizer

    class Letters(PreTrainedTokenizer):
        vocab = ["<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]  # noqa: RUF012

        def get_vocab(self) -> dict[str, int]:
            return {word: number for number, word in enumerate(self.vocab)}

        def _tokenize(self, text: str, **_: Any) -> list[str]:
            return [letter for letter in text if letter != " "]

        def _convert_token_to_id(self, token: str) -> int:
            return self.vocab.index(token)

        def _convert_id_to_token(self, index: int) -> str:
            return self.vocab[index]

    return Letters(bos_token="<s>", eos_token="</s>", special_tokens_pattern=pattern)


def fast_tokenizer(kind: str) -> Any:
    """With a post-processor that adds the token alone or after another step, or as an option of the tokenizer."""
    from tokenizers import processors

    made = tokenizer()
    template = made.backend_tokenizer.post_processor
    steps = {
        "template": template,
        "sequence": processors.Sequence([processors.ByteLevel(trim_offsets=False), template]),
        "both ends": processors.TemplateProcessing(single="<s> $A <s>", special_tokens=[("<s>", 0)]),
    }
    made.backend_tokenizer.post_processor = steps.get(kind, processors.ByteLevel(trim_offsets=False))
    if kind == "option":
        made.add_bos_token = True
    return made


KINDS_OF_TOKENIZERS: dict[str, tuple[Callable[[], Any], bool, int]] = {  # whether it adds the token, special tokens
    **{kind: (partial(fast_tokenizer, kind), True, 1) for kind in ("template", "sequence", "option")},
    "both ends": (partial(fast_tokenizer, "both ends"), True, 2),
    "none": (partial(fast_tokenizer, "none"), False, 0),
    "python": (partial(python_tokenizer, "bos"), True, 1),
    "python, both ends": (partial(python_tokenizer, "bos_eos"), True, 2),
    "python, end": (partial(python_tokenizer, "eos"), False, 1),
    "python, none": (partial(python_tokenizer, "none"), False, 0),
}


@pytest.mark.parametrize("kind", KINDS_OF_TOKENIZERS)
def test_every_sequence_has_the_special_tokens(kind: str) -> None:
    """As many sequences as asked for, of all its kinds; between special tokens the text's own, in order."""
    make, adds, special = KINDS_OF_TOKENIZERS[kind]
    tokens, content = make(), text(3)
    found = from_texts(tokens, {"novel": content}, 5, 16)
    assert found.tokens.shape == (5, 16)
    assert (found.tokens[:, 0] == tokens.bos_token_id).tolist() == [adds] * 5
    first, last = int(adds), 16 - special + int(adds)
    own = tokens(content, add_special_tokens=False)["input_ids"]
    assert found.tokens[:, first:last].flatten().tolist() == own[: 5 * (16 - special)]
    assert found.tokens[:, last:].tolist() == [tokens("")["input_ids"][first:]] * 5
    assert found.unused_bos == (None if adds else "<s>")


def test_a_token_in_the_text_is_not_one_that_is_added() -> None:
    """Documents that are joined by it, as by GPT-2's <|endoftext|>."""
    found = from_texts(fast_tokenizer("none"), {"novel": "sea<s>sun " * 20}, 2, 16)
    assert bool((found.tokens == 0).any())
    assert found.unused_bos == "<s>"


def test_short_texts_keep_their_special_tokens() -> None:
    found = from_texts(python_tokenizer("bos"), {"long": "abcdef" * 9, "short": "xyz"}, 3, 16)
    assert found.lengths == (16, 16, 4)
    assert found.tokens[:, 0].tolist() == [0, 0, 0]
    for empty in ("", " "):
        with pytest.raises(InputError, match="text"):
            from_texts(python_tokenizer("bos_eos"), {"novel": empty}, 3, 16)


def test_an_audit_of_several_texts_covers_all_their_sequences(model: Any, texts_audit: Audit) -> None:
    """With the second text in it: the mean of those of each, and Student's interval over their two means."""
    single_audits = [audit(model, content, **OPTIONS | {"sequences": 2}) for content in TEXTS.values()]
    assert all("texts" not in one.about for one in single_audits)
    for at, head in enumerate(texts_audit.heads):
        means = np.array([one.heads[at].effect for one in single_audits], dtype=float)
        assert head.effect == pytest.approx(means.mean(), abs=1e-5)
        reach = stats.t.ppf(0.975, 1) * means.std(ddof=1) / np.sqrt(2)
        ends = [means.mean() - reach, means.mean() + reach]
        assert [head.effect_low, head.effect_high] == pytest.approx(ends, abs=1e-4)


def test_texts_are_weighted_by_their_sequences() -> None:
    """The mean is that over sequences, and the parts' spread that of the linearised mean, by hand."""
    parts, texts = np.random.default_rng(0).normal(size=(7, 2, 3)), ("a", "a", "a", "a", "b", "c", "c")
    interval, each = merge_texts(parts, texts), parts.mean(1)
    np.testing.assert_allclose(interval.mean((0, 1)), parts.mean((0, 1)), atol=1e-12)
    expected = [each.mean(0) + 3 / 7 * (rows - each.mean(0)).sum(0) for rows in (each[:4], each[4:5], each[5:])]
    np.testing.assert_allclose(interval[:, 0], expected, atol=1e-12)
    assert merge_texts(parts, ()) is parts
    assert describe_intervals(parts, 16, texts) == "over 3 texts"
    assert describe_intervals(parts, 16) == "over blocks of about 8 tokens within the sequences"


def test_options_that_do_not_work_with_several_texts_are_refused(model: Any) -> None:
    with pytest.raises(InputError, match=r"^first must not be set for several texts, got 3"):
        audit(model, TEXTS, first=3, **OPTIONS)
    with pytest.raises(InputError, match="max_tokens must be larger than the 1 tokens"):
        from_texts(tokenizer(), TEXTS, 4, 1)
    with pytest.raises(InputError, match=r"^text: text 2 has fewer than 2 tokens"):
        audit(model, ["sea sun moon", ""], tokenizer=tokenizer(), max_tokens=16)
