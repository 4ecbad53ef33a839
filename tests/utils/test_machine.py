"""What needs more memory than there is is refused before it is built."""

from __future__ import annotations

import os

import pytest
import torch

from toeplens.model import decoder_config
from toeplens.utils import InputError
from toeplens.utils.machine import check_memory, fmt_bytes, is_out_of_memory, memory
from toeplens.utils.options import check_range


def test_memory_is_detected_and_bounds_allocations():
    assert 2**26 < memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    check_memory("this needs", memory())
    with pytest.raises(InputError, match=r"^this needs at least .*B of memory\. This machine has .*B\.$"):
        check_memory("this needs", memory() + 1)


@pytest.mark.parametrize(
    ("count", "words"), [(0, "1 MB"), (10**8, "100 MB"), (1_250_000_000, "1.2 GB"), (10**14, "100 TB"), (10**30, None)]
)
def test_sizes_are_formatted(count: int, words: str | None):
    assert fmt_bytes(count) == (words or f"{10**18} TB")


def test_out_of_range_numbers_are_named():
    check_range("seeds", [1, 9], 1, 9)
    for given in (0, [3, 10], 10**5000):
        with pytest.raises(InputError, match=r"^seeds must be from 1 to 9, got .*\.$"):
            check_range("seeds", given, 1, 9)


@pytest.mark.parametrize("sizes", [{"d_model": 10**9}, {"max_len": 10**9}])
def test_a_model_that_exceeds_memory_is_refused_before_it_is_built(sizes: dict[str, int]):
    with pytest.raises(InputError, match=r"model: these sizes need at least .* of memory"):
        decoder_config(encoding="learned", **sizes)
    with pytest.raises(InputError, match="1000000000"):
        decoder_config(**dict.fromkeys(sizes, 10**23))
    with pytest.raises(InputError, match=r"num_layers(:| must) "):
        decoder_config(num_layers=100_000)


def test_out_of_memory_errors_are_recognized():
    full = ["DefaultCPUAllocator: can't allocate memory", "CUDA out of memory.", "not enough memory: you tried"]
    assert all(is_out_of_memory(RuntimeError(words)) for words in full)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError())
    assert not is_out_of_memory(RuntimeError("sizes do not match"))
    assert not is_out_of_memory(ValueError("out of memory"))
