"""Checks of numbers: precision far out, casts, gradients, saved state, memory, compilation."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from toeplens.encodings.attention import attention_logits
from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.conformance.behaviour import agree, demand
from toeplens.encodings.conformance.specimen import Specimen, apart, randomise
from toeplens.ground import InputError

FAR = 1_048_576
# allowed relative error of a logit against float64: a few dozen roundings; a phase formed in the dtype itself would be
# off by 0.06 (float32) or by anything (bfloat16) at position FAR
ROUNDING = {torch.float32: 3e-5, torch.bfloat16: 6e-2}


def precision(specimen: Specimen) -> str:
    """Logits in float32 and bfloat16 are as near to float64's at position 1,048,576 as at 0."""
    worst = dict.fromkeys(ROUNDING, 0.0)
    refused = 0
    limit = specimen.encoding.max_len if specimen.encoding.bounded else FAR + 1
    windows = [torch.arange(12) + start for start in (0, 1000, FAR - 11)]
    windows.append(torch.tensor([0, 1, 100, 4097, 65_537, FAR]))
    for window in windows:
        if int(window.max()) >= limit:
            continue
        p = specimen.encoding.place(window)
        for dtype, allowed in ROUNDING.items():
            x, like = specimen.content(1, len(window), dtype), specimen.like(dtype)
            try:
                ours = _logits(specimen, x, p, like, dtype)
                exact = _logits(specimen, x, p, specimen.like(dtype).double(), None)
            except InputError:
                refused += 1  # said in a sentence: nothing wrong was computed
                continue
            past = exact.isfinite()
            error = agree(ours[past], exact[past], allowed, f"{str(dtype)[6:]} at positions {window[:2].tolist()}...")
            worst[dtype] = max(worst[dtype], error)
    far = f"up to {min(limit - 1, FAR):,}" + (f", {refused} windows refused" if refused else "")
    return f"float32 {worst[torch.float32]:.0e}, bfloat16 {worst[torch.bfloat16]:.0e} {far}"


def _logits(specimen: Specimen, x: Tensor, p: Tensor, like: PositionalEncoding, dtype: torch.dtype | None) -> Tensor:
    """Logits of the same rounded queries and keys, in ``dtype`` or (None) in float64."""
    q, k, _ = specimen.project(x)
    wide = (lambda y: y) if dtype else (lambda y: y.double())
    return attention_logits(wide(q), wide(k), **specimen.layer(wide(x), p, like))


def casts(specimen: Specimen) -> str:
    """`model.half()` and `.to(bfloat16)` round parameters and nothing else: phases and slopes stay what they were."""
    encoding = specimen.like(torch.float32)
    p = specimen.positions(12, 5000)
    x = specimen.content(2, 12, torch.float32)
    before = specimen.logits(x, p, encoding=encoding), encoding.kernel(torch.arange(5))
    state = copy.deepcopy(encoding.state_dict())
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        cast = copy.deepcopy(encoding).to(dtype).float()
        cast.load_state_dict(state)
        after = specimen.logits(x, p, encoding=cast), cast.kernel(torch.arange(5))
        agree(after[0], before[0], 1e-7, f"logits after a round trip through {dtype}")
        if before[1] is not None and after[1] is not None:
            agree(torch.view_as_real(after[1] + 0j), torch.view_as_real(before[1] + 0j), 1e-7, f"kernel after {dtype}")
    return "float16, bfloat16, float64 and back change no phase"


def gradients(specimen: Specimen) -> str:
    """Every parameter and the content receive finite gradients that are not all zero."""
    encoding = copy.deepcopy(specimen.encoding).train()
    start = 4 * encoding.max_len if encoding.length_dependent else 0  # where the length makes a difference
    p, x = specimen.positions(20, start), specimen.content(2, 20).requires_grad_()
    out = specimen.attend(x, p, encoding=encoding)
    (out * torch.randn_like(out)).sum().backward()
    named = {**dict(encoding.named_parameters()), "the content": x}
    for name, parameter in named.items():
        gradient = parameter.grad
        demand(gradient is not None, f"{name} receives no gradient")
        assert gradient is not None
        demand(bool(gradient.isfinite().all()), f"{name} receives a gradient that is not finite")
        demand(bool(gradient.any()), f"{name} receives a gradient of zero")
    return f"{len(named) - 1} parameters" if len(named) > 1 else "no parameters"


def state(specimen: Specimen) -> str:
    """An encoding is its options and its state dict: loaded into another one, it computes the same bits."""
    torch.manual_seed(99)
    other = randomise(specimen.build(), 98).double()
    other.load_state_dict(specimen.encoding.state_dict())
    p, x = specimen.positions(12), specimen.content(2, 12)
    demand(torch.equal(specimen.attend(x, p), specimen.attend(x, p, encoding=other)), "the loaded copy differs")
    return f"{len(specimen.encoding.state_dict())} tensors"


class _Largest(TorchDispatchMode):
    """Remembers the largest storage that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor):
                self.elements = max(self.elements, made.untyped_storage().nbytes() // made.element_size())
        return result


def memory(specimen: Specimen) -> str:
    """No tensor grows with the square of the length: fused attention for rotations, chunks of queries for the rest."""
    encoding = specimen.encoding
    sizes, lengths = {}, (1024, 2048)
    pairs = encoding.num_heads * lengths[0] * 64 * encoding.pair_width
    for length in lengths:
        if encoding.bounded and length > encoding.max_len:
            return "not looked at: its table is shorter"
        p = specimen.positions(length)
        x = specimen.content(1, length, torch.float32)
        like = specimen.like(torch.float32)
        with torch.no_grad(), _Largest() as largest:
            specimen.attend(x, p, encoding=like, at_once=pairs)
        sizes[length] = largest.elements
    growth = sizes[lengths[1]] / sizes[lengths[0]]
    demand(growth < 2.5, f"the largest tensor grows {growth:.1f}-fold as the length doubles: {sizes}")
    return f"the largest tensor grows {growth:.1f}-fold as the length doubles"


def compiled(specimen: Specimen) -> str:
    """torch.compile takes it in one graph, and gives the same numbers; 0 for queries that see no key there too."""
    encoding, length, pads = specimen.like(torch.float32), 12, 4
    p, x = specimen.positions(length), specimen.content(2, length, torch.float32)
    mask = (torch.arange(length) >= torch.tensor([[0], [pads]]))[:, None, None, :]

    def run(content: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        masked = specimen.attend(content, places, encoding=encoding, mask=mask)
        return specimen.attend(content, places, encoding=encoding), masked

    torch._dynamo.reset()
    try:
        (out, masked), wanted = torch.compile(run, backend="aot_eager", fullgraph=True)(x, p), run(x, p)
    finally:
        torch._dynamo.reset()
    difference = max(apart(out, wanted[0]), apart(masked, wanted[1]))
    demand(difference <= 1e-5, f"compiled and eager differ by {difference:.1e}")
    demand(not masked[1, :, :pads].any(), "compiled attention of a query that sees no key is not 0")
    return f"one graph, {difference:.0e}"
