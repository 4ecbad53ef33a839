"""What looks at models, against what one writes by hand: heads knocked out, and a head's Toeplitz share."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from toeplens.lens import ablate_heads, toeplitz_profile
from toeplens.model import Decoder
from toeplens.sources import DecoderSource
from toeplens.studies.benching.race import race
from toeplens.studies.benching.record import Contest, Timed
from toeplens.training import run_spec
from toeplens.training.presets import DISTANCE, starting_spec

_TEXTS = {"laptop": 128, "desk": 32, "paper": 8}
_LONG, _WIDTH = 4096, 64


def ablation(device: torch.device, scale: str, rounds: int, seconds: float) -> Contest:
    """Each head of a model silenced: prefixes kept and several heads a pass, against one pass with a hook a head."""
    spec = run_spec(**starting_spec(scale, "paper", DISTANCE, "rope", 0))
    torch.manual_seed(0)
    model = Decoder(spec.model).eval().to(device)
    shape, texts = spec.model, _TEXTS[scale]
    tokens = torch.randint(1, shape.vocab_size, (texts, spec.task_options["length"]), device=device)
    with torch.no_grad():
        labels = model(tokens).argmax(-1)
    source = DecoderSource(model)
    found: dict[str, np.ndarray] = {}

    def ours() -> None:
        batches = [(tokens, labels, None)]
        found["ours"] = ablate_heads(source, batches, cumulative=False, bootstrap=1).drops

    def hooks() -> None:
        lost = [
            [_without(model, layer, head, tokens, labels) for head in range(shape.num_heads)]
            for layer in range(shape.num_layers)
        ]
        found["hooks"] = np.array(lost)

    times = race({"toeplens": ours, "a pass with a hook a head": hooks}, device, rounds=rounds, seconds=seconds)
    return Contest(
        kind="ablation",
        work=f"{scale}: {shape.num_layers} layers of {shape.num_heads} heads, {texts} texts of "
        f"{tokens.shape[1]} tokens",
        unit="heads",
        count=shape.num_layers * shape.num_heads,
        apart=float(np.abs(found["ours"] - found["hooks"]).max()),
        timed=tuple(Timed(name=name, ours=name == "toeplens", seconds=took) for name, took in times.items()),
    )


@torch.no_grad()
def _without(model: Decoder, layer: int, head: int, tokens: Tensor, labels: Tensor) -> float:
    """Accuracy lost by zeroing a head's slice of the INPUT of its layer's output projection."""

    def silence(_: object, given: tuple[Tensor]) -> tuple[Tensor]:
        z = given[0].clone()
        z.unflatten(-1, (model.config.num_heads, -1))[..., head, :] = 0
        return (z,)

    hook = model.block(layer).attention.out.register_forward_pre_hook(silence)
    try:
        return float((model(tokens).argmax(-1) != labels).double().mean())
    finally:
        hook.remove()


def profile(device: torch.device, rounds: int, seconds: float) -> Contest:
    """The share of a head's causal logits that is Toeplitz: by transforms, and from the N x N matrix."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(_LONG, _WIDTH, generator=generator).to(device) for _ in range(2))
    found: dict[str, float] = {}

    def ours() -> None:
        found["ours"] = float(toeplitz_profile(q, k).share)

    def whole() -> None:
        logits = (q.double() @ k.double().T).tril()
        sums = torch.stack([logits.diagonal(-offset).sum() for offset in range(_LONG)])
        counts = torch.arange(_LONG, 0, -1, device=device)
        found["whole"] = float((sums**2 / counts).sum() / logits.square().sum())

    times = race({"toeplens": ours, "from the N x N matrix": whole}, device, rounds=rounds, seconds=seconds)
    return Contest(
        kind="profile",
        work=f"profile: one head of {_WIDTH} dimensions, {_LONG:,} tokens",
        unit="logits",
        count=_LONG * (_LONG + 1) // 2,
        apart=abs(found["ours"] - found["whole"]),
        timed=tuple(Timed(name=name, ours=name == "toeplens", seconds=took) for name, took in times.items()),
    )
