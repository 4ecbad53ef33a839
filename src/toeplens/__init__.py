"""toeplens: a laboratory for positional information in Transformers.

What people use most is here by name, and so are the packages: ``import toeplens as tl``, then ``tl.audit(...)``,
``tl.behaviour(...)``, ``tl.encodings.build(...)``. Each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toeplens import backends, encodings, engine, ground, hosts, lens, model, nn, report, studies, tasks, training
    from toeplens.encodings import PositionalEncoding
    from toeplens.engine import ablate_run, extrapolate
    from toeplens.ground import EnvironmentFailure, InputError
    from toeplens.lens import ablate_heads, behaviour, decompose
    from toeplens.model import Decoder, DecoderConfig, decoder_config
    from toeplens.studies import Audit, audit
    from toeplens.training import Run, RunSpec, run_spec, train

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
    "backends",
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
    "studies",
    "tasks",
    "train",
    "training",
]

_HOLDERS = {
    "encodings": ("PositionalEncoding",),
    "engine": ("ablate_run", "extrapolate"),
    "ground": ("EnvironmentFailure", "InputError"),
    "hosts": (),
    "lens": ("ablate_heads", "behaviour", "decompose"),
    "model": ("Decoder", "DecoderConfig", "decoder_config"),
    "nn": (),
    "report": (),
    "backends": (),
    "studies": ("Audit", "audit"),
    "tasks": (),
    "training": ("Run", "RunSpec", "run_spec", "train"),
}


def __getattr__(name: str) -> Any:
    for package, names in _HOLDERS.items():
        if name == package:
            return importlib.import_module(f"toeplens.{package}")
        if name in names:
            return getattr(importlib.import_module(f"toeplens.{package}"), name)
    raise AttributeError(f"module 'toeplens' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
