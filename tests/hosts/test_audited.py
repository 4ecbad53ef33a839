"""A model with an installed encoding is captured, audited and changed like any other: in memory, saved and opened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hosts.families import FAMILIES, installed
from tests.sources.huggingface.models import calls_in, tiny
from torch import Tensor

from toeplens.ground import InputError
from toeplens.sources.huggingface import Change, capture, captured, intervened, load_model
from toeplens.studies import audit

TOKENS = torch.randint(4, 31, (9, 10), generator=torch.Generator().manual_seed(3))
INPUTS = {"input_ids": TOKENS}


def logits(model: Any, *changes: Change) -> Tensor:
    with torch.no_grad(), intervened(model, changes):
        return model(TOKENS).logits


def numbers(found: Any) -> list[dict[str, float]]:
    """What was measured of each head."""
    return [{key: x for key, x in vars(head).items() if isinstance(x, float)} for head in found.heads]


CASES = [("Llama", name) for name in ("rope", "t5", "cope", "urpe", "sinusoidal")]
CASES += [("Gemma 3", "stick-breaking"), ("BLOOM", "shaw"), ("BLOOM", "rope+fox"), ("GPT-2", "pope")]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_saved_model_has_the_audit_of_the_one_in_memory(family: str, name: str, tmp_path: Path) -> None:
    """And both are of the weights that the model gives when it is asked for them."""
    model = installed(name, family)
    made = audit(model, TOKENS, effects="none")
    model.save_pretrained(tmp_path)
    again = load_model(str(tmp_path), device="cpu")
    assert (again.left_over, again.missing) == ((), ())
    found = audit(again, TOKENS, effects="none")
    assert numbers(found) == [pytest.approx(each, abs=1e-6, rel=1e-5) for each in numbers(made)]
    assert found.layers[0].position == made.layers[0].position
    with torch.no_grad():
        weights = model(TOKENS, output_attentions=True).attentions
    assert len(weights) == 2
    for head in made.heads:
        own = weights[head.layer][:, head.head].diagonal(offset=-1, dim1=-2, dim2=-1).mean().item()
        assert head.previous == pytest.approx(own, abs=1e-5)


def test_an_installed_bias_is_the_same_written_into_a_mask() -> None:
    """Slopes of ALiBi for 4 heads: 2^-2, 2^-4, 2^-6, 2^-8."""
    offsets = torch.arange(10)[:, None] - torch.arange(10)
    mask = -(torch.tensor([2.0**-2, 2**-4, 2**-6, 2**-8])[:, None, None] * offsets)
    mask = mask.masked_fill(offsets < 0, torch.finfo(torch.float32).min).expand(9, -1, -1, -1)
    by_hand = INPUTS | {"attention_mask": mask, "position_ids": torch.zeros_like(TOKENS)}
    plain = tiny(FAMILIES["Llama"][0], **FAMILIES["Llama"][1])
    plain.set_attn_implementation("eager")
    for ours, theirs in zip(calls_in(installed("alibi"), INPUTS), calls_in(plain, by_hand), strict=True):
        torch.testing.assert_close(ours.logits(), theirs.logits(), atol=1e-5, rtol=1e-5)
        assert ours.bias_by_offset() is not None
        assert (ours.encoding, theirs.encoding) == ("alibi", None)


@pytest.mark.parametrize("name", ["alibi", "cope"])
def test_parts_that_are_not_what_the_encoding_did_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = capture.attention_parts

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        assert found.bias is not None
        return replace(found, bias=1.1 * found.bias)

    monkeypatch.setattr(capture, "attention_parts", wrong)
    with pytest.raises(InputError, match=r"the attention of model.layers.0.self_attn \(LlamaAttention\) was not under"):
        captured(installed(name), INPUTS, lambda call: None)


def test_changes_are_of_the_installed_encoding() -> None:
    none = logits(installed("nope"))
    both = range(2)
    for name, change in (("alibi", {"bias": False}), ("rope", {"speed": 0.0}), ("partial-rope", {"speed": 0.0})):
        changed = logits(installed(name), *(Change(layer=layer, **change) for layer in both))
        torch.testing.assert_close(changed, none, atol=2e-5, rtol=1e-5)
    rotated, fox = installed("rope+fox"), installed("fox")
    fox.toeplens_encodings.load_state_dict(
        {key.replace("parts.1.", ""): x for key, x in rotated.toeplens_encodings.state_dict().items()}
    )
    stopped = logits(rotated, *(Change(layer=layer, speed=0.0) for layer in both))
    torch.testing.assert_close(stopped, logits(fox), atol=2e-5, rtol=1e-5)
    cope = installed("cope")
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
