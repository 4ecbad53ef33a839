"""A model with an installed encoding is captured, audited and changed like any other: in memory, saved and opened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.hf.models import calls_in, tiny
from tests.hosts.families import FAMILIES, model_with_encoding
from torch import Tensor

from toeplens.backends.hf import Change, capture, capture_attention, intervene, load_model
from toeplens.studies import audit
from toeplens.utils import InputError

TOKENS = torch.randint(4, 31, (9, 10), generator=torch.Generator().manual_seed(3))
INPUTS = {"input_ids": TOKENS}


def logits(model: Any, *changes: Change) -> Tensor:
    with torch.no_grad(), intervene(model, changes):
        return model(TOKENS).logits


def measured_values(found: Any) -> list[dict[str, float]]:
    """What was measured of each head."""
    return [{key: x for key, x in vars(head).items() if isinstance(x, float)} for head in found.heads]


CASES = [("Llama", name) for name in ("rope", "t5", "cope", "urpe", "sinusoidal")]
CASES += [("Gemma 3", "stick-breaking"), ("BLOOM", "shaw"), ("BLOOM", "rope+fox"), ("GPT-2", "pope")]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_saved_model_has_the_same_audit(family: str, name: str, tmp_path: Path) -> None:
    """And both are of the weights that the model gives when it is asked for them."""
    model = model_with_encoding(name, family)
    expected_audit = audit(model, TOKENS, effects="none")
    model.save_pretrained(tmp_path)
    reloaded = load_model(str(tmp_path), device="cpu")
    assert (reloaded.unused, reloaded.missing) == ((), ())
    actual = audit(reloaded, TOKENS, effects="none")
    assert measured_values(actual) == [
        pytest.approx(each, abs=1e-6, rel=1e-5) for each in measured_values(expected_audit)
    ]
    assert actual.layers[0].position == expected_audit.layers[0].position
    with torch.no_grad():
        weights = model(TOKENS, output_attentions=True).attentions
    assert len(weights) == 2
    for head in expected_audit.heads:
        own = weights[head.layer][:, head.head].diagonal(offset=-1, dim1=-2, dim2=-1).mean().item()
        assert head.previous == pytest.approx(own, abs=1e-5)


def test_an_installed_bias_equals_a_bias_in_the_mask() -> None:
    """Slopes of ALiBi for 4 heads: 2^-2, 2^-4, 2^-6, 2^-8."""
    offsets = torch.arange(10)[:, None] - torch.arange(10)
    mask = -(torch.tensor([2.0**-2, 2**-4, 2**-6, 2**-8])[:, None, None] * offsets)
    mask = mask.masked_fill(offsets < 0, torch.finfo(torch.float32).min).expand(9, -1, -1, -1)
    by_hand = INPUTS | {"attention_mask": mask, "position_ids": torch.zeros_like(TOKENS)}
    plain = tiny(FAMILIES["Llama"][0], **FAMILIES["Llama"][1])
    plain.set_attn_implementation("eager")
    for ours, theirs in zip(calls_in(model_with_encoding("alibi"), INPUTS), calls_in(plain, by_hand), strict=True):
        torch.testing.assert_close(ours.logits(), theirs.logits(), atol=1e-5, rtol=1e-5)
        assert ours.bias_by_offset() is not None
        assert (ours.encoding, theirs.encoding) == ("alibi", None)


@pytest.mark.parametrize("name", ["alibi", "cope"])
def test_terms_that_do_not_match_the_encoding_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = capture.attention_components

    def wrong(*args: Any, **kwargs: Any) -> Any:
        actual = own(*args, **kwargs)
        assert actual.bias is not None
        return replace(actual, bias=1.1 * actual.bias)

    monkeypatch.setattr(capture, "attention_components", wrong)
    with pytest.raises(InputError, match=r"the attention of model.layers.0.self_attn \(LlamaAttention\) was not under"):
        capture_attention(model_with_encoding(name), INPUTS, lambda call: None)


def test_changes_apply_to_the_installed_encoding() -> None:
    none = logits(model_with_encoding("nope"))
    both = range(2)
    for name, change in (("alibi", {"bias": False}), ("rope", {"speed": 0.0}), ("partial-rope", {"speed": 0.0})):
        changed = logits(model_with_encoding(name), *(Change(layer=layer, **change) for layer in both))
        torch.testing.assert_close(changed, none, atol=2e-5, rtol=1e-5)
    rotated, fox = model_with_encoding("rope+fox"), model_with_encoding("fox")
    fox.toeplens_encodings.load_state_dict(
        {key.replace("parts.1.", ""): x for key, x in rotated.toeplens_encodings.state_dict().items()}
    )
    stopped = logits(rotated, *(Change(layer=layer, speed=0.0) for layer in both))
    torch.testing.assert_close(stopped, logits(fox), atol=2e-5, rtol=1e-5)
    cope = model_with_encoding("cope")
    for change, said in (
        ({"speed": 0.0}, "speed: the rotation of .* is unknown"),
        ({"bias": False}, "bias: the bias of .* cannot be removed"),
        ({"attention": "positional"}, "attention: logits have no positional and symbolic parts"),
    ):
        with pytest.raises(InputError, match=f"^{said}.* encoding cope changes the logits by more than"):
            logits(cope, Change(layer=0, **change))
    silent = logits(cope, Change(layer=0, output="zero"))
    cope.model.layers[0].self_attn.o_proj.weight.data.zero_()
    torch.testing.assert_close(silent, logits(cope), atol=1e-5, rtol=1e-5)
