"""Baselines without a neural network: predictions from the length, one token, the bag of tokens, or n-grams."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, Shaped

from toeplens.tasks.base import PAD, Examples, Tokens, Vector
from toeplens.utils import InputError

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
    vocab_size, by_token = 1 + int(max(train.tokens.max(), test.tokens.max())), train.labels.ndim == 2
    train_facts, test_facts = (_token_facts(e.tokens) if by_token else _facts(e, vocab_size) for e in (train, test))
    guesses = {rule: _fact_rule(facts, train.labels.ravel(), test_facts[rule]) for rule, facts in train_facts.items()}
    if not by_token:
        guesses["bag"] = _bag_rule(train, test, vocab_size)
    return {rule: float(np.mean(guess == test.labels.ravel())) for rule, guess in guesses.items()}


def _facts(examples: Examples, vocab_size: int) -> dict[str, Vector]:
    rows, tokens, lengths = np.arange(len(examples)), examples.tokens, examples.lengths
    chunks = [slice(start, start + _CHUNK) for start in range(0, len(examples), _CHUNK)]
    return {
        "constant": np.zeros(len(examples), dtype=np.int64),
        "length": lengths,
        "first": tokens[:, 0],
        "last": tokens[rows, lengths - 1],
        "last but one": np.where(lengths > 1, tokens[rows, np.maximum(lengths - 2, 0)], PAD),
        "most frequent": np.concatenate([_token_counts(tokens[chunk], vocab_size).argmax(axis=1) for chunk in chunks]),
    }


def _token_facts(tokens: Tokens) -> dict[str, Int[np.ndarray, "tokens"]]:
    before = np.zeros_like(tokens)
    before[:, 1:] = 1 + tokens[:, :-1]  # 0 is a regular token
    return {"constant": np.zeros(tokens.size, dtype=np.int64), "last": tokens.ravel(), "last but one": before.ravel()}


def _fact_rule(facts: Vector, labels: Vector, test_facts: Int[np.ndarray, "m"]) -> Int[np.ndarray, "m"]:
    """The most frequent training label of each requested fact (on ties, the lowest)."""
    answers = np.full(1 + max(int(facts.max()), int(test_facts.max())), np.bincount(labels).argmax())
    size = 1 + int(labels.max())
    pairs, counts = np.unique(facts * size + labels, return_counts=True)
    order = np.lexsort((-(pairs % size), counts))  # the last write for a fact wins
    answers[pairs[order] // size] = pairs[order] % size
    return answers[test_facts]


def _bag_rule(train: Examples, test: Examples, vocab_size: int) -> Int[np.ndarray, "m"]:
    """The label with the highest posterior of a naive Bayes model of the token counts."""
    labels, label_index = np.unique(train.labels, return_inverse=True)
    inside = train.tokens != PAD
    cells = np.broadcast_to(label_index[:, None], inside.shape)[inside] * vocab_size + train.tokens[inside]
    counts = np.bincount(cells, minlength=len(labels) * vocab_size).reshape(len(labels), vocab_size) + 1.0
    logs = np.log(counts / counts.sum(axis=1, keepdims=True))
    prior = np.log(np.bincount(label_index) / len(label_index))
    guesses = [
        (_token_counts(test.tokens[start : start + _CHUNK], vocab_size) @ logs.T + prior).argmax(axis=1)
        for start in range(0, len(test), _CHUNK)
    ]
    return labels[np.concatenate(guesses)]


def _token_counts(tokens: Tokens, vocab_size: int) -> Int[np.ndarray, "n vocab_size"]:
    cells = np.arange(len(tokens))[:, None] * vocab_size + tokens
    counts = np.bincount(cells.ravel(), minlength=len(tokens) * vocab_size).reshape(len(tokens), vocab_size)
    counts[:, PAD] = 0
    return counts


# ---- n-gram models ---------------------------------------------------------------------------------------------------

ORDERS = (0, 1, 2, 3)
MAX_TOKENS = 2**23  # maximum number of training tokens
_SEGMENTS = 64


def ngram_bits(
    train: Shaped[np.ndarray, "T"], texts: Int[np.ndarray, "K n1"], vocab_size: int, *, max_tokens: int = MAX_TOKENS
) -> dict[int, float]:
    """Bits per token of interpolated n-gram models, by order (the number of previous tokens used).

    With Witten and Bell's smoothing (1991): let c(h) be how often the context h was followed by anything in training,
    and t(h) by how many different tokens. Then w has the probability (c(hw) + t(h) p(w | h')) / (c(h) + t(h)), with h'
    one token shorter. The order without context is interpolated with the uniform distribution. Unseen contexts use the
    shorter one.

    Arguments
        train       [T] a training split's stream; if longer than ``max_tokens``, segments from all over it are used
        texts       [K, n + 1] windows whose n last tokens are predicted, each from the earlier ones in its window
        vocab_size  all ids are below it
        max_tokens  maximum number of training tokens
    """
    train = _segments(train, max_tokens).astype(np.int64)
    shares = np.full(texts.shape, 1 / vocab_size)
    before, contexts = np.zeros_like(train), 1  # the context of each training token, and their number
    context, known = np.zeros_like(texts), np.ones(texts.shape, dtype=bool)
    bits = {}
    for order in ORDERS:
        if len(before):  # training has so many tokens
            pairs, inverse, counts = np.unique(
                before * vocab_size + train[order:], return_inverse=True, return_counts=True
            )
            followed = np.bincount(pairs // vocab_size, counts, contexts)[context]
            distinct = np.bincount(pairs // vocab_size, minlength=contexts)[context]
            queries = context * vocab_size + texts
            index = np.minimum(np.searchsorted(pairs, queries), len(pairs) - 1)
            is_known = known & (pairs[index] == queries)
            mixed = (np.where(is_known, counts[index], 0) + distinct * shares) / np.maximum(followed + distinct, 1)
            shares = np.where(known & (followed > 0), mixed, shares)
            before, contexts = inverse.reshape(-1)[:-1], len(pairs)
            context, known = np.zeros_like(index), np.zeros_like(is_known)  # a window's first token has no context
            context[:, 1:], known[:, 1:] = np.where(is_known, index, 0)[:, :-1], is_known[:, :-1]
        bits[order] = float(-np.log2(shares[:, 1:]).sum() / (len(texts) * (texts.shape[1] - 1)))
    return bits


def _segments(train: Shaped[np.ndarray, "T"], max_tokens: int) -> Shaped[np.ndarray, "t"]:
    """At most ``max_tokens`` of the tokens, in equal segments from all over."""
    if len(train) <= max_tokens:
        return np.asarray(train)
    size = max(1, max_tokens // _SEGMENTS)
    count = max_tokens // size
    starts = [(len(train) - size) * i // max(1, count - 1) for i in range(count)]
    return np.concatenate([np.asarray(train[start : start + size]) for start in starts])
