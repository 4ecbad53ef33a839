"""Tensors that nnsight and TransformerLens captured give what an audit of the model does. They are stored, so that
neither needs to be installed; where one is, it captures them again.

    python -m tests.lens.test_own_tensors    with both installed: writes the stored arrays
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.builders import wrong_types
from torch import Tensor

from toeplens import lens
from toeplens.studies import Audit, audit

transformers = pytest.importorskip("transformers")

FILE = Path(__file__).parent / "data" / "captured.npz"
LAYER = 1
TOKENS = (torch.arange(24) * 7 % 11).view(2, 12)


@cache
def llama() -> Any:
    """Weights from a formula, so that they are the same whatever torch draws."""
    sizes = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            values = torch.sin(1.7 * torch.arange(weight.numel()) + number).view(weight.shape)
            weight.copy_(0.5 * values if weight.ndim > 1 else 1 + 0.1 * values)
    return model


@cache
def audited() -> Audit:
    return audit(llama(), TOKENS, effects="none")


def with_hooks() -> dict[str, Tensor]:
    """Plain PyTorch hooks on the projections."""
    model, captured, handles = llama(), dict[str, Tensor](), []
    for name in ("q_proj", "k_proj"):
        module = getattr(model.model.layers[LAYER].self_attn, name)
        handles.append(module.register_forward_hook(lambda _, __, out, name=name: captured.update({name: out})))
    with torch.no_grad():
        model(TOKENS)
    for handle in handles:
        handle.remove()
    return captured


def with_nnsight() -> dict[str, Tensor]:
    from nnsight import NNsight

    wrapped = NNsight(llama())
    with torch.no_grad(), wrapped.trace(TOKENS):
        attention = wrapped.model.layers[LAYER].self_attn
        q, k = attention.q_proj.output.save(), attention.k_proj.output.save()
    return {"q_proj": q, "k_proj": k}


def with_transformer_lens() -> dict[str, Tensor]:
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    model = transformers.LlamaForCausalLM(llama().config).eval()  # the bridge changes the modules of its model
    model.load_state_dict(llama().state_dict())
    bridge = build_bridge_from_module(model, "LlamaForCausalLM", hf_config=model.config)
    _, cache = bridge.run_with_cache(TOKENS)
    names = ("hook_q", "hook_k", "hook_rot_q", "hook_rot_k", "hook_pattern")
    return {name: cache[f"blocks.{LAYER}.attn.{name}"].detach() for name in names}


LIBRARIES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "nnsight": with_nnsight,
    "transformer_lens": with_transformer_lens,
}


def stored(library: str) -> dict[str, Tensor]:
    with np.load(FILE) as arrays:
        return {key.partition("/")[2]: torch.from_numpy(arrays[key]) for key in arrays if key.startswith(library)}


def assert_as_audited(found: Any, *names: str) -> None:
    """Up to rounding in float32."""
    for name in names:
        expected = [getattr(head, name) for head in audited().heads if head.layer == LAYER]
        np.testing.assert_allclose(getattr(found, name), expected, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_stored_arrays_are_what_the_installed_library_captures(library: str) -> None:
    pytest.importorskip(library)
    expected = stored(library)
    actual = LIBRARIES[library]()
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("library", ["torch", "nnsight"])
def test_projections_give_the_shares_of_an_audit(library: str) -> None:
    captured = with_hooks() if library == "torch" else stored(library)
    q, k = (captured[name].unflatten(-1, (-1, 8)) for name in ("q_proj", "k_proj"))
    found = lens.behaviour(q, k, rotation=lens.rotation_of(llama(), LAYER), layout="bnhd", scale=8**-0.5)
    assert_as_audited(found, "positional", "symbolic", "interaction")
    for name, value in with_hooks().items():
        torch.testing.assert_close(captured[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rotated", [False, True])
def test_a_cache_of_transformer_lens_gives_the_numbers_of_an_audit(rotated: bool) -> None:
    cache = stored("transformer_lens")
    q, k = (cache[f"hook_{'rot_' if rotated else ''}{name}"] for name in "qk")
    options: dict[str, Any] = {"rotation": lens.rope(dim=8, layout="half"), "layout": "bnhd", "rotated": rotated}
    assert_as_audited(lens.behaviour(q, k, **options, scale=8**-0.5), "positional", "symbolic", "interaction")
    use, profile = lens.frequency_use(q, k, **options), lens.toeplitz_profile(q, k, **options, scale=8**-0.5).pool()
    for head in (head for head in audited().heads if head.layer == LAYER):
        torch.testing.assert_close(use.norm_shares()[head.head].tolist(), list(head.norm_use), rtol=0, atol=1e-5)
        assert float(profile.variance_explained[head.head]) == pytest.approx(head.toeplitz_variance, abs=1e-5)


@wrong_types
def test_lists_are_accepted_as_lengths_bias_and_tokens() -> None:
    q, k = torch.randn(2, 2, 1, 4, 3)
    for measure in (lens.toeplitz_profile, lens.behaviour):
        lists, tensors = (
            measure(q, k, lengths=make([3, 4]), bias=make([0.0, 1.0, 2.0, 3.0])) for make in (list, torch.tensor)
        )
        assert repr(lists) == repr(tensors)
    weights = torch.eye(4).expand(2, 1, 4, 4)
    lists, tensors = (
        lens.patterns(weights, make([[1, 1, 2, 2]] * 2), lengths=make([3, 4])) for make in (list, torch.tensor)
    )
    assert repr(lists) == repr(tensors)


def test_patterns_of_a_cache_are_those_of_an_audit() -> None:
    names = ("previous", "first", "induction", "duplicate", "entropy", "distance", "current", "profile")
    assert_as_audited(lens.patterns(stored("transformer_lens")["hook_pattern"], TOKENS), *names)


if __name__ == "__main__":
    arrays = {f"{library}/{name}": x.numpy() for library, run in LIBRARIES.items() for name, x in run().items()}
    FILE.parent.mkdir(exist_ok=True)
    np.savez_compressed(FILE, **arrays)
