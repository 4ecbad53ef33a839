"""The rotation read from a layer is the one that the model itself applies, of whatever kind, or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.architectures.models import small_model
from tests.backends.hf.models import GPT, GROUPED, NARROW, T5, calls_in, tiny
from torch import Tensor

from toeplens.backends import DecoderSource
from toeplens.lens import (
    behaviour,
    frequency_use,
    permutation_scores,
    rope,
    rotary_offsets,
    rotation_of,
    toeplitz_profile,
)
from toeplens.model import Decoder, decoder_config
from toeplens.studies import audit
from toeplens.utils import InputError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
MODELS = Path(__file__).parents[3] / "models"
# every way in which models rotate: partly, neighbouring or distant pairs, the last dimensions, reordered, scaled
KINDS = (
    *("llama", "qwen3", "gemma2", "gemma3_text", "gpt_neox", "gptj", "phi", "cohere", "glm", "falcon", "deepseek_v2"),
    *("deepseek_v3", "gpt_oss", "llama+yarn", "llama+llama3", "llama+linear", "llama+dynamic", "stablelm", "phi3"),
)


def assert_rotates_as(model: Any, inputs: dict[str, Tensor]) -> None:
    """Every call's queries and keys, from those before it; up to rounding in float32."""
    for call in calls_in(model, inputs):
        rotation = rotation_of(model, call.layer, inputs["input_ids"])
        assert call.unrotated is not None
        for before, after in zip(call.unrotated, (call.q, call.k), strict=True):
            allowed = 1e-5 * float(after.abs().max())
            torch.testing.assert_close(rotation.rotate(before).float(), after, rtol=0, atol=allowed)
            torch.testing.assert_close(rotation.rotate(after, inverse=True).float(), before, rtol=0, atol=allowed)
        assert (rotation.head_dim, rotation.num_heads) == (call.q.shape[-1], call.q.shape[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rotation_is_the_models_own(kind: str) -> None:
    """Also on longer sequences than that of the pass that it was read from."""
    model, random = small_model(kind), torch.Generator().manual_seed(0)
    assert_rotates_as(model, {"input_ids": torch.randint(16, 96, (2, 48), generator=random)})
    inputs = {"input_ids": torch.randint(16, 96, (1, 16), generator=random)}
    call, rotation = calls_in(model, inputs)[0], rotation_of(model, 0)
    assert call.unrotated is not None
    torch.testing.assert_close(
        rotation.rotate(call.unrotated[0]).float(), call.q, rtol=0, atol=1e-5 * float(call.q.abs().max())
    )


@pytest.mark.parametrize(
    ("kind", "pairing", "after", "first", "pairs"),
    [
        ("llama", "half", None, 0, 8),
        ("gptj", "interleaved", None, 0, 4),
        ("cohere", "interleaved", None, 0, 8),
        ("gpt_neox", "half", None, 0, 2),
        ("phi", "half", None, 0, 4),
        ("deepseek_v2", "interleaved", None, 16, 4),
        ("deepseek_v3", "interleaved", "half", 16, 4),
    ],
)
def test_which_dimensions_form_pairs(kind: str, pairing: str, after: str | None, first: int, pairs: int) -> None:
    rotation = rotation_of(small_model(kind), 1)
    assert (rotation.pairing, rotation.pairing_after, rotation.first, rotation.num_pairs) == (
        pairing,
        after,
        first,
        pairs,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_are_the_models_table(dtype: torch.dtype) -> None:
    """Bit for bit where it has one, of local and of global layers, scaled and not."""
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled |= {"original_max_position_embeddings": 16, "rope_theta": 10000.0}
    model = tiny("LlamaForCausalLM", **GROUPED | {"rope_parameters": scaled}).to(dtype)
    assert torch.equal(rotation_of(model, 1).frequencies, model.model.rotary_emb.inv_freq.double())
    assert not torch.allclose(rotation_of(model, 1).frequencies, rope(dim=8, layout="half").frequencies, rtol=0.1)
    layers = {"layer_types": ["sliding_attention", "full_attention"]}
    gemma = tiny("Gemma3ForCausalLM", **NARROW | layers).to(dtype)
    local, wide = (rotation_of(gemma, layer).frequencies for layer in (0, 1))
    assert torch.equal(local, gemma.model.rotary_emb.sliding_attention_inv_freq.double())
    assert torch.equal(wide, gemma.model.rotary_emb.full_attention_inv_freq.double())
    assert rotation_of(gemma, 0).magnitude == 1.0
    assert rotation_of(small_model("llama+yarn").to(dtype), 0).magnitude == pytest.approx(1.1386, abs=2e-3)


def test_measured_frequencies_are_those_of_the_formula() -> None:
    """GPT-J has no table of frequencies; 1e-8, from 64 tokens in float32."""
    model = tiny("GPTJForCausalLM", **GPT | {"rotary_dim": 4})
    expected = rope(dim=8, rotary_dim=4, layout="interleaved")
    torch.testing.assert_close(rotation_of(model, 1).frequencies, expected.frequencies, rtol=0, atol=1e-8)


def test_a_rotation_that_depends_on_the_length_is_read_from_given_tokens() -> None:
    model = small_model("llama+dynamic")
    short, long = (rotation_of(model, 0, torch.arange(count) % 90).frequencies for count in (16, 4096))
    assert not torch.allclose(short, long, rtol=1e-3)


@pytest.mark.parametrize(
    ("made", "arguments", "sentence"),
    [
        (("GPT2LMHeadModel", GPT), (0,), "layer: layer 0 of GPT2LMHeadModel does not rotate queries and keys"),
        (
            ("LlamaForCausalLM", GROUPED),
            (2,),
            "layer must be from 0 to 1, the layers of LlamaForCausalLM with atten.*, got 2",
        ),
        (("LlamaForCausalLM", GROUPED), (-1,), "layer must be from 0 to 1, "),
        (
            ("LlamaForCausalLM", GROUPED),
            (0, torch.tensor([40])),
            "model: LlamaForCausalLM does not run on these tokens",
        ),
        (("T5ForConditionalGeneration", T5), (0,), "side must be one of decoder, encoder"),
        (("HunYuanDenseV1ForCausalLM", NARROW), (0,), "layer: how layer 0 of .* is not known. .* are changed before"),
    ],
)
def test_other_layers_are_refused_in_one_sentence(made: Any, arguments: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{sentence}"):
        rotation_of(tiny(made[0], **made[1]), *arguments)


def test_only_models_of_transformers_are_read(tmp_path: Path) -> None:
    model = Decoder(decoder_config(vocab_size=9, d_model=16, num_heads=2, max_len=8))
    for other in (model, DecoderSource(model)):
        with pytest.raises(InputError, match=r"^model must be a transformers.PreTrainedModel"):
            rotation_of(other, 0)
    llama = tiny("LlamaForCausalLM", **GROUPED)
    llama.save_pretrained(tmp_path)
    assert torch.equal(rotation_of(str(tmp_path), 0).frequencies, rotation_of(llama, 0).frequencies)


def capture_interface(model: Any, tokens: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Queries and keys after the rotation, [B, H, N, d], as they reach the attention of transformers."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    captured: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(module: Any, q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Any:
        captured[module.layer_idx] = q, k
        return sdpa_attention_forward(module, q, k, *rest, **options)

    transformers.AttentionInterface.register("captured", attend)
    transformers.AttentionMaskInterface.register("captured", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    before = model.config._attn_implementation
    model.set_attn_implementation("captured")
    with torch.no_grad():
        model(tokens)
    model.set_attn_implementation(before)
    return captured[layer]


@pytest.mark.heavy
@pytest.mark.parametrize("layer", [0, 14, 29])
def test_trained_queries_and_keys_give_the_same_before_and_after_the_rotation(layer: int) -> None:
    """SmolLM2 on 256 tokens: what its projections return, what reaches its attention, and an audit. float32 angles of
    up to 255 radians are off by 1e-5."""
    if not (path := MODELS / "smollm2").exists():
        pytest.skip(f"{path} is not there: make real-models fetches it")
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    tokens = torch.randint(100, 40_000, (2, 256), generator=torch.Generator().manual_seed(1))
    attention, captured, d = model.model.layers[layer].self_attn, dict[str, Tensor](), model.config.head_dim
    for name in ("q_proj", "k_proj"):
        getattr(attention, name).register_forward_hook(lambda _, __, out, name=name: captured.update({name: out}))
    rotated = capture_interface(model, tokens, layer)
    plain = [captured[name].unflatten(-1, (-1, d)).transpose(1, 2) for name in ("q_proj", "k_proj")]
    options = {"rotation": rotation_of(model, layer), "scale": d**-0.5, "layout": "bhnd"}
    record = audit(model, tokens, effects="none", layers=[layer])
    before, after = behaviour(*plain, **options), behaviour(*rotated, **options, rotated=True)
    for name in ("positional", "symbolic", "interaction"):
        expected = np.array([getattr(head, name) for head in record.heads])
        for found in (before, after):
            np.testing.assert_allclose(getattr(found, name), expected, rtol=0, atol=1e-4, err_msg=name)
    for measure in (frequency_use, permutation_scores):
        x, y = measure(*plain, **options), measure(*rotated, **options, rotated=True)
        for name in ("norms", "variance") if measure is frequency_use else ():
            np.testing.assert_allclose(getattr(x, name), getattr(y, name), rtol=1e-4)
        x, y = (found.shares.logits if measure is frequency_use else found.logits.positional for found in (x, y))
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-4)
    profiles = [toeplitz_profile(*plain, **options), toeplitz_profile(*rotated, **options, rotated=True)]
    profiles += [toeplitz_profile(*rotated, scale=d**-0.5, layout="bhnd")]
    for profile in profiles[1:]:
        torch.testing.assert_close(profile.variance_explained, profiles[0].variance_explained, rtol=0, atol=1e-4)
    del options["scale"]
    strengths = [rotary_offsets(*plain, **options).strength, rotary_offsets(*rotated, **options, rotated=True).strength]
    torch.testing.assert_close(*strengths, rtol=0, atol=1e-4)
