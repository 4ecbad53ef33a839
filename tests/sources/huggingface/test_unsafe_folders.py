"""A model's directory that is damaged or means harm: one sentence, nothing run, nothing read from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.hosts.families import installed
from tests.sources.huggingface.test_load import LLAMA, TOKENS, built, changed, saved

from toeplens import hosts
from toeplens.ground import InputError
from toeplens.sources.huggingface.checkpoints import Checkpoint
from toeplens.sources.huggingface.load import load_model

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ENTRY = "toeplens_encodings"


def pieces(place: Path, file: str, index: str = INDEX) -> Path:
    """The same checkpoint with an index that says that all weights are in this file."""
    model = built("LlamaForCausalLM", **LLAMA)
    saved(model, place)
    (place / WHOLE).unlink()
    named = dict.fromkeys(model.state_dict(), file)
    (place / index).write_text(json.dumps({"metadata": {}, "weight_map": named}))
    return place


def test_pickles_that_an_index_or_a_configuration_names_are_not_read(tmp_path: Path) -> None:
    state = built("LlamaForCausalLM", **LLAMA).state_dict()
    index = pieces(tmp_path / "index", "x.bin")
    torch.save(state, index / "x.bin")
    named = changed(saved(built("LlamaForCausalLM", **LLAMA), tmp_path / "named"), transformers_weights="x.bin")
    for place in (index, named):
        with pytest.raises(InputError, match=r"weights of .* in x\.bin are not a \.safetensors file"):
            load_model(str(place), device="cpu")
    again = load_model(str(index), device="cpu", pickled=True).model
    assert again.lm_head.weight.equal(state["lm_head.weight"])


@pytest.mark.parametrize("file", ["../other/model.safetensors", "/tmp/other/model.safetensors"])
def test_weights_outside_the_directory_are_not_read(file: str, tmp_path: Path) -> None:
    saved(built("LlamaForCausalLM", **LLAMA), tmp_path / "other")
    index = pieces(tmp_path / "index", file)
    pickled = pieces(tmp_path / "pickled", file, "pytorch_model.bin.index.json")
    named = changed(saved(built("LlamaForCausalLM", **LLAMA), tmp_path / "named"), transformers_weights=file)
    for place, allowed in ((index, False), (index, True), (pickled, True), (named, False)):
        with pytest.raises(InputError, match=r"weights of .* lie outside its own directory"):
            load_model(str(place), device="cpu", pickled=allowed)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.complex64])
def test_weights_of_whole_or_complex_numbers_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    model = built("LlamaForCausalLM", **LLAMA)
    place = saved(model, tmp_path)
    state = {key: x.clone() for key, x in model.state_dict().items()}
    state["model.norm.weight"] = state["model.norm.weight"].to(dtype)
    save_file(state, place / WHOLE, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"model\.norm\.weight must have a floating-point dtype, got"):
        load_model(str(place), device="cpu")


@pytest.mark.parametrize("field", ["_attn_implementation", "attn_implementation"])
@pytest.mark.parametrize("kernel", ["kernels-community/flash-attn3", {"": "some/kernel"}])
def test_kernels_that_a_configuration_names_are_never_asked_for(field: str, kernel: Any, tmp_path: Path) -> None:
    place = saved(built("LlamaForCausalLM", **LLAMA), tmp_path)
    for entry in ({field: kernel}, {field: "eager", "_experts_implementation": "sonicmoe"}):
        found = load_model(str(changed(place, **entry)), device="cpu").model
        assert found.config._attn_implementation in ("sdpa", "eager")
        assert found.config._experts_implementation in (None, "eager", "grouped_mm")
    assert found.config._attn_implementation == "eager"


def test_a_host_s_directory_runs_no_code_and_reads_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    model = installed("fire")
    place = saved(model, tmp_path / "evil")
    (place / "evil.py").write_text("raise SystemExit")
    with pytest.raises(InputError, match="it needs its own code, which is never run"):
        hosts.load(changed(place, model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModel": "evil.M"}))
    place = saved(model, tmp_path / "pickle")
    state = load_file(place / WHOLE)
    torch.save({key: x for key, x in state.items() if ENTRY not in key}, place / "pytorch_model.bin")
    (place / WHOLE).unlink()
    save_file({key: x for key, x in state.items() if ENTRY in key}, place / "encoding.safetensors")
    with pytest.raises(InputError, match="it has no safetensors weights"):
        hosts.load(place)


@pytest.mark.parametrize("size", ["1GB", "4KB"])  # of one file, and of several
def test_a_stray_file_does_not_give_an_encoding_s_weights(size: str, tmp_path: Path) -> None:
    model, place = installed("fire"), tmp_path
    model.save_pretrained(place, max_shard_size=size)
    assert (place / INDEX).exists() == (size == "4KB")
    stray = {key: torch.full_like(x, 7) for key, x in model.state_dict().items() if ENTRY in key}
    save_file(stray, place / "zzz.safetensors")
    for found in (hosts.load(place), load_model(str(place), device="cpu").model):
        assert found(TOKENS % 31).logits.equal(model(TOKENS % 31).logits)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ([], "is damaged"),
        ({"encoding": "fire", "layers": "x"}, "does not match the model"),
        ({"encoding": "fire", "layers": [10**9]}, "does not match the model .*different indices from 0 to 1"),
        ({"encoding": "fire", "width": "x"}, "does not match the model"),
        ({"encoding": "fox"}, "its weights do not match the encoding 'fox'"),
    ],
)
def test_an_entry_that_is_damaged_is_one_sentence(entry: Any, said: str, tmp_path: Path) -> None:
    place = changed(saved(installed("fire"), tmp_path), **{ENTRY: entry})
    for opened in (hosts.load, lambda path: load_model(str(path), device="cpu")):
        with pytest.raises(InputError, match=said) as refused:
            opened(place)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("change", ["shape", "nan", "missing", "cut"])
def test_weights_of_an_encoding_that_are_damaged_are_refused(change: str, tmp_path: Path) -> None:
    place = saved(installed("fire"), tmp_path)
    state = load_file(place / WHOLE)
    key = next(key for key in state if ENTRY in key and "open_this" not in key)
    changed_to = {"shape": state[key].flatten()[:1], "int8": state[key].to(torch.int8), "nan": torch.nan * state[key]}
    state = {name: x for name, x in state.items() if name != key} | (
        {key: changed_to[change]} if change in changed_to else {}
    )
    save_file(state, place / WHOLE, metadata={"format": "pt"})
    if change == "cut":
        (place / WHOLE).write_bytes((place / WHOLE).read_bytes()[:-9])
    said = "its weights are damaged" if change == "cut" else "its weights do not match the encoding 'fire'"
    with pytest.raises(InputError, match=said):
        hosts.load(place)


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": [5]},
        {"architectures": ["pipeline"]},
        {"architectures": ["PreTrainedModel"]},
        {"architectures": ["GPT2LMHeadModel"]},
    ],
)
def test_a_host_s_architecture_is_a_model_of_its_configuration(change: dict[str, Any], tmp_path: Path) -> None:
    place = changed(saved(installed("fire"), tmp_path), **change)
    before = set(vars(transformers.PreTrainedModel))
    with pytest.raises(InputError, match=r"architecture|could not be loaded"):
        hosts.load(place)
    assert set(vars(transformers.PreTrainedModel)) == before, "every other model would inherit what is new"


def test_an_index_on_the_hub_is_looked_at_before_anything_it_names_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": "x.bin"}}))
    asked: list[tuple[str, bool]] = []

    def cached(place: str, file: str, local_files_only: bool = False, **_: Any) -> str | None:
        asked.append((file, local_files_only))
        return str(tmp_path / file) if (tmp_path / file).exists() else None

    monkeypatch.setattr("transformers.utils.hub.cached_file", cached)
    with pytest.raises(InputError, match=r"weights of .* in x\.bin are not a \.safetensors file"):
        Checkpoint("some/model", "some/model").check_weights(None, pickled=False)
    assert asked == [(WHOLE, True), (INDEX, False)]
