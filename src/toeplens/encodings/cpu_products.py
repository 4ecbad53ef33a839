"""Float32 matrix products on AMD processors with AVX-512, in half the time.

torch computes them by MKL, which uses only AVX2 on these processors. If products may be rounded to bfloat16, it gives
them to oneDNN, which rounds only on processors with tiles of bfloat16 (AMX). On others this setting is only faster.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

_SIDES = (16, 64, 512)  # of the matrices whose products are tested
_LOCK = threading.Lock()
_users, _before = 0, "highest"


@contextmanager
def fast_products() -> Iterator[None]:
    """Compute float32 products on the CPU by the faster library, rounded to float32 as always. Also a decorator.

    Applies to all threads, as torch's setting does. Does nothing on other processors, or if torch has a GPU.
    """
    global _users, _before
    if not _onednn_is_faster() or _current_setting() is None:
        yield
        return
    with _LOCK:
        if not _users:
            _before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("medium")
        _users += 1
    try:
        yield
    finally:
        with _LOCK:
            _users -= 1
            if not _users:
                torch.set_float32_matmul_precision(_before)


@cache
def is_amd() -> bool:
    """Whether this is an AMD processor; False if its vendor is not known."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


@cache
def _onednn_is_faster() -> bool:
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has_avx512 and is_amd() and torch.backends.mkl.is_available() and medium_is_exact()


@cache
def medium_is_exact() -> bool:
    """Whether float32 products are not rounded to bfloat16 here if they may be; False if torch has a GPU."""
    with _LOCK:
        before = None if torch.cuda.is_available() else _current_setting()
        if before is None:
            return False
        torch.set_float32_matmul_precision("medium")
        try:
            with torch.autocast("cpu", enabled=False):
                return all(map(_is_exact, _SIDES))
        finally:
            torch.set_float32_matmul_precision(before)


def _current_setting() -> str | None:
    """torch's setting; None if it was set for one library only, of which torch cannot read a common value."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _is_exact(side: int) -> bool:
    """Whether a product with the identity changes nothing, alone and in a batch."""
    kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever torch's defaults are
    x, identity = torch.linspace(0.1, 0.9, side * side, **kind).view(side, side), torch.eye(side, **kind)
    products = identity @ x, x @ identity, torch.bmm(identity.expand(2, -1, -1), x.expand(2, -1, -1))
    return all(bool((product == x).all()) for product in products)
