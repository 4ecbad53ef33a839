"""toeplens: a laboratory for positional information in Transformers.

What people use most is here by name, and so are the packages: ``import toeplens as tl``, then ``tl.audit(...)``,
``tl.behaviour(...)``, ``tl.encodings.build(...)``. Each is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toeplens import encodings, engine, ground, hosts, lens, model, nn, report, sources, studies, tasks, training
    from toeplens.encodings import PositionalEncoding
    from toeplens.engine import ablate_run, extrapolate
    from toeplens.ground import EnvironmentFailure, InputError
    from toeplens.lens import ablate_heads, behaviour, decompose
    from toeplens.model import Decoder, DecoderConfig, decoder_config
    from toeplens.studies import Audit, audit
    from toeplens.training import Run, RunSpec, run_spec, train

from toeplens.ground.lazy import lazy
from toeplens.version import __version__

__all__ = [
    "Audit",
    "Decoder",
    "DecoderConfig",
    "EnvironmentFailure",
    "InputError",
    "PositionalEncoding",
    "Run",
    "RunSpec",
    "__version__",
    "ablate_heads",
    "ablate_run",
    "audit",
    "behaviour",
    "decoder_config",
    "decompose",
    "encodings",
    "engine",
    "extrapolate",
    "ground",
    "hosts",
    "lens",
    "model",
    "nn",
    "report",
    "run_spec",
    "sources",
    "studies",
    "tasks",
    "train",
    "training",
]

__getattr__ = lazy(__name__, __file__)


def __dir__() -> list[str]:
    return sorted(__all__)
