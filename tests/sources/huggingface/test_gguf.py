"""GGUF files: the model that is read is the one that was written, and what is no whole file is one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.sources.huggingface.test_load import LLAMA, TOKENS, built, saved

from toeplens.ground import EnvironmentFailure, InputError
from toeplens.sources.huggingface import checkpoints, load_model
from toeplens.sources.huggingface.checkpoints import Quantised, read_gguf
from toeplens.studies import audit

gguf = pytest.importorskip("gguf")

WIDE = LLAMA | {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def _halves_to_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as llama.cpp turns them: a pair's two dimensions next to each other."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def written(model: Any, path: Path, change: Callable[[Any], None] = lambda writer: None, small: bool = True) -> Path:
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
def test_the_model_is_the_one_that_was_written(tmp_path: Path, by: str) -> None:
    model = built("LlamaForCausalLM", **WIDE)
    path = written(model, tmp_path / "some.gguf", small=False)
    found = load_model(str(path if by == "file" else tmp_path), device="cpu")
    torch.testing.assert_close(logits(found.model), logits(model))
    assert found.missing == found.left_over == ()
    assert str(found.quantised) == f"GGUF, dequantised from F32 ({len(model.state_dict())} tensors)"


def test_weights_of_eight_bits_are_near_and_the_record_and_the_page_say_so(tmp_path: Path) -> None:
    model = built("LlamaForCausalLM", **WIDE)
    path = written(model, tmp_path / "some.gguf")
    found = load_model(str(path), dtype="float64", device="cpu")
    far = (logits(found.model) - logits(model)).abs().max() / logits(model).abs().max()
    assert 1e-5 < far < 0.05
    assert found.model.dtype == torch.float64
    made = audit(path, TOKENS, effects="none", device="cpu")
    assert made.about["weights"] == "GGUF, dequantised from Q8_0 (14 tensors), F32 (7)"
    assert made.about["model"].endswith("/some.gguf")
    assert made.about["weights"] in made.page().html()
    assert audit(saved(model, tmp_path / "own"), TOKENS, effects="none").about["weights"] is None


def test_a_configuration_goes_before_a_gguf_file_beside_it(tmp_path: Path) -> None:
    model = built("LlamaForCausalLM", **WIDE)
    written(model, saved(model, tmp_path) / "some.gguf")
    assert load_model(str(tmp_path), device="cpu").quantised is None


def test_of_several_files_one_must_be_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"^model: .* contains 2 \.gguf files\. Name one of them, such as .*a\.gg"):
        load_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.9])
def test_a_file_that_is_cut_short_is_one_sentence(tmp_path: Path, share: float) -> None:
    content = written(built("LlamaForCausalLM", **WIDE), tmp_path / "some.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: int(share * len(content)) + (share > 0) * 4])
    with pytest.raises(InputError, match=r"^model: .*cut\.gguf is (damaged or truncated|not a GGUF file: .*)\.$"):
        load_model(str(tmp_path / "cut.gguf"), device="cpu")


def test_architectures_that_transformers_does_not_read_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "clip")
    writer.add_block_count(1)
    writer.add_tensor("a", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_gguf(tmp_path / "odd.gguf") == Quantised("clip", (("F32", 1),))
    with pytest.raises(InputError, match=r"odd\.gguf could not be loaded: .*clip.*not supported"):
        load_model(str(tmp_path / "odd.gguf"), device="cpu")


def test_what_reads_them_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(checkpoints, "_NEEDED", ("no_such_package",))
    with pytest.raises(
        EnvironmentFailure, match=r"^no_such_package is not installed\. Run: pip install 'toeplens\[gguf\]'"
    ):
        load_model(str(tmp_path / "some.gguf"), device="cpu")
