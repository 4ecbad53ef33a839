"""What every test runs under: shapes checked at run time, one thread, the same random examples each time."""

from __future__ import annotations

import sys

import torch
from hypothesis import settings
from jaxtyping import install_import_hook

# Every jaxtyping annotation of these packages is checked in every call. An int passes for a float, as in PEP 484.
_CHECKED = ("toeplens.encodings", "toeplens.model", "toeplens.lens")
assert not any(name.startswith(_CHECKED) for name in sys.modules), "the hook must come before the first import"
install_import_hook(_CHECKED, "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

torch.set_num_threads(1)

settings.register_profile("toeplens", deadline=None, derandomize=True, max_examples=25, database=None)
settings.load_profile("toeplens")
