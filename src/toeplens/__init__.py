"""toeplens: a laboratory for positional information in Transformers.

What people use most is here by name, and so are the packages: ``import toeplens as tl``, then ``tl.audit(...)``,
``tl.behaviour(...)``, ``tl.encodings.build(...)``. Each is imported when it is first used.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toeplens import backends, encodings, engine, hosts, lens, model, nn, report, studies, tasks, training, utils
    from toeplens.encodings import PositionalEncoding
    from toeplens.engine import ablate_run, extrapolate
    from toeplens.lens import ablate_heads, behaviour, decompose
    from toeplens.model import Decoder, DecoderConfig, decoder_config
    from toeplens.studies import Audit, audit
    from toeplens.training import Run, RunSpec, run_spec, train
    from toeplens.utils import EnvironmentFailure, InputError

from toeplens.utils.lazy import lazy_getattr
from toeplens.utils.renamed import RenamedModules
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
    "utils",
]

__getattr__ = lazy_getattr(__name__, __file__)
sys.meta_path.append(RenamedModules())


def __dir__() -> list[str]:
    return sorted(__all__)
