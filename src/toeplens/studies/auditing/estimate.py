"""How much memory and time an audit will need, estimated before it starts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from toeplens.backends.hf.model import device_of, input_embedding
from toeplens.backends.hf.offload import working_memory
from toeplens.studies.auditing.inputs import AuditContext
from toeplens.utils.formatting import fmt_duration
from toeplens.utils.machine import fmt_bytes

LONG = 60.0  # seconds from which on an audit is long
_HEAD_WORK = 60_000  # multiplications and additions of the analysis per head, token and dimension; fitted (tests)
_READ_RATE = 10**9  # bytes of weights per second that are read and converted
_SIDE = 512  # rows and columns of the matrices that measure the machine's speed
_SAMPLE_SECONDS = 0.05  # time of their products
_PLAIN_TOKENS = 256  # tokens of the plain pass
_BANDS = 8  # frequency bands of a layer, at most
_UNCHANGED = 4  # copies per layer that check the replayed passes
_CHECKED = 40  # heads that are ablated to check an estimate
_PASSES_OF_ESTIMATE = 11  # of forward passes: one and five backward ones
_CANDIDATES = 4  # heads that continue after an estimate, in multiples of ``first``


@dataclass(frozen=True)
class AuditEstimate:
    """What an audit will need.

    memory   bytes, at most
    on_disk  bytes of weights that are read from disk in every pass
    seconds  of time, within a factor of two
    """

    memory: int
    on_disk: int
    seconds: float

    def __str__(self) -> str:
        """Such as ``about 4.9 GB of memory (28.1 GB of weights are read from disk in each pass) and 12 minutes``."""
        disk = f" ({fmt_bytes(self.on_disk)} of weights are read from disk in each pass)" if self.on_disk else ""
        return f"about {fmt_bytes(self.memory)} of memory{disk} and {fmt_duration(self.seconds)}"


def estimate_audit(work: AuditContext) -> AuditEstimate | None:
    """What this audit will need; None for a model that is not a decoder with layers of equal heads.

    The time follows from the number of multiplications and the speed of a product of matrices, measured here.
    """
    loaded, options = work.loaded, work.options
    config: Any = loaded.model.config.get_text_config(decoder=True)
    try:
        heads, layers = (getattr(config, name, None) for name in ("num_attention_heads", "num_hidden_layers"))
    except RuntimeError:  # in transformers: the value differs between layers
        return None
    if not isinstance(heads, int) or not isinstance(layers, int) or loaded.model.config.is_encoder_decoder:
        return None
    sequences, length = work.sequences.tokens.shape
    tokens, width = sequences * length, config.hidden_size // heads
    numbers = sum(weight.numel() for weight in loaded.model.parameters())
    embedding = getattr(input_embedding(loaded.model), "weight", torch.empty(0)).numel()
    plan = loaded.plan
    weights = numbers * loaded.model.dtype.itemsize if plan is None else plan.peak
    on_disk = 0 if plan is None else plan.on_disk
    one_pass = 2.0 * tokens * (numbers - embedding) + 4.0 * sequences * length**2 * width * heads * layers
    speed = _measure_speed(device_of(loaded.model), loaded.model.dtype)
    reading = on_disk / _READ_RATE
    analysed = layers if options.layers is None else len({*options.layers})
    seconds = (
        one_pass * (1 + min(1.0, _PLAIN_TOKENS / tokens)) + tokens * analysed * heads * width * _HEAD_WORK
    ) / speed
    seconds += 2 * reading
    per_layer = heads if options.heads is None else len({*options.heads})
    if options.effects == "bands":  # two more passes find the rotations and change them
        per_layer, seconds = min(_BANDS, width // 2), 2 * seconds
    ablated = analysed * per_layer if options.first is None else min(analysed * per_layer, _CANDIDATES * options.first)
    if options.effects == "attribution":
        ablated = min(_CHECKED, ablated)
    if options.effects == "attribution" or options.first is not None:
        seconds += _PASSES_OF_ESTIMATE * one_pass / speed + 2 * reading
    if options.effects != "none":  # half of the layers on average, and the logits
        ablated += analysed * _UNCHANGED
        seconds += ablated * ((one_pass / 2 + 2.0 * tokens * embedding) / speed + reading / 2)
    return AuditEstimate(weights + working_memory(loaded.model.config, tokens), on_disk, seconds)


def _measure_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Multiplications and additions per second in a product of matrices."""
    a = torch.ones(_SIDE, _SIDE, device=device, dtype=dtype)
    (a @ a)[0, 0].item()
    count, started = 0, time.perf_counter()
    while time.perf_counter() < started + _SAMPLE_SECONDS:
        (a @ a)[0, 0].item()
        count += 1
    return count * 2.0 * _SIDE**3 / (time.perf_counter() - started)
