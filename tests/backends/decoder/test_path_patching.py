"""Cut paths against the plain pass, against a silent head, and against hooks that take the head off by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.lens.models import decoder, logits_without_heads
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.backends.decoder.path_patching import HeadPath, cut_paths, iter_path_logits, paths_from
from toeplens.model import Decoder

SIZES: dict[str, Any] = {"vocab_size": 17, "d_model": 24, "d_ff": 32, "num_layers": 4, "num_heads": 3, "max_len": 11}
KINDS: list[dict[str, Any]] = [
    {"encoding": "rope"},
    {"encoding": "alibi"},
    {"encoding": "t5", "readout": "mean"},
    {"encoding": "mla", "num_heads": 4},
    {"encoding": "sinusoidal", "final_norm": False},
    {"encoding": "rope", "protocol": "released"},
    {"encoding": "rope", "parallel": True},
]


def make_model(kind: dict[str, Any]) -> Decoder:
    return decoder(seed=5, noise=0.3, **SIZES | kind)


def texts(model: Decoder) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 17, (5, 11), generator=generator)
    return tokens, torch.tensor([11, 11, 8, 5, 10]) if model.config.pad_mask else torch.full((5,), 11)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
@pytest.mark.parametrize("head", [(0, 0), (1, 2), (3, 1)])
def test_cutting_no_path_changes_nothing_and_all_paths_ablates_the_head(
    kind: dict[str, Any], head: tuple[int, int]
) -> None:
    model = make_model(kind)
    tokens, lengths = texts(model)
    plain = logits_without_heads(model, (tokens, tokens, lengths), [])
    torch.testing.assert_close(cut_paths(model, tokens, lengths, head, []), plain, rtol=1e-9, atol=1e-9)
    silent = logits_without_heads(model, (tokens, tokens, lengths), [head])
    actual = cut_paths(model, tokens, lengths, head, paths_from(model, head[0]))
    torch.testing.assert_close(actual, silent, rtol=1e-7, atol=1e-8)


def logits_by_hooks(model: Decoder, tokens: Tensor, lengths: Tensor, head: tuple[int, int], path: HeadPath) -> Tensor:
    """One path cut by hooks on the modules: what the reader is given has the head's part taken off."""
    head_output: list[Tensor] = []
    changed: list[Tensor] = []
    size = model.config.d_model // model.config.num_heads
    columns = slice(head[1] * size, (head[1] + 1) * size)

    def keep(module: nn.Module, given: tuple[Tensor], out: Tensor) -> None:
        head_output.append(F.linear(given[0][..., columns], module.weight[:, columns]))  # type: ignore[index]

    def without(module: Any, given: tuple[Tensor], out: Tensor) -> Tensor:
        return F.layer_norm(given[0] - head_output[0], module.normalized_shape, module.weight, module.bias, module.eps)

    def splice(module: Any, given: tuple[Tensor], out: Tensor) -> Tensor:
        parts, others = list(out.chunk(3, -1)), F.linear(changed[-1], module.weight, module.bias).chunk(3, -1)
        place = ("queries", "keys", "values").index(path.reader)
        parts[place] = others[place]
        return torch.cat(parts, -1)

    hooks: list[tuple[Any, Callable[..., Any]]] = [(model.block(head[0]).attention.out, keep)]
    if path.reader == "ffn":
        hooks.append((model.block(path.layer).norm_ffn, without))
    elif path.reader == "readout":
        hooks.append((model.final_norm, without))
    else:
        block = model.block(path.layer)
        hooks += [(block.norm_attention, lambda *given: changed.append(without(*given))), (block.attention.qkv, splice)]
    handles = [module.register_forward_hook(run) for module, run in hooks]
    try:
        with torch.no_grad():
            return model(tokens, lengths, fused=False)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("kind", [{"encoding": "rope", "readout": "mean"}, {"encoding": "alibi", "readout": "mean"}])
def test_cutting_one_path_matches_module_hooks(kind: dict[str, Any]) -> None:
    model = make_model(kind)  # the mean is read, so that every layer computes all positions
    tokens, lengths = texts(model)
    head = (1, 2)
    plain = model(tokens, lengths)
    for path in paths_from(model, 1):
        actual = cut_paths(model, tokens, lengths, head, [path])
        torch.testing.assert_close(actual, logits_by_hooks(model, tokens, lengths, head, path), rtol=1e-7, atol=1e-8)
        assert not torch.allclose(actual, plain, rtol=1e-4, atol=1e-5), f"{path} matters"


def test_the_paths_are_the_existing_ones() -> None:
    model = make_model({"encoding": "rope"})
    assert paths_from(model, 3) == [HeadPath(3, "ffn"), HeadPath(4, "readout")]
    assert len(paths_from(model, 1)) == 2 + 2 * 4
    released = make_model({"encoding": "rope", "protocol": "released"})
    assert {path.reader for path in paths_from(released, 0)} == {"queries", "ffn", "readout"}
    parallel = make_model({"encoding": "rope", "parallel": True})
    assert paths_from(parallel, 2) == paths_from(model, 2)[1:]
    tokens, lengths = texts(model)
    assert len(list(iter_path_logits(model, tokens, lengths, (1, 0)))) == 2 + len(paths_from(model, 1))
