"""What every test runs under: shapes checked at run time, one thread, the same random examples each time."""

from __future__ import annotations

import sys

import torch
from hypothesis import settings
from jaxtyping import install_import_hook

# Every annotation of these packages is checked in every call (an int passes for a float, as in PEP 484). Constructors
# are left out: what they refuse, and in which words, is theirs to say and ours to test. jaxtyping takes the checker as
# an expression in `x`, the function to check.
_CHECKED = ("toeplens.encodings", "toeplens.model", "toeplens.lens")
_CHECKER = """beartype.beartype(conf=beartype.BeartypeConf(
    is_pep484_tower=True,
    strategy=beartype.BeartypeStrategy.O0 if x.__name__ == "__init__" else beartype.BeartypeStrategy.O1,
))"""
assert not any(name.startswith(_CHECKED) for name in sys.modules), "the hook must come before the first import"
install_import_hook(_CHECKED, _CHECKER)

torch.set_num_threads(1)

settings.register_profile("toeplens", deadline=None, derandomize=True, max_examples=25, database=None)
settings.load_profile("toeplens")
