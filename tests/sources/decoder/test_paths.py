"""Cut paths against the plain pass, against a silent head, and against hooks that take the head off by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.lens.models import decoder, logits_without
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.model import Decoder
from toeplens.sources.decoder.paths import Path, cut_paths, each_path, paths_from

SIZES: dict[str, Any] = {"vocab_size": 17, "d_model": 24, "d_ff": 32, "num_layers": 4, "num_heads": 3, "max_len": 11}
KINDS: list[dict[str, Any]] = [
    {"encoding": "rope"},
    {"encoding": "alibi"},
    {"encoding": "t5", "readout": "mean"},
    {"encoding": "mla", "num_heads": 4},
    {"encoding": "sinusoidal", "final_norm": False},
    {"encoding": "rope", "protocol": "released"},
]


def made(kind: dict[str, Any]) -> Decoder:
    return decoder(seed=5, noise=0.3, **SIZES | kind)


def texts(model: Decoder) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 17, (5, 11), generator=generator)
    return tokens, torch.tensor([11, 11, 8, 5, 10]) if model.config.pad_mask else torch.full((5,), 11)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
@pytest.mark.parametrize("head", [(0, 0), (1, 2), (3, 1)])
def test_without_a_cut_it_is_the_plain_pass_and_with_every_path_cut_the_head_is_silent(
    kind: dict[str, Any], head: tuple[int, int]
) -> None:
    model = made(kind)
    tokens, lengths = texts(model)
    plain = logits_without(model, (tokens, tokens, lengths), [])
    torch.testing.assert_close(cut_paths(model, tokens, lengths, head, []), plain, rtol=1e-9, atol=1e-9)
    silent = logits_without(model, (tokens, tokens, lengths), [head])
    found = cut_paths(model, tokens, lengths, head, paths_from(model, head[0]))
    torch.testing.assert_close(found, silent, rtol=1e-7, atol=1e-8)


def by_hooks(model: Decoder, tokens: Tensor, lengths: Tensor, head: tuple[int, int], path: Path) -> Tensor:
    """One path cut by hooks on the modules: what the reader is given has the head's part taken off."""
    own: list[Tensor] = []
    changed: list[Tensor] = []
    size = model.config.d_model // model.config.num_heads
    columns = slice(head[1] * size, (head[1] + 1) * size)

    def keep(module: nn.Module, given: tuple[Tensor], out: Tensor) -> None:
        own.append(F.linear(given[0][..., columns], module.weight[:, columns]))  # type: ignore[index]

    def without(module: Any, given: tuple[Tensor], out: Tensor) -> Tensor:
        return F.layer_norm(given[0] - own[0], module.normalized_shape, module.weight, module.bias, module.eps)

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
def test_one_path_is_what_hooks_on_the_modules_take_off(kind: dict[str, Any]) -> None:
    model = made(kind)  # the mean is read, so that every layer computes all positions
    tokens, lengths = texts(model)
    head = (1, 2)
    plain = model(tokens, lengths)
    for path in paths_from(model, 1):
        found = cut_paths(model, tokens, lengths, head, [path])
        torch.testing.assert_close(found, by_hooks(model, tokens, lengths, head, path), rtol=1e-7, atol=1e-8)
        assert not torch.allclose(found, plain, rtol=1e-4, atol=1e-5), f"{path} matters"


def test_the_paths_are_those_that_are_there() -> None:
    model = made({"encoding": "rope"})
    assert paths_from(model, 3) == [Path(3, "ffn"), Path(4, "readout")]
    assert len(paths_from(model, 1)) == 2 + 2 * 4
    released = made({"encoding": "rope", "protocol": "released"})
    assert {path.reader for path in paths_from(released, 0)} == {"queries", "ffn", "readout"}
    tokens, lengths = texts(model)
    assert len(list(each_path(model, tokens, lengths, (1, 0)))) == 2 + len(paths_from(model, 1))
