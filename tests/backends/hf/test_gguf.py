"""GGUF files: the model that is read is the one that was written, and what is no whole file is one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.backends.hf.test_load import LLAMA, TOKENS, random_model, save_checkpoint

from toeplens.backends.hf import checkpoints, load_model
from toeplens.backends.hf.checkpoints import QuantisedWeights, read_gguf
from toeplens.studies import audit
from toeplens.utils import EnvironmentFailure, InputError

gguf = pytest.importorskip("gguf")

WIDE = LLAMA | {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def _halves_to_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as llama.cpp turns them: a pair's two dimensions next to each other."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(model: Any, path: Path, change: Callable[[Any], None] = lambda writer: None, small: bool = True) -> Path:
    """A Llama as a GGUF file: matrices of the layers in 8 bits (or as they are), the rest as they are."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    change(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    turned = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for key, x in model.state_dict().items():
        name, weight, part = names.get_name(key, try_suffixes=(".weight",)), x.numpy(), key.split(".")[-2]
        weight = _halves_to_pairs(weight, turned[part]) if part in turned else weight
        kind = gguf.GGMLQuantizationType.Q8_0 if small and "blk" in name and weight.ndim == 2 else None
        data = weight if kind is None else gguf.quantize(weight, kind)
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("by", ["file", "folder"])
def test_a_gguf_model_round_trips(tmp_path: Path, by: str) -> None:
    model = random_model("LlamaForCausalLM", **WIDE)
    path = write_gguf(model, tmp_path / "some.gguf", small=False)
    actual = load_model(str(path if by == "file" else tmp_path), device="cpu")
    torch.testing.assert_close(logits(actual.model), logits(model))
    assert actual.missing == actual.unused == ()
    assert str(actual.quantised) == f"GGUF, dequantised from F32 ({len(model.state_dict())} tensors)"


def test_8_bit_weights_are_close_and_reported(tmp_path: Path) -> None:
    model = random_model("LlamaForCausalLM", **WIDE)
    path = write_gguf(model, tmp_path / "some.gguf")
    actual = load_model(str(path), dtype="float64", device="cpu")
    far = (logits(actual.model) - logits(model)).abs().max() / logits(model).abs().max()
    assert 1e-5 < far < 0.05
    assert actual.model.dtype == torch.float64
    audited = audit(path, TOKENS, effects="none", device="cpu")
    assert audited.about["weights"] == "GGUF, dequantised from Q8_0 (14 tensors), F32 (7)"
    assert audited.about["model"].endswith("/some.gguf")
    assert audited.about["weights"] in audited.page().html()
    assert audit(save_checkpoint(model, tmp_path / "own"), TOKENS, effects="none").about["weights"] is None


def test_a_config_takes_precedence_over_a_gguf_file(tmp_path: Path) -> None:
    model = random_model("LlamaForCausalLM", **WIDE)
    write_gguf(model, save_checkpoint(model, tmp_path) / "some.gguf")
    assert load_model(str(tmp_path), device="cpu").quantised is None


def test_one_of_several_files_must_be_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"^model: .* contains 2 \.gguf files\. Name one of them, such as .*a\.gg"):
        load_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.9])
def test_a_truncated_file_is_one_sentence(tmp_path: Path, share: float) -> None:
    content = write_gguf(random_model("LlamaForCausalLM", **WIDE), tmp_path / "some.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: int(share * len(content)) + (share > 0) * 4])
    with pytest.raises(InputError, match=r"^model: .*cut\.gguf is (damaged or truncated|not a GGUF file: .*)\.$"):
        load_model(str(tmp_path / "cut.gguf"), device="cpu")


def test_unsupported_architectures_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "clip")
    writer.add_block_count(1)
    writer.add_tensor("a", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_gguf(tmp_path / "odd.gguf") == QuantisedWeights("clip", (("F32", 1),))
    with pytest.raises(InputError, match=r"odd\.gguf could not be loaded: .*clip.*not supported"):
        load_model(str(tmp_path / "odd.gguf"), device="cpu")


def test_a_missing_gguf_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(checkpoints, "_GGUF_PACKAGES", ("no_such_package",))
    with pytest.raises(
        EnvironmentFailure, match=r"^no_such_package is not installed\. Run: pip install 'toeplens\[gguf\]'"
    ):
        load_model(str(tmp_path / "some.gguf"), device="cpu")
