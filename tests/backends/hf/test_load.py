"""Loaded models: missing, damaged and unused weights, lengths, classes; what libraries raise is one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.backends.hf.models import GPT, GROUPED, INPUTS, SIZES, T5, tiny, transformers
from tests.hosts.families import model_with_encoding

from toeplens import hosts
from toeplens.backends.hf import checkpoints, load
from toeplens.backends.hf.checkpoints import Checkpoint
from toeplens.backends.hf.interventions import check_causal, find_calls
from toeplens.backends.hf.load import LoadedModel, load_model
from toeplens.studies import audit
from toeplens.utils import EnvironmentFailure, InputError

SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
LLAMA = SMALL | {"num_key_value_heads": 1, "max_position_embeddings": 32}
TOKENS = torch.randint(3, 40, (2, 8), generator=torch.Generator().manual_seed(0))


def random_model(kind: str, **sizes: Any) -> Any:
    cls = getattr(transformers, kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return cls(cls.config_class(**sizes)).eval()


def save_checkpoint(model: Any, place: Path, without: str = "?") -> Path:
    """A checkpoint, without the weights whose names have this in them."""
    model.save_pretrained(place, state_dict={name: x for name, x in model.state_dict().items() if without not in name})
    return place


def edit_config(place: Path, **changes: Any) -> Path:
    content = json.loads((place / "config.json").read_text()) | changes
    (place / "config.json").write_text(json.dumps(content))
    return place


def audit_checkpoint(place: Path, data: Any = TOKENS, **options: Any) -> Any:
    return audit(place, data, effects="none", **options)


HYBRIDS = {
    "RecurrentGemmaForCausalLM": (
        SMALL | {"lru_width": 16, "attention_window_size": 8, "num_key_value_heads": 1, "head_dim": 8},
        {"block_types": ["recurrent", "attention"]},
        "temporal_block.q_proj",
    ),
    "NemotronHForCausalLM": (
        SMALL | {"num_key_value_heads": 1, "head_dim": 8, "mamba_num_heads": 2, "mamba_head_dim": 8, "n_groups": 1},
        {"layers_block_type": ["mamba", "attention"], "ssm_state_size": 4, "max_position_embeddings": 32},
        "mixer.q_proj",
    ),
}


@pytest.mark.parametrize("kind", list(HYBRIDS))
def test_missing_weights_of_attention_are_refused_whatever_their_name(kind: str, tmp_path: Path) -> None:
    sizes, more, lost = HYBRIDS[kind]
    model = random_model(kind, **sizes, **more)
    assert audit_checkpoint(save_checkpoint(model, tmp_path / "whole")).about["random_weights"] == []
    with pytest.raises(InputError, match=rf"weights of the attention are missing .*\.1\.{lost}"):
        audit_checkpoint(save_checkpoint(model, tmp_path / "holed", without=lost))


def test_other_missing_weights_are_listed(tmp_path: Path) -> None:
    model = random_model("LlamaForCausalLM", **LLAMA)
    actual = audit_checkpoint(save_checkpoint(model, tmp_path, without="mlp.up_proj"))
    assert actual.about["random_weights"] == [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)]
    assert actual.about["unused_weights"] == []


def test_unused_attention_weights_are_refused_and_others_listed(tmp_path: Path) -> None:
    qwen = save_checkpoint(random_model("Qwen3ForCausalLM", **LLAMA, head_dim=8), tmp_path / "qwen")
    with pytest.raises(InputError, match=r"weights of the attention in the checkpoint .*layers\.0\.self_attn\.k_norm"):
        audit_checkpoint(edit_config(qwen, architectures=["LlamaForCausalLM"], model_type="llama"))
    model = random_model("LlamaForCausalLM", **LLAMA)
    with pytest.raises(InputError, match=r"weights of the attention in the checkpoint .*layers\.1\.self_attn"):
        audit_checkpoint(edit_config(save_checkpoint(model, tmp_path / "cut"), num_hidden_layers=1))
    masked = random_model("BertForMaskedLM", **SMALL, max_position_embeddings=32)
    base = audit_checkpoint(edit_config(save_checkpoint(masked, tmp_path / "base"), architectures=["BertModel"]))
    assert "cls.predictions.bias" in base.about["unused_weights"]
    assert base.about["random_weights"] == [f"pooler.dense.{name}" for name in ("bias", "weight")]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 3}, "The hidden size (16) is not a multiple of the number of attention heads (3)"),
        ({"num_hidden_layers": 0}, "must be at least 1, got 0"),
        ({"num_attention_heads": "four"}, "Field 'num_attention_heads' expected int, got str (value: 'four')"),
        (
            {"rope_parameters": {"rope_type": "odd", "rope_theta": 1e4}},
            "its rope_type is 'odd', which transformers does not know",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "must be a number above 0, got 0"),
        ({"architectures": ["BertForMaskedLM"]}, "has the architecture BertForMaskedLM but the type llama"),
        ({"hidden_size": 24}, "has shape [40, 16] in its weights but [40, 24] in its configuration"),
    ],
)
def test_unusual_configs_are_one_sentence(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    place = edit_config(save_checkpoint(random_model("LlamaForCausalLM", **LLAMA), tmp_path), **changes)
    with pytest.raises(InputError) as refused:
        audit_checkpoint(place)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 10**30}, {"text_config": {"decoder_layers": 1001}}])
def test_impossible_layer_counts_are_refused_before_allocation(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = edit_config(save_checkpoint(random_model("LlamaForCausalLM", **LLAMA), tmp_path), **changes)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("it was taken"))
    with pytest.raises(InputError, match=r"^model: \w+ in the configuration of .* must be at most 1000, got 1\S+\.$"):
        audit_checkpoint(place)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("name", ["layers.1.self_attn.k_proj.weight", "norm.weight"])
def test_nonfinite_weights_are_named(name: str, value: float) -> None:
    loaded = random_model("LlamaForCausalLM", **LLAMA)
    with torch.no_grad():
        loaded.model.get_parameter(name).view(-1)[3] = value
    said = rf"^model: model\.{re.escape(name)} must be finite\.$"
    with pytest.raises(InputError, match=said):
        audit(loaded, TOKENS)


@pytest.mark.parametrize("field", ["vocab_size", "head_dim"])
def test_sizes_beyond_memory_are_refused_before_allocation(
    tmp_path: Path, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that a system promises and does not have would end the process."""
    checkpoint = save_checkpoint(random_model("LlamaForCausalLM", **LLAMA), tmp_path)
    assert load.load_model(str(checkpoint), device="cpu").missing == ()
    place = edit_config(checkpoint, **{field: 10**4})
    monkeypatch.setattr(load, "memory", lambda: 10**6)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it was built"))
    with pytest.raises(EnvironmentFailure, match=r"needs at least .* of memory, but only 1 MB are free"):
        audit_checkpoint(place)


