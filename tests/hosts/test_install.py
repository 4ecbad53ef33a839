"""A host is trained, copied, cast, compiled, saved, opened again and given back."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.backends.hf.models import GROUPED, INPUTS, full_state, tiny
from tests.hosts.families import FAMILIES, model_with_encoding
from torch import Tensor

from toeplens import hosts
from toeplens.backends.hf import Change, intervene
from toeplens.backends.hf.patches import AttentionPatch
from toeplens.utils import InputError

IDS = INPUTS["input_ids"]


def llama(family: str = "Llama") -> Any:
    return tiny(FAMILIES[family][0], **FAMILIES[family][1])


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def gradients(model: Any) -> list[Tensor]:
    """Of two passes, after both were made."""
    model.zero_grad()
    torch.manual_seed(0)
    more = {} if model.config.is_encoder_decoder else {"use_cache": False}
    losses = [model(ids, labels=ids, **more).loss for ids in (IDS, IDS[:1, 3:9])]
    sum(losses).backward()  # type: ignore[union-attr]
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("name", ["rope", "t5", "path"])
@pytest.mark.parametrize("family", ["Llama", "GPT-2", "BERT", "T5"])
def test_gradient_checkpointing_uses_the_right_pass(family: str, name: str) -> None:
    """Gradient checkpointing, with another pass between forward and backward."""
    if family == "BERT" and name == "path":
        pytest.skip("it is causal")
    model = model_with_encoding(name, family).double().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    plain = gradients(model)
    model.gradient_checkpointing_enable()
    recomputed = gradients(model)
    assert len(recomputed) == len(plain)
    for ours, theirs in zip(recomputed, plain, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.toeplens_encodings.parameters()) or name == "t5"


@pytest.mark.parametrize(
    ("name", "options"), [("fire", {}), ("rope", {"base": np.float32(500.0)}), ("t5", {"num_buckets": np.int64(8)})]
)
def test_a_saved_model_is_reopened_by_one_call(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = model_with_encoding(name, **options)
    model.save_pretrained(tmp_path)
    reloaded = hosts.load(tmp_path)
    assert logits(reloaded).equal(logits(model))
    hosts.uninstall(reloaded)
    reloaded.save_pretrained(tmp_path / "plain")
    with pytest.raises(InputError, match=r"has no toeplens encoding. Open it with from_pretrained"):
        hosts.load(tmp_path / "plain")


def test_uninstall_restores_the_model_bit_for_bit() -> None:
    for family in ("Llama", "GPT-2", "BLOOM", "T5"):
        model = llama(family)
        inputs = dict(INPUTS) | ({"decoder_input_ids": IDS} if family == "T5" else {})
        before, names = model(**inputs)[0], list(model.state_dict())
        hosts.install(model, "nope")
        hosts.uninstall(model)  # the interface's table keeps our name from here on
        kept = full_state(model)
        hosts.install(model, "fox")
        model(**inputs)
        hosts.uninstall(model)
        assert full_state(model) == kept
        assert list(model.state_dict()) == names
        assert model(**inputs)[0].equal(before)


@pytest.mark.heavy
def test_the_model_compiles_in_one_graph() -> None:
    command = [sys.executable, "-m", "tests.hosts.compiling", "rope", "fire", "fox"]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("rope", {"layers": [5]}, r"^layers must be different indices from 0 to 1, got \[5\]"),
    ("sinusoidal", {"layers": [0]}, r"^layers must not be set: its vectors enter at the input .*, got \[0\]"),
    ("roap", {}, r"^encoding must be .*, got 'roap'"),
    ("rope", {"bass": 1.0}, r"option of encoding 'rope'"),
    ("mla", {}, r"^encoding: 'mla' needs queries and keys of 12 dimensions"),
]


@pytest.mark.parametrize(("name", "options", "sentence"), REFUSED)
def test_a_refused_installation_leaves_the_model_unchanged(name: str, options: dict[str, Any], sentence: str) -> None:
    model = llama()
    before, names = logits(model), list(model.state_dict())
    with pytest.raises(InputError, match=sentence):
        hosts.install(model, name, **options)
    assert logits(model).equal(before)
    assert list(model.state_dict()) == names


def test_double_missing_and_too_short_encodings_are_refused() -> None:
    model = llama("GPT-2")
    with pytest.raises(
        InputError, match=r"^layers must not be set: the model's own positions enter at the input .*, got \[0\]"
    ):
        hosts.install(model, "rope", layers=[0])
    with pytest.raises(InputError, match="no encoding is installed"):
        hosts.uninstall(model)
    hosts.install(model, "learned", max_len=8)
    with pytest.raises(InputError, match=r"positions must be from 0 to .*, got 11"):
        model(IDS)
    with pytest.raises(InputError, match="an encoding is already installed"):
        hosts.install(model, "rope")
    with pytest.raises(InputError, match=r"^model must be a transformers.PreTrainedModel, got a Linear"):
        hosts.install(torch.nn.Linear(2, 2), "rope")


def test_a_rotation_is_applied_by_the_models_own_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then its keys are cached turned, and its attention is torch's; what the model cannot do is done by ours."""
    requests: list[int] = []
    attend = AttentionPatch.attend
    monkeypatch.setattr(
        AttentionPatch, "attend", lambda self, *a, **k: (requests.append(self.layer), attend(self, *a, **k))[1]
    )
    tried: list[tuple[str, dict[str, Any], bool]] = [
        ("rope", {}, True),
        ("hope", {}, True),
        ("rope", {"pairing": "interleaved"}, False),
        ("partial-rope", {"rotary_pct": 0.5}, False),
        ("xpos", {}, False),
        ("rope-dynamic", {}, False),
        ("rope+alibi", {}, False),
    ]
    for name, options, by_host in tried:
        model = model_with_encoding(name, **options)
        requests.clear()
        logits(model)
        assert requests == ([] if by_host else [0, 1]), name


