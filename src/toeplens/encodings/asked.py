"""What attention is asked, looked at before it is done: shapes that do not go together, in a sentence."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.kit import require_tensor
from toeplens.encodings.shapes import Positions
from toeplens.ground import InputError


def check_asked(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    *,
    encoding: PositionalEncoding,
    q_positions: Positions,
    k_positions: Positions,
    rows: Tensor | None = None,
    mask: Tensor | None = None,
    notes: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    texts: Tensor | None = None,
    padding: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    **_: Any,
) -> None:
    """Raise `InputError` for shapes that do not go together; reads no numbers. See `toeplens.encodings.attend`."""
    for name, x in {"q": q, "k": k, **({} if v is None else {"v": v})}.items():
        require_tensor(name, x, "float")
        if x.ndim != 4:
            raise InputError(f"{name}: a shape of {tuple(x.shape)} was given; it must be [B, heads, N, dimensions].")
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1:3]
    if heads != encoding.num_heads:
        raise InputError(f"q: {heads} heads were given; this {_name(encoding)} was built for {encoding.num_heads}.")
    if groups < 1 or heads % groups:
        raise InputError(f"k: {groups} heads were given for {heads} of q; their number must divide it.")
    if k.shape != (batch, groups, keys, width):
        raise InputError(f"k: a shape of {tuple(k.shape)} was given; for this q it must be [{batch}, G, Nk, {width}].")
    if v is not None and v.shape[:3] != k.shape[:3]:
        raise InputError(
            f"v: a shape of {tuple(v.shape)} was given; for this k it must be [{batch}, {groups}, {keys}, dimensions]."
        )
    check_positions("q_positions", q_positions, encoding, batch, queries)
    check_positions("k_positions", k_positions, encoding, batch, keys)
    if rows is not None and rows.shape not in ((queries,), (batch, queries)):
        raise InputError(
            f"rows: a shape of {tuple(rows.shape)} was given; it must be [{queries}] or [{batch}, {queries}]."
        )
    if mask is not None:
        require_tensor("mask", mask, "bool")
    if mask is not None and not _broadcasts(mask, (batch, heads, queries, keys)):
        raise InputError(
            f"mask: a shape of {tuple(mask.shape)} was given; it must go with [{batch}, {heads}, {queries}, {keys}] "
            f"(batch, heads, queries, keys), each 1 or the same, and hold every key."
        )
    if notes is not None and (notes.ndim != 4 or (notes.shape[0], notes.shape[2]) != (batch, keys)):
        raise InputError(
            f"notes: a shape of {tuple(notes.shape)} was given; it must be [{batch}, heads, {keys}, numbers]."
        )
    if texts is not None and texts.shape != (batch, keys):
        raise InputError(f"texts: a shape of {tuple(texts.shape)} was given; it must be [{batch}, {keys}], one a key.")
    if padding is not None:
        require_tensor("padding", padding, "bool", (batch, keys))
    if window is not None and (window < 1 or not causal):
        raise InputError(f"window: {window} was given; it must be at least 1, and attention causal.")
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise InputError(f"softcap: {softcap} was given; it must be positive and finite.")
    if sinks is not None and sinks.shape != (heads,):
        raise InputError(f"sinks: a shape of {tuple(sinks.shape)} was given; it must be [{heads}], a logit a head.")


def check_positions(name: str, positions: Positions, encoding: PositionalEncoding, batch: int, length: int) -> None:
    """A place for each, with its coordinates last or, where hooks make them of running numbers, without."""
    require_tensor(name, positions, "real")
    shape, axes = positions.shape, encoding.axes
    whole = ((length,), (batch, length), (1, length))
    if shape in whole or (axes > 1 and shape[-1:] == (axes,) and shape[:-1] in whole):
        return
    raise InputError(
        f"{name}: a shape of {tuple(shape)} was given; it must be [{length}] or [{batch}, {length}]"
        f"{f', with {axes} coordinates in a last dimension' if axes > 1 else ''}: a place for each."
    )


def _broadcasts(mask: Tensor, to: tuple[int, ...]) -> bool:
    if mask.ndim > 4 or mask.ndim < 1 or mask.shape[-1] != to[-1]:
        return False
    return all(given in (1, wanted) for given, wanted in zip(reversed(mask.shape), reversed(to), strict=False))


def _name(encoding: PositionalEncoding) -> str:
    return type(encoding).__name__