@pytest.mark.parametrize("content", ["null", "{", "[" * 100_000])
def test_damaged_configurations_are_one_sentence(tmp_path: Path, content: str) -> None:
    save_checkpoint(random_model("LlamaForCausalLM", **LLAMA), tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=r"config\.json is damaged: it is not"):
        audit_checkpoint(tmp_path)


def test_damaged_weights_and_tokenizers_are_one_sentence(tmp_path: Path) -> None:
    place = save_checkpoint(random_model("LlamaForCausalLM", **LLAMA), tmp_path / "index")
    (place / "model.safetensors").rename(place / "model-00001-of-00001.safetensors")
    (place / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(InputError, match="could not be loaded: 'metadata' is missing"):
        audit_checkpoint(place)
    place = save_checkpoint(random_model("LlamaForCausalLM", **LLAMA), tmp_path / "binary")
    (place / "model.safetensors").unlink()
    for content, said in ((b"", "a file ends too early"), (b"junk" * 99, "could not be loaded")):
        (place / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(InputError, match=said):
            audit_checkpoint(place, pickled=True)
    place = save_checkpoint(random_model("LlamaForCausalLM", **LLAMA), tmp_path / "words")
    (place / "vocab.json").write_text("[1, 2]")
    (place / "merges.txt").write_text("#")
    (place / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(InputError, match="has no readable tokenizer"):
        audit_checkpoint(place, "a text")


@pytest.mark.parametrize(
    ("kind", "sizes", "said"),
    [
        (
            "CodeGenForCausalLM",
            {"n_positions": 6, "rotary_dim": 4},
            "must be at most 6, the max_position_embeddings of the model, got 8",
        ),
        (
            "MptForCausalLM",
            {"d_model": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 6},
            "does not run on this input: .* has 8 tokens, .* says max_seq_len = 6",
        ),
    ],
)
def test_sequences_beyond_the_position_table_are_one_sentence(kind: str, sizes: dict[str, Any], said: str) -> None:
    model = random_model(kind, **{"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2} | sizes)
    with pytest.raises(InputError, match=said):
        audit(model, TOKENS)


def test_models_that_cannot_run_are_one_sentence() -> None:
    afar, mixed = random_model("LlamaForCausalLM", **LLAMA), random_model("LlamaForCausalLM", **LLAMA)
    afar.model.layers[1].to("meta")
    mixed.model.layers[1].mlp.half()
    with pytest.raises(InputError, match=r"model\.layers\.1\.\S+ is on the device meta"):
        audit(afar, TOKENS)
    with pytest.raises(InputError, match=r"does not run on this input: .*dtype"):
        audit(mixed, TOKENS)


def test_the_hub_is_queried_once_with_a_timeout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requests: list[dict[str, Any]] = []

    def silent(url: str, **options: Any) -> None:
        requests.append({"url": url} | options)
        raise TimeoutError

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", silent)
    with pytest.raises(InputError, match="did not answer within 5 seconds"):
        load.load_model("nobody/nothing")
    assert [each["timeout"] for each in requests] == [checkpoints.HUB_TIMEOUT]
    with pytest.raises(InputError, match="not a valid name on the hub"):
        load.load_model("no/such/model")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: "config.json")
    assert checkpoints.find_checkpoint("nobody/nothing").options == {"local_files_only": True}
    assert checkpoints.find_checkpoint(str(tmp_path)).options == {}


ROPE = {"rope_theta": 10000.0}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": ROPE | {"rope_type": kind} | more}


ROPE_BY_TYPE = {"sliding_attention": ROPE | {"rope_type": "default"}} | {
    "full_attention": ROPE | {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
}
LAYERED = GROUPED | {"head_dim": 8, "rope_parameters": ROPE_BY_TYPE}


@pytest.mark.parametrize(
    ("kind", "sizes", "limit"),
    [
        ("LlamaForCausalLM", GROUPED, 64),
        ("LlamaForCausalLM", GROUPED | rope("linear", factor=4.0), 64),  # which says how long it is with them
        ("LlamaForCausalLM", GROUPED | rope("dynamic", factor=4.0), 256),
        ("LlamaForCausalLM", GROUPED | rope("yarn", factor=4.0, original_max_position_embeddings=64), 256),
        ("LlamaForCausalLM", GROUPED | rope("yarn", factor=4.0, original_max_position_embeddings=8), 64),
        ("Gemma3ForCausalLM", LAYERED, 512),
        ("GPT2LMHeadModel", GPT, 64),
        ("RobertaModel", SIZES | {"pad_token_id": 1}, 62),  # the places up to the padding's are no token's
        ("FalconForCausalLM", SIZES | {"alibi": True}, None),
        ("T5ForConditionalGeneration", T5, None),
    ],
)
def test_maximum_lengths_are_read_from_configs(kind: str, sizes: dict[str, Any], limit: int | None) -> None:
    loaded = LoadedModel(tiny(kind, **sizes))
    assert loaded.max_length == limit
    loaded.check_length("tokens", limit or 10_000)
    if limit is not None:
        with pytest.raises(InputError, match=rf"^tokens must be at most {limit}, .*, got {limit + 1}"):
            loaded.check_length("tokens", limit + 1)


VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}  # tables of 4 or 5 patches
AUDIO = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "num_mel_bins": 8}
TEXT_CONFIG = GROUPED | {"num_hidden_layers": 1}
MULTIMODAL = {"vision_config": VISION | {"model_type": "clip_vision_model"}}, {"vision_config": VISION}
AUDIO_MODEL = {"audio_config": AUDIO | {"max_source_positions": 8}}


@pytest.mark.parametrize(
    ("kind", "words", "config"),
    [
        ("Gemma3", TEXT_CONFIG | {"head_dim": 8}, MULTIMODAL[1] | {"mm_tokens_per_image": 4}),
        ("Llava", TEXT_CONFIG | {"model_type": "llama"}, MULTIMODAL[0]),
        ("Qwen2Audio", TEXT_CONFIG | {"model_type": "qwen2"}, AUDIO_MODEL),
    ],
)
def test_image_and_audio_tables_are_not_token_tables(kind: str, words: dict[str, Any], config: dict[str, Any]) -> None:
    config = config | {"text_config": words}
    cls = getattr(transformers, f"{kind}ForConditionalGeneration")
    loaded = LoadedModel(cls(getattr(transformers, f"{kind}Config")(**config)).eval())
    assert (loaded.position_vectors, loaded.max_length) == (None, 64)
    made = audit(loaded.model, torch.randint(3, 30, (2, 14)), effects="none")
    assert len(made.layers) == words["num_hidden_layers"]


def test_models_that_do_not_predict_the_next_token_are_refused() -> None:
    t5, bert, llama = (
        LoadedModel(tiny(kind, **sizes))
        for kind, sizes in (("T5ForConditionalGeneration", T5), ("BertModel", SIZES), ("LlamaForCausalLM", GROUPED))
    )
    with pytest.raises(InputError, match=r"^model: a probe needs a decoder-only model, but T5ForConditionalGeneration"):
        t5.check_decoder("a probe")
    for loaded in (bert, llama):
        loaded.check_decoder("a probe")
    with pytest.raises(InputError, match=r"^model: a probe needs causal attention, but BertModel"):
        check_causal(bert, find_calls(bert.model, INPUTS), "a probe")
    check_causal(llama, find_calls(llama.model, INPUTS), "a probe")


def test_attention_calls_match_a_pass() -> None:
    t5 = tiny("T5ForConditionalGeneration", **T5)
    actual = find_calls(t5, INPUTS | {"decoder_input_ids": INPUTS["input_ids"]})
    assert [(call.side, call.kind, call.layer) for call in actual] == [
        ("encoder", "self", 0),
        ("encoder", "self", 1),
        ("decoder", "self", 0),
        ("decoder", "cross", 0),
        ("decoder", "self", 1),
        ("decoder", "cross", 1),
    ]
    assert {call.heads for call in actual} == {4}
    assert find_calls(t5, INPUTS) == ()  # a pass that breaks off tells nothing


# ---- directories that mean harm: nothing run, nothing read from elsewhere --------------------------------------------


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ENTRY = "toeplens_encodings"


def write_index(place: Path, file: str, index: str = INDEX) -> Path:
    """The same checkpoint with an index that says that all weights are in this file."""
    model = random_model("LlamaForCausalLM", **LLAMA)
    save_checkpoint(model, place)
    (place / WEIGHTS).unlink()
    named = dict.fromkeys(model.state_dict(), file)
    (place / index).write_text(json.dumps({"metadata": {}, "weight_map": named}))
    return place


def test_pickles_named_by_an_index_or_config_are_not_read(tmp_path: Path) -> None:
    state = random_model("LlamaForCausalLM", **LLAMA).state_dict()
    index = write_index(tmp_path / "index", "x.bin")
    torch.save(state, index / "x.bin")
    saved = save_checkpoint(random_model("LlamaForCausalLM", **LLAMA), tmp_path / "named")
    named = edit_config(saved, transformers_weights="x.bin")
    for place in (index, named):
        with pytest.raises(InputError, match=r"weights of .* in x\.bin are not a \.safetensors file"):
            load_model(str(place), device="cpu")
    again = load_model(str(index), device="cpu", pickled=True).model
    assert again.lm_head.weight.equal(state["lm_head.weight"])


@pytest.mark.parametrize("file", ["../other/model.safetensors", "/tmp/other/model.safetensors"])
def test_weights_outside_the_directory_are_not_read(file: str, tmp_path: Path) -> None:
    save_checkpoint(random_model("LlamaForCausalLM", **LLAMA), tmp_path / "other")
    index = write_index(tmp_path / "index", file)
    pickled = write_index(tmp_path / "pickled", file, "pytorch_model.bin.index.json")
    saved = save_checkpoint(random_model("LlamaForCausalLM", **LLAMA), tmp_path / "named")
    named = edit_config(saved, transformers_weights=file)
    for place, allowed in ((index, False), (index, True), (pickled, True), (named, False)):
        with pytest.raises(InputError, match=r"weights of .* lie outside its own directory"):
            load_model(str(place), device="cpu", pickled=allowed)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.complex64])
def test_integer_and_complex_weights_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    model = random_model("LlamaForCausalLM", **LLAMA)
    directory = save_checkpoint(model, tmp_path)
    state = {key: x.clone() for key, x in model.state_dict().items()}
    state["model.norm.weight"] = state["model.norm.weight"].to(dtype)
    save_file(state, directory / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"model\.norm\.weight must have a floating-point dtype, got"):
        load_model(str(directory), device="cpu")


@pytest.mark.parametrize("field", ["_attn_implementation", "attn_implementation"])
@pytest.mark.parametrize("kernel", ["kernels-community/flash-attn3", {"": "some/kernel"}])
def test_kernels_named_by_a_config_are_never_fetched(field: str, kernel: Any, tmp_path: Path) -> None:
    place = save_checkpoint(random_model("LlamaForCausalLM", **LLAMA), tmp_path)
    for entry in ({field: kernel}, {field: "eager", "_experts_implementation": "sonicmoe"}):
        actual = load_model(str(edit_config(place, **entry)), device="cpu").model
        assert actual.config._attn_implementation in ("sdpa", "eager")
        assert actual.config._experts_implementation in (None, "eager", "grouped_mm")
    assert actual.config._attn_implementation == "eager"


def test_a_patched_model_is_read_without_code_and_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    model = model_with_encoding("fire")
    place = save_checkpoint(model, tmp_path / "evil")
    (place / "evil.py").write_text("raise SystemExit")
    with pytest.raises(InputError, match="it needs its own code, which is never run"):
        hosts.load(edit_config(place, model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModel": "evil.M"}))
    place = save_checkpoint(model, tmp_path / "pickle")
    state = load_file(place / WEIGHTS)
    torch.save({key: x for key, x in state.items() if ENTRY not in key}, place / "pytorch_model.bin")
    (place / WEIGHTS).unlink()
    save_file({key: x for key, x in state.items() if ENTRY in key}, place / "encoding.safetensors")
    with pytest.raises(InputError, match="it has no safetensors weights"):
        hosts.load(place)


@pytest.mark.parametrize("size", ["1GB", "4KB"])  # of one file, and of several
def test_a_stray_file_does_not_give_an_encoding_s_weights(size: str, tmp_path: Path) -> None:
    model, directory = model_with_encoding("fire"), tmp_path
    model.save_pretrained(directory, max_shard_size=size)
    assert (directory / INDEX).exists() == (size == "4KB")
    stray = {key: torch.full_like(x, 7) for key, x in model.state_dict().items() if ENTRY in key}
    save_file(stray, directory / "zzz.safetensors")
    for actual in (hosts.load(directory), load_model(str(directory), device="cpu").model):
        assert actual(TOKENS % 31).logits.equal(model(TOKENS % 31).logits)


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
def test_a_damaged_config_entry_is_one_sentence(entry: Any, said: str, tmp_path: Path) -> None:
    place = edit_config(save_checkpoint(model_with_encoding("fire"), tmp_path), **{ENTRY: entry})
    for opened in (hosts.load, lambda path: load_model(str(path), device="cpu")):
        with pytest.raises(InputError, match=said) as refused:
            opened(place)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("change", ["shape", "nan", "missing", "cut"])
def test_damaged_encoding_weights_are_refused(change: str, tmp_path: Path) -> None:
    directory = save_checkpoint(model_with_encoding("fire"), tmp_path)
    state = load_file(directory / WEIGHTS)
    key = next(key for key in state if ENTRY in key and "open_this" not in key)
    changed_to = {"shape": state[key].flatten()[:1], "int8": state[key].to(torch.int8), "nan": torch.nan * state[key]}
    state = {name: x for name, x in state.items() if name != key} | (
        {key: changed_to[change]} if change in changed_to else {}
    )
    save_file(state, directory / WEIGHTS, metadata={"format": "pt"})
    if change == "cut":
        (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:-9])
    said = "its weights are damaged" if change == "cut" else "its weights do not match the encoding 'fire'"
    with pytest.raises(InputError, match=said):
        hosts.load(directory)


@pytest.mark.parametrize("architecture", [5, "pipeline", "PreTrainedModel", "GPT2LMHeadModel"])
def test_a_patched_models_architecture_must_match_its_config(architecture: Any, tmp_path: Path) -> None:
    place = edit_config(save_checkpoint(model_with_encoding("fire"), tmp_path), architectures=[architecture])
    before = set(vars(transformers.PreTrainedModel))
    with pytest.raises(InputError, match=r"architecture|could not be loaded"):
        hosts.load(place)
    assert set(vars(transformers.PreTrainedModel)) == before, "every other model would inherit what is new"


def test_a_hub_index_is_checked_before_its_files_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": "x.bin"}}))
    requests: list[tuple[str, bool]] = []

    def cached(place: str, file: str, local_files_only: bool = False, **_: Any) -> str | None:
        requests.append((file, local_files_only))
        return str(tmp_path / file) if (tmp_path / file).exists() else None

    monkeypatch.setattr("transformers.utils.hub.cached_file", cached)
    with pytest.raises(InputError, match=r"weights of .* in x\.bin are not a \.safetensors file"):
        Checkpoint("some/model", "some/model").check_weights(None, pickled=False)
    assert requests == [(WEIGHTS, True), (INDEX, False)]
