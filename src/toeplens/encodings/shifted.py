"""Sinusoids with a learned size, and sinusoids at positions that are drawn anew in training."""

from __future__ import annotations

from typing import Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from toeplens.encodings.absolute import Sinusoidal
from toeplens.encodings.base import Positions, require_number
from toeplens.ground import InputError


class ScaledSinusoidal(Sinusoidal):
    """The sinusoid times one learned number (Li et al. 2019).

    As in x-transformers the number starts at 1/sqrt(d_model), so that the vector is not longer than a token's, and
    sines come before cosines; in the paper it starts at 1.

    Arguments
        start         where the number starts; default 1/sqrt(d_model)
        base, layout  as in `Sinusoidal`
    """

    citation = "Li et al. 2019, arXiv 1809.08895"
    formula = r"x_i + \alpha\, p_i"

    def __init__(
        self,
        *,
        start: float | None = None,
        base: float = 10000.0,
        layout: Literal["interleaved", "halves"] = "halves",
        **sizes: int,
    ) -> None:
        super().__init__(base=base, layout=layout, **sizes)
        self.start = self.d_model**-0.5 if start is None else require_number("start", start)
        # weights that were saved before call it ``scale``, which as an attribute is the factor of q . k
        self._parameters["scale"] = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    @property
    def number(self) -> Float[Tensor, ""]:
        """The learned number."""
        return cast(Tensor, self._parameters["scale"])

    def reset_parameters(self) -> None:
        nn.init.constant_(self.number, self.start)

    def table(self, positions: Positions) -> Float[Tensor, "*B N d_model"]:
        return super().table(positions) * self.number.to(torch.float64)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "1 D"]:
        """alpha^2 times the sinusoid's own kernel."""
        return super().kernel(offsets) * self.number**2


class SHAPE(Sinusoidal):
    """Shifted absolute positions: in training a whole sequence is moved by a random k (Kiyono et al. 2021).

    k is drawn from {0, ..., max_shift} for each sequence, by torch's generator, whenever `embed` is called in training;
    in evaluation nothing is moved. The released program moves by its largest shift there, which for a model that was
    trained on all shifts is one of them like any other: for that, add it to the positions. One shift for all positions
    leaves p_i . p_j what it is.

    Arguments
        max_shift     the largest shift; default ``max_len`` (the paper: 500)
        base, layout  as in `Sinusoidal`
    """

    citation = "Kiyono et al. 2021, arXiv 2109.05644"
    formula = r"x_i + p_{i + k},\quad k \sim U\{0, \ldots, K\}"

    def __init__(
        self,
        *,
        max_shift: int | None = None,
        base: float = 10000.0,
        layout: Literal["interleaved", "halves"] = "interleaved",
        **sizes: int,
    ) -> None:
        super().__init__(base=base, layout=layout, **sizes)
        self.max_shift = self.max_len if max_shift is None else max_shift
        require_number("max_shift", self.max_shift, at_least=0)

    def embed(self, x: Float[Tensor, "B N d_model"], positions: Positions) -> Float[Tensor, "B N d_model"]:
        if self.training:
            positions = positions + torch.randint(self.max_shift + 1, (x.shape[0], 1), device=positions.device)
        return super().embed(x, positions)


class RandomizedSinusoidal(Sinusoidal):
    """Randomized positions: in training N of ``max_position`` places, in order, stand for N positions.

    Ruoss et al. 2023, section 3: a set of N different integers under L is drawn, by torch's generator, one for the
    whole batch, whenever `embed` is called in training, and the token with the n-th smallest position takes the n-th
    smallest of them (tokens of the same position take the same). In evaluation positions are what they are. The paper
    draws there too, and a model trained on gaps of L/N has rarely seen neighbouring places: to evaluate as it does,
    give the model positions that are drawn from all L.

    Arguments
        max_position  L; default four times ``max_len`` (the paper: 2048, for training lengths to 40)
        base, layout  as in `Sinusoidal`
    """

    citation = "Ruoss et al. 2023, arXiv 2305.16843"
    formula = r"x_i + p_{s_i},\quad s_1 < \ldots < s_N \text{ drawn from } \{0, \ldots, L - 1\}"

    def __init__(
        self,
        *,
        max_position: int | None = None,
        base: float = 10000.0,
        layout: Literal["interleaved", "halves"] = "interleaved",
        **sizes: int,
    ) -> None:
        super().__init__(base=base, layout=layout, **sizes)
        self.max_position = 4 * self.max_len if max_position is None else max_position
        require_number("max_position", self.max_position, at_least=self.max_len)

    def embed(self, x: Float[Tensor, "B N d_model"], positions: Positions) -> Float[Tensor, "B N d_model"]:
        return super().embed(x, self.draw(positions) if self.training else positions)

    def draw(self, positions: Positions) -> Positions:
        """Random places in the order of the positions."""
        count = positions.shape[-1]
        if count > self.max_position:
            raise InputError(
                f"max_position: {self.max_position} was given; it must be at least the number of tokens, {count}."
            )
        places = torch.randperm(self.max_position, device=positions.device)[:count].sort().values
        return places[torch.searchsorted(positions.sort(-1).values, positions.contiguous())]


ENCODINGS = {"scaled-sinusoidal": ScaledSinusoidal, "shape": SHAPE, "randomized-sinusoidal": RandomizedSinusoidal}
