"""n-gram models: baselines that predict the next token from the last few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from toeplens.ground import InputError, invalid
from toeplens.tasks.base import at_least

ORDERS = (0, 1, 2, 3)
MOST = 2**23  # maximum number of training tokens
_STRETCHES = 64
_ROWS = 2**20  # tokens per batch of predictions

Tokens = Shaped[np.ndarray, "T"]


def bits_of(
    train: Tokens, texts: Int[np.ndarray, "K n1"], vocab_size: int, *, orders: Sequence[int] = ORDERS, most: int = MOST
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
        orders      the orders to evaluate
        most        maximum number of training tokens

    Raises `InputError` if there is nothing to count or to predict.
    """
    at_least(1, vocab_size=vocab_size, most=most)
    for order in orders:
        at_least(0, orders=order)
    if not len(train):
        raise InputError("train must have at least one token, got none.")
    if texts.ndim != 2 or texts.shape[0] < 1 or texts.shape[1] < 2:
        raise invalid("texts", "be at least 1 text of at least 2 tokens", texts.shape)
    tables = _counted(_some(train, most).astype(np.int64), vocab_size, max(orders, default=0))
    size = max(1, _ROWS // texts.shape[1])
    parts = [_bits(tables, texts[start : start + size], vocab_size) for start in range(0, len(texts), size)]
    totals = np.sum(parts, axis=0) / (len(texts) * (texts.shape[1] - 1))
    return {order: float(totals[min(order, len(totals) - 1)]) for order in orders}


@dataclass(frozen=True)
class _Table:
    """Counts of the tokens that follow contexts of one length.

    pairs      [P] context and token in one number, ascending; a context is an index into the previous table
    counts     [P] number of occurrences
    followed   [contexts] how often each context was followed by anything
    different  [contexts] by how many different tokens
    """

    pairs: Int[np.ndarray, "P"]
    counts: Int[np.ndarray, "P"]
    followed: Int[np.ndarray, "contexts"]
    different: Int[np.ndarray, "contexts"]

    def find(self, pairs: Int[np.ndarray, "*m"]) -> tuple[Int[np.ndarray, "*m"], Bool[np.ndarray, "*m"]]:
        """The indices of pairs in the table, and whether they are there."""
        places = np.minimum(np.searchsorted(self.pairs, pairs), len(self.pairs) - 1)
        return places, self.pairs[places] == pairs


def _some(train: Tokens, most: int) -> Tokens:
    """At most ``most`` of the tokens: equal segments from all over."""
    if len(train) <= most:
        return np.asarray(train)
    size = max(1, most // _STRETCHES)
    many = most // size
    starts = [(len(train) - size) * part // max(1, many - 1) for part in range(many)]
    return np.concatenate([np.asarray(train[start : start + size]) for start in starts])


def _counted(train: Int[np.ndarray, "T"], vocab_size: int, highest: int) -> list[_Table]:
    """Tables for contexts of 0, 1, ... tokens, none longer than the text."""
    tables: list[_Table] = []
    context, contexts = np.zeros_like(train), 1
    for _ in range(highest + 1):
        pairs = context * vocab_size + train[len(train) - len(context) :]
        found, places, counts = np.unique(pairs, return_inverse=True, return_counts=True)
        holders = found // vocab_size
        followed = np.bincount(holders, weights=counts, minlength=contexts).astype(np.int64)
        tables.append(_Table(found, counts, followed, np.bincount(holders, minlength=contexts)))
        context, contexts = places.reshape(-1)[:-1], len(found)
        if not len(context):
            break
    return tables


def _bits(tables: list[_Table], texts: Int[np.ndarray, "K n1"], vocab_size: int) -> Float[np.ndarray, "orders"]:
    """Sums over all tokens but the first of each window, by order."""
    shares = np.full(texts.shape, 1 / vocab_size)
    context, known = np.zeros_like(texts), np.ones(texts.shape, dtype=bool)
    totals = []
    for table in tables:
        places, there = table.find(context * vocab_size + texts)
        there &= known
        counts = np.where(there, table.counts[places], 0)
        followed = np.where(known, table.followed[context], 0)
        different = np.where(known, table.different[context], 0)
        seen = followed > 0
        shares = np.where(seen, (counts + different * shares) / np.maximum(followed + different, 1), shares)
        totals.append(-np.log2(shares[:, 1:]).sum())
        context, known = np.zeros_like(places), np.zeros_like(there)  # a window's first token has no context
        context[:, 1:], known[:, 1:] = np.where(there, places, 0)[:, :-1], there[:, :-1]
    return np.array(totals)
