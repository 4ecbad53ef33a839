"""Models that count: what the last tokens alone say of the next one, for models that see further to be held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from toeplens.ground import InputError, invalid
from toeplens.tasks.base import at_least

ORDERS = (0, 1, 2, 3)
MOST = 2**23  # training tokens that are counted
_STRETCHES = 64
_ROWS = 2**20  # tokens that are foretold at once

Tokens = Shaped[np.ndarray, "T"]


def bits_of(
    train: Tokens, texts: Int[np.ndarray, "K n1"], vocab_size: int, *, orders: Sequence[int] = ORDERS, most: int = MOST
) -> dict[int, float]:
    """Bits a token of interpolated n-gram models on texts, by their order: the tokens before that they look at.

    By Witten and Bell's rule (1991): after h, which was followed c(h) times by t(h) different tokens in training, w has
    the probability (c(hw) + t(h) p(w | h')) / (c(h) + t(h)), with h' one token shorter; without any token before it
    that is interpolated with equal shares. What was never seen leaves it to the shorter one.

    Arguments
        train       [T] a training split's stream; of a longer one than ``most``, parts from all over it are counted
        texts       [K, n + 1] the n last tokens of each are foretold, each from those before it in its text
        vocab_size  ids are below it
        orders      for which orders
        most        training tokens that are counted at most

    Raises `InputError` where there is nothing to count or to foretell.
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
    """What follows contexts of one length.

    pairs      [P] context and token in one number, ascending; a context is a place in the table before this one
    counts     [P] how often
    followed   [contexts] how often each context was followed by anything
    different  [contexts] by how many different tokens
    """

    pairs: Int[np.ndarray, "P"]
    counts: Int[np.ndarray, "P"]
    followed: Int[np.ndarray, "contexts"]
    different: Int[np.ndarray, "contexts"]

    def find(self, pairs: Int[np.ndarray, "*m"]) -> tuple[Int[np.ndarray, "*m"], Bool[np.ndarray, "*m"]]:
        """The places of pairs in the table, and whether they are there."""
        places = np.minimum(np.searchsorted(self.pairs, pairs), len(self.pairs) - 1)
        return places, self.pairs[places] == pairs


def _some(train: Tokens, most: int) -> Tokens:
    """At most so many of the tokens: equal stretches from all over."""
    if len(train) <= most:
        return np.asarray(train)
    size = max(1, most // _STRETCHES)
    many = most // size
    starts = [(len(train) - size) * part // max(1, many - 1) for part in range(many)]
    return np.concatenate([np.asarray(train[start : start + size]) for start in starts])


def _counted(train: Int[np.ndarray, "T"], vocab_size: int, highest: int) -> list[_Table]:
    """Tables of contexts of 0, 1, ... tokens; none of contexts longer than the text."""
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
    """The sums over all tokens but the first of each text, by order."""
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
        context, known = np.zeros_like(places), np.zeros_like(there)  # a text's first token has nothing before it
        context[:, 1:], known[:, 1:] = np.where(there, places, 0)[:, :-1], there[:, :-1]
    return np.array(totals)