def test_input_vectors_reach_encoders_and_a_replaced_embedding() -> None:
    model = tiny("T5EncoderModel", **FAMILIES["T5"][1])
    hosts.install(model, "nope")
    plain = model(IDS)[0]
    hosts.uninstall(model)
    hosts.install(model, "sinusoidal")
    assert float((model(IDS)[0] - plain).detach().abs().max()) > 1e-3
    decoder = model_with_encoding("sinusoidal")
    expected = logits(decoder)
    decoder.set_input_embeddings(copy.deepcopy(decoder.get_input_embeddings()))
    assert logits(decoder).equal(expected)
    with torch.no_grad():
        vectors = decoder.get_input_embeddings()(IDS)
        assert decoder(inputs_embeds=vectors).logits.equal(expected)


@pytest.mark.parametrize("name", ["nope", "alibi", "rope", "path"])
def test_a_custom_mask_alone_decides_visibility(name: str) -> None:
    """All tokens of the text, later ones too, in a causal model; one that hides in part is refused."""
    model = model_with_encoding(name).double()
    full = torch.ones(2, 1, 12, 12, dtype=torch.bool)
    with torch.no_grad():
        seen = model(IDS, attention_mask=full, use_cache=False).logits
        changed = model(
            torch.cat((IDS[:, :-1], (IDS[:, -1:] + 1) % 31), 1), attention_mask=full, use_cache=False
        ).logits
    assert float((seen - changed)[:, :-1].abs().max()) > 1e-3
    if name == "alibi":
        with pytest.raises(InputError, match=r"^attention_mask must contain only 0 .* and the lowest number"):
            model(IDS, attention_mask=-0.5 * full.double(), use_cache=False)


@pytest.mark.parametrize("name", ["fox", "path"])
def test_a_patched_model_keeps_no_state_of_a_pass(name: str) -> None:
    """So it can be copied and pickled after one with gradients."""
    model = model_with_encoding(name)
    out = model(IDS).logits
    copied = copy.deepcopy(model)
    assert logits(copied).equal(out.detach())
    assert pickle.loads(pickle.dumps(model))(IDS).logits.equal(out)


def test_several_threads_can_call_one_model() -> None:
    model = model_with_encoding("fox")
    texts = [IDS[:, :length] for length in (5, 7, 9, 12)] * 4
    with torch.no_grad():
        expected = [model(text).logits for text in texts]
        for _ in range(3):
            with ThreadPoolExecutor(4) as pool:
                actual = list(pool.map(lambda text: model(text).logits, texts))
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(actual, expected, strict=True))


def test_layers_of_equal_head_size_can_be_selected() -> None:
    """Gemma 4's layers with full attention have wider heads than those with windows."""
    sizes = GROUPED | {"head_dim": 8, "num_hidden_layers": 4, "sliding_window": 6, "hidden_size_per_layer_input": 8}
    sizes |= {"vocab_size_per_layer_input": 31, "layer_types": ["sliding_attention", "full_attention"] * 2}
    wide = {f"{layer:02d}": {"head_dim": 16} for layer in (1, 3)}
    model = tiny("Gemma4ForCausalLM", **sizes, per_layer_config=wide)
    for layers in ([0, 2], [1, 3]):
        with intervene(model, [Change(layer=layer, speed=0.0) for layer in layers]):
            stopped = logits(model)
        hosts.install(model, "nope", layers=layers)
        assert torch.allclose(logits(model), stopped, atol=1e-5)
        hosts.uninstall(model)
        assert not torch.allclose(logits(model), stopped, atol=1e-2)
    for wrong in (None, [0, 1]):
        with pytest.raises(InputError, match=r"^layers must have heads of one size .* layers \[0, 2\]"):
            hosts.install(model, "nope", layers=wrong)


def test_two_models_sharing_a_config_take_one_encoding() -> None:
    first = llama()
    second = type(first)(first.config)
    hosts.install(first, "alibi")
    with pytest.raises(InputError, match=r"^model: its configuration is shared"):
        hosts.install(second, "alibi")
