"""Tensor shapes of the hooks."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float, Real
from torch import Tensor

Positions = Real[Tensor, "_"] | Real[Tensor, "B _"] | Real[Tensor, "... _ axes"]  # unnamed: queries and keys may differ
Stream = Float[Tensor, "B N d_model"]
Queries = Float[Tensor, "B H Nq d"]
Keys = Float[Tensor, "B G Nk d"]  # grouped keys have fewer heads (`rotation_is_shared`)
Values = Float[Tensor, "B G Nk dv"]
RotatedQK = tuple[Float[Tensor, "B H Nq e"], Float[Tensor, "B G Nk e"]]  # possibly of another width
PairMatrix = Float[Tensor, "B H Nq Nk"]  # per head, query and key: a logit, a weight, a bias
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # score, batch, head, query, key
Frequencies = Float[Tensor, "*_B H n"]
