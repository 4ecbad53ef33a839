"""What the reproduction trains at each preset's sizes: which encodings, and how much is looked at."""

from __future__ import annotations

from dataclasses import dataclass

from toeplens.training.presets import COUNT, DISTANCE, PRESETS, Preset

_CURVES = ("rope", "mla", "nope", "alibi", "relative", "absolute", "rope-absolute")


@dataclass(frozen=True)
class Scale(Preset):
    """A preset as the reproduction runs it.

    labels         the encodings of each task
    partial_heads  the numbers of RoPE heads of Fig. 5
    watched        whether heads are watched in training: at the paper's size a look takes minutes on a CPU, more than a
                   short time budget allows
    """

    labels: dict[str, tuple[str, ...]]
    partial_heads: dict[str, tuple[int, ...]]
    ablation_examples: int
    watched: bool = True


SMOKE = Scale(
    **vars(PRESETS["smoke"]),
    labels={DISTANCE: ("rope", "nope", "mla", "rope-absolute"), COUNT: ("rope", "nope", "mla")},
    partial_heads={DISTANCE: (1,), COUNT: ()},
    ablation_examples=512,
)

LAPTOP = Scale(
    **vars(PRESETS["laptop"]),
    labels={DISTANCE: _CURVES, COUNT: ("rope", "nope", "mla")},
    partial_heads={DISTANCE: (1, 2), COUNT: ()},
    ablation_examples=2048,
)

PAPER = Scale(
    **vars(PRESETS["paper"]),
    labels={DISTANCE: (*_CURVES, "random"), COUNT: (*_CURVES, "random")},
    partial_heads={DISTANCE: (1, 2, 4, 8), COUNT: (1, 2, 4, 8)},
    ablation_examples=8192,
    watched=False,
)

SCALES: dict[str, Scale] = {scale.name: scale for scale in (SMOKE, LAPTOP, PAPER)}
