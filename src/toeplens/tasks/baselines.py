"""Baselines without a neural network: predictions from the length, one token, the bag of tokens, or n-grams."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, Shaped

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
    vocab_size, by_token = 1 + int(max(train.tokens.max(), test.tokens.max())), train.labels.ndim == 2
    known, asked = (_facts_of_tokens(e.tokens) if by_token else _facts(e, vocab_size) for e in (train, test))
    guesses = {rule: _by_fact(facts, train.labels.ravel(), asked[rule]) for rule, facts in known.items()}
    if not by_token:
        guesses["bag"] = _by_bag(train, test, vocab_size)
    return {rule: float(np.mean(guess == test.labels.ravel())) for rule, guess in guesses.items()}


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


# ---- n-gram models ---------------------------------------------------------------------------------------------------

ORDERS = (0, 1, 2, 3)
MOST = 2**23  # maximum number of training tokens
_SEGMENTS = 64


def ngram_bits(
    train: Shaped[np.ndarray, "T"], texts: Int[np.ndarray, "K n1"], vocab_size: int, *, most: int = MOST
) -> dict[int, float]:
    """Bits per token of interpolated n-gram models, by order (the number of previous tokens used).

    With Witten and Bell's smoothing (1991): let c(h) be how often the context h was followed by anything in training,
    and t(h) by how many different tokens. Then w has the probability (c(hw) + t(h) p(w | h')) / (c(h) + t(h)), with h'
    one token shorter. The order without context is interpolated with the uniform distribution. Unseen contexts use the
    shorter one.

    Arguments
        train       [T] a training split's stream; if it is longer than ``most``, segments from all over it are used
        texts       [K, n + 1] windows whose n last tokens are predicted, each from the earlier ones in its window
        vocab_size  all ids are below it
        most        maximum number of training tokens
    """
    train = _segments(train, most).astype(np.int64)
    shares = np.full(texts.shape, 1 / vocab_size)
    before, contexts = np.zeros_like(train), 1  # the context of each training token, and their number
    context, known = np.zeros_like(texts), np.ones(texts.shape, dtype=bool)
    found = {}
    for order in ORDERS:
        if len(before):  # training has so many tokens
            pairs, place, counts = np.unique(
                before * vocab_size + train[order:], return_inverse=True, return_counts=True
            )
            followed = np.bincount(pairs // vocab_size, counts, contexts)[context]
            different = np.bincount(pairs // vocab_size, minlength=contexts)[context]
            wanted = context * vocab_size + texts
            at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
            there = known & (pairs[at] == wanted)
            mixed = (np.where(there, counts[at], 0) + different * shares) / np.maximum(followed + different, 1)
            shares = np.where(known & (followed > 0), mixed, shares)
            before, contexts = place.reshape(-1)[:-1], len(pairs)
            context, known = np.zeros_like(at), np.zeros_like(there)  # a window's first token has no context
            context[:, 1:], known[:, 1:] = np.where(there, at, 0)[:, :-1], there[:, :-1]
        found[order] = float(-np.log2(shares[:, 1:]).sum() / (len(texts) * (texts.shape[1] - 1)))
    return found


def _segments(train: Shaped[np.ndarray, "T"], most: int) -> Shaped[np.ndarray, "t"]:
    """At most ``most`` of the tokens, in equal segments from all over."""
    if len(train) <= most:
        return np.asarray(train)
    size = max(1, most // _SEGMENTS)
    many = most // size
    starts = [(len(train) - size) * part // max(1, many - 1) for part in range(many)]
    return np.concatenate([np.asarray(train[start : start + size]) for start in starts])
