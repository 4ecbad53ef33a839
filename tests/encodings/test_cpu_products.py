"""Products on AMD processors, tried on any processor."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from tests.backends.hf.models import SIZES
from tests.backends.hf.models import tiny as tiny_model
from tests.builders import tiny
from torch.overrides import TorchFunctionMode

from toeplens import studies
from toeplens.backends.hf import calls
from toeplens.encodings import cpu_products
from toeplens.encodings.cpu_products import fast_products
from toeplens.studies.probing import ProbeSizes, probe
from toeplens.training import train

precision = torch.get_float32_matmul_precision


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if oneDNN was faster here and nothing was rounded; afterwards the setting is as before."""
    monkeypatch.setattr(cpu_products, "_onednn_is_faster", lambda: True)
    torch.set_float32_matmul_precision("high")
    yield
    after = precision()
    torch.set_float32_matmul_precision("highest")
    assert after == "high"


@pytest.mark.usefixtures("amd")
def test_it_ends_with_its_last_user_even_by_an_error() -> None:
    entered, leave = Event(), Event()

    def other_thread() -> None:
        with fast_products():
            entered.set()
            leave.wait(60)

    with ThreadPoolExecutor() as pool:
        with suppress(KeyError), fast_products(), fast_products():
            other = pool.submit(other_thread)
            assert entered.wait(60)
            raise KeyError
        assert precision() == "medium"
        leave.set()
        other.result()
    assert precision() == "high"


@pytest.mark.usefixtures("amd")
def test_audits_probes_and_training_use_it(tmp_path: Path) -> None:
    model, used = tiny_model("LlamaForCausalLM", **SIZES), list[str]()
    model.lm_head.register_forward_hook(lambda *args: used.append(precision()))
    tokens = torch.randint(1, SIZES["vocab_size"], (400,))
    studies.audit(model, tokens[:16][None])
    probe(model, tokens, sizes=ProbeSizes(lengths=(64,)))
    train(tiny(), tmp_path, on_progress=lambda *args: used.append(precision()))
    assert precision() == "high"
    assert {*used} == {"medium"}


@pytest.mark.parametrize("shape", [(5, 7, 3), (64, 300, 64), (2, 64, 300, 64)])
def test_products_are_rounded_to_float32(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    *batch, m, k, n = shape
    x, y = torch.randn(*batch, m, k), torch.randn(*batch, k, n)
    with fast_products():
        product = x @ y
    bound = k * torch.finfo(torch.float32).eps * (x.double().abs() @ y.double().abs())
    assert ((product - x.double() @ y.double()).abs() <= bound).all()


class Rounding(TorchFunctionMode):
    """Matrices are rounded to bfloat16 before products."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__matmul__, torch.bmm):
            self.inputs.extend(args)
            args = [x.bfloat16().float() for x in args]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_rounding_to_bfloat16_is_noticed(default: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert cpu_products._is_exact(64)
        assert {x.dtype for x in products_of(64)} == {torch.float32}
        with Rounding():
            assert not cpu_products._is_exact(64)
    finally:
        torch.set_default_dtype(before)


def products_of(side: int) -> list[Any]:
    """What the test of exactness multiplies."""
    with Rounding() as recorded:
        cpu_products._is_exact(side)
    return recorded.inputs


def test_a_setting_for_one_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot_be_read() -> str:
        raise RuntimeError

    monkeypatch.setattr(cpu_products, "_onednn_is_faster", lambda: True)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", cannot_be_read)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda value: pytest.fail(value))
    with fast_products():
        pass


@pytest.mark.parametrize("exact", [True, False])
def test_proofs_allow_for_that_rounding_only_where_it_is_done(monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
    monkeypatch.setattr(calls, "medium_is_exact", lambda: exact)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    assert calls._unit_roundoff(torch.ones(2), torch.float32) == (2.0**-24 if exact else 2.0**-8)
