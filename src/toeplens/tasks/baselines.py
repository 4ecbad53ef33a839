"""Baselines without a model: predictions from the length, from one token, or from the bag of tokens."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from toeplens.ground import InputError
from toeplens.tasks.base import PAD, Each, Examples, Texts

_CHUNK = 4096


def trivial_baselines(train: Examples, test: Examples) -> dict[str, float]:
    """Test accuracy of simple rules fitted on ``train``, which a model must exceed to have learned the task.

    A rule reads one fact of the sequence and predicts the most frequent label in ``train`` for that fact,
    or, if the fact does not occur there, the most frequent label overall:
        constant        no fact
        length          number of tokens before the padding
        first           the first token
        last            the last token, which is the query if there is one
        last but one    the token before it; none in a sequence of one token
        most frequent   the most frequent token of the sequence (on ties, the lowest id)
    and one rule reads all tokens, without their order:
        bag             naive Bayes on the counts of all tokens, with add-one smoothing

    For per-token labels, a rule reads only what a token can see, and there are fewer:
        constant        no fact
        last            the token itself
        last but one    the previous token; none for the first token

    The two sets may have different sequence lengths. Raises `InputError` for an empty set.
    """
    for field, examples in (("train", train), ("test", test)):
        if not len(examples):
            raise InputError(f"{field} must have at least one example, got none.")
    if train.labels.ndim == 2:
        facts = [_facts_of_tokens(examples.tokens) for examples in (train, test)]
        labels, asked = train.labels.ravel(), test.labels.ravel()
        return {rule: float(np.mean(_by_fact(facts[0][rule], labels, facts[1][rule]) == asked)) for rule in facts[0]}
    vocab_size = 1 + int(max(train.tokens.max(), test.tokens.max()))
    facts = [_facts(examples, vocab_size) for examples in (train, test)]
    hits = {rule: _by_fact(facts[0][rule], train.labels, facts[1][rule]) == test.labels for rule in facts[0]}
    hits["bag"] = _by_bag(train, test, vocab_size) == test.labels
    return {rule: float(np.mean(hit)) for rule, hit in hits.items()}


def _facts(examples: Examples, vocab_size: int) -> dict[str, Each]:
    rows, tokens, lengths = np.arange(len(examples)), examples.tokens, examples.lengths
    parts = [slice(start, start + _CHUNK) for start in range(0, len(examples), _CHUNK)]
    return {
        "constant": np.zeros(len(examples), dtype=np.int64),
        "length": lengths,
        "first": tokens[:, 0],
        "last": tokens[rows, lengths - 1],
        "last but one": np.where(lengths > 1, tokens[rows, np.maximum(lengths - 2, 0)], PAD),
        "most frequent": np.concatenate([_counts(tokens[part], vocab_size).argmax(axis=1) for part in parts]),
    }


def _facts_of_tokens(tokens: Texts) -> dict[str, Int[np.ndarray, "tokens"]]:
    before = np.zeros_like(tokens)
    before[:, 1:] = 1 + tokens[:, :-1]  # 0 is a regular token
    return {"constant": np.zeros(tokens.size, dtype=np.int64), "last": tokens.ravel(), "last but one": before.ravel()}


def _by_fact(facts: Each, labels: Each, asked: Int[np.ndarray, "m"]) -> Int[np.ndarray, "m"]:
    """The most frequent training label of each requested fact (on ties, the lowest)."""
    answers = np.full(1 + max(int(facts.max()), int(asked.max())), np.bincount(labels).argmax())
    size = 1 + int(labels.max())
    pairs, counts = np.unique(facts * size + labels, return_counts=True)
    order = np.lexsort((-(pairs % size), counts))  # the last write for a fact wins
    answers[pairs[order] // size] = pairs[order] % size
    return answers[asked]


def _by_bag(train: Examples, test: Examples, vocab_size: int) -> Int[np.ndarray, "m"]:
    """The label with the highest posterior of a naive Bayes model of the token counts."""
    labels, which = np.unique(train.labels, return_inverse=True)
    inside = train.tokens != PAD
    found = np.broadcast_to(which[:, None], inside.shape)[inside] * vocab_size + train.tokens[inside]
    counts = np.bincount(found, minlength=len(labels) * vocab_size).reshape(len(labels), vocab_size) + 1.0
    logs = np.log(counts / counts.sum(axis=1, keepdims=True))
    prior = np.log(np.bincount(which) / len(which))
    guesses = [
        (_counts(test.tokens[start : start + _CHUNK], vocab_size) @ logs.T + prior).argmax(axis=1)
        for start in range(0, len(test), _CHUNK)
    ]
    return labels[np.concatenate(guesses)]


def _counts(tokens: Texts, vocab_size: int) -> Int[np.ndarray, "n vocab_size"]:
    found = np.arange(len(tokens))[:, None] * vocab_size + tokens
    counts = np.bincount(found.ravel(), minlength=len(tokens) * vocab_size).reshape(len(tokens), vocab_size)
    counts[:, PAD] = 0
    return counts
