"""Weights that stay on disk give the same numbers as in memory, bit for bit; bounds that cannot be kept are refused."""

from __future__ import annotations

import errno
import gc
import os
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.hf.models import tiny, transformers
from tests.backends.hf.test_gguf import WIDE, write_gguf
from tests.backends.hf.test_load import LLAMA, TOKENS, edit_config, random_model, save_checkpoint
from tests.hosts.families import model_with_encoding
from torch.nn import functional as F

from toeplens.backends.hf import Change, load, load_model, offload
from toeplens.backends.hf.load import LoadedModel, open_model
from toeplens.backends.hf.offload import PASS_TOKENS, reread_for_gradients, working_memory
from toeplens.studies import audit
from toeplens.studies.auditing import study
from toeplens.studies.kit.options import ProbeSizes
from toeplens.studies.probing import probe
from toeplens.utils import EnvironmentFailure, InputError


def bound(place: Path, *, weights: int = 8000, tokens: int = PASS_TOKENS) -> str:
    """A bound that leaves this many bytes for weights: of the small model's 21 kB, a part stays on disk."""
    config = transformers.AutoConfig.from_pretrained(place) if place.is_dir() else transformers.LlamaConfig(**WIDE)
    return str(working_memory(config, tokens) + weights)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Weights in bfloat16; a pass is in float32."""
    return save_checkpoint(tiny("LlamaForCausalLM", **LLAMA).to(torch.bfloat16), tmp_path / "model")


def devices(loaded: LoadedModel) -> set[str]:
    return {weight.device.type for weight in loaded.model.parameters()}


@pytest.mark.parametrize("effects", ["none", "exact", "position", "attribution", "bands"])
def test_an_audit_is_the_same_bit_for_bit(effects: Any, checkpoint: Path) -> None:
    loaded: list[LoadedModel] = []
    limit = bound(checkpoint, tokens=TOKENS.numel() if effects == "none" else PASS_TOKENS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "open_model", lambda *_, **options: loaded.append(open_model(*_, **options)) or loaded[-1])
        actual, expected = (audit(checkpoint, TOKENS, effects=effects, device="cpu", memory=x) for x in (limit, None))
    assert [devices(each) for each in loaded] == [{"cpu", "meta"}, {"cpu"}]
    assert (actual.layers, actual.heads, actual.bands) == (expected.layers, expected.heads, expected.bands)
    assert actual.about["device"] == "cpu"
    assert actual.about["dtype"] == "float32"


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "weights"), [("smollm2", 3 * 10**8), ("qwen2.5-coder-0.5b", 12 * 10**8)])
def test_an_audit_of_a_trained_model_is_the_same_bit_for_bit(name: str, weights: int) -> None:
    place, tokens = Path(__file__).parents[3] / "models" / name, torch.arange(1000, 1096).reshape(2, 48)
    if not place.exists():
        pytest.skip(f"{place} is not there: make real-models MODELS={name} fetches it")
    loaded = [load_model(str(place), device="cpu", memory=memory) for memory in (bound(place, weights=weights), None)]
    assert [devices(each) for each in loaded] == [{"cpu", "meta"}, {"cpu"}]
    actual, expected = (audit(each, tokens, effects="none") for each in loaded)
    assert (actual.layers, actual.heads) == (expected.layers, expected.heads)


def test_a_probe_is_the_same_bit_for_bit(checkpoint: Path) -> None:
    place, text = edit_config(checkpoint, max_position_embeddings=64), torch.arange(400).reshape(2, 200) % 40
    options: dict[str, Any] = {"sizes": ProbeSizes(lengths=(64,), sequences=2), "device": "cpu"}
    options |= {"changes": [Change(layer=1, heads=(1,), output="zero")]}
    actual, expected = (probe(place, text, memory=memory, **options) for memory in (bound(place), None))
    assert actual.items == expected.items
    assert any(item.changed_nats != item.nats for item in expected.items)


@pytest.mark.parametrize("encoding", ["alibi", "rope+fox"])
def test_installed_encodings_are_the_same_bit_for_bit(encoding: str, tmp_path: Path) -> None:
    place = save_checkpoint(model_with_encoding(encoding), tmp_path)
    actual, expected = (load_model(str(place), device="cpu", memory=memory) for memory in (bound(tmp_path), None))
    assert devices(actual) == {"cpu", "meta"}
    assert audit(actual, TOKENS % 31).heads == audit(expected, TOKENS % 31).heads


def test_what_fits_is_kept_in_memory(checkpoint: Path) -> None:
    assert load_model(str(checkpoint), device="cpu").plan is None
    for extra in (0, 3000, 8000):
        loaded = load_model(str(checkpoint), device="cpu", memory=bound(checkpoint, weights=2560 + extra))
        plan = loaded.plan
        assert plan is not None
        assert plan.largest == 4 * 40 * 16, "the embedding"
        assert plan.in_memory <= extra
        kept = [x for x in loaded.model.parameters() if not x.is_meta]
        assert sum(4 * weight.numel() for weight in kept) == plan.in_memory
        assert plan.in_memory + plan.on_disk == sum(4 * weight.numel() for weight in loaded.model.parameters())
        assert plan.in_memory == 0 or plan.in_memory > extra - 4 * 24 * 16, "no other module would fit"


def test_without_a_bound_the_free_memory_is_one(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "free_memory", lambda: 20_000)
    monkeypatch.setattr(load, "working_memory", lambda config, tokens: 1000)
    assert devices(load_model(str(checkpoint), device="cpu")) == {"cpu", "meta"}
    monkeypatch.setattr(load, "free_memory", lambda: 3000)
    with pytest.raises(EnvironmentFailure, match=r"^model: .* needs at least 1 MB of memory, but only 1 MB are free\."):
        load_model(str(checkpoint), device="cpu")


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        (
            "500M",
            r"^memory must be at least 603 MB \(1 MB for the largest layer of .*, 603 MB for a pass\), got 500 MB",
        ),
        ("much", r"^memory must be a positive size such as 500M or 4G, got 'much'\.$"),
        ("0", r"^memory must be a positive size"),
    ],
)
def test_impossible_bounds_are_one_sentence(bound: str, said: str, checkpoint: Path) -> None:
    with pytest.raises(InputError, match=said):
        audit(checkpoint, TOKENS, device="cpu", memory=bound)


def test_temporary_files_are_removed_with_the_model(checkpoint: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = {*tmp_path.iterdir()}
    loaded = load_model(str(checkpoint), device="cpu", memory=bound(checkpoint))
    (folder,) = {*tmp_path.iterdir()} - before
    del loaded
    gc.collect()
    assert not folder.exists()
    (checkpoint / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(InputError, match="its weights are damaged"):
        load_model(str(checkpoint), device="cpu", memory=bound(checkpoint))
    assert {*tmp_path.iterdir()} == before


def test_a_missing_file_is_named_under_a_bound(checkpoint: Path) -> None:
    model = load_model(str(checkpoint), device="cpu").model
    model.save_pretrained(checkpoint, max_shard_size="10KB")
    (checkpoint / "model.safetensors").unlink(missing_ok=True)
    next(checkpoint.glob("model-00002-*")).unlink()
    with pytest.raises(InputError, match=r"its file model-00002-of-\d+\.safetensors is missing"):
        load_model(str(checkpoint), device="cpu", memory=bound(checkpoint))


def test_weights_are_read_again_for_gradients(checkpoint: Path) -> None:
    """And not kept from the forward pass, in which all of them would be in memory at its end."""
    loaded, expected = (
        load_model(str(checkpoint), device="cpu", memory=memory).model for memory in (bound(checkpoint), None)
    )
    reads, forward = Counter[str](), Counter[str]()
    weights_map = loaded.lm_head._hf_hook.weights_map.dataset
    read = type(weights_map).__getitem__
    gradients = []
    for model in (loaded, expected):
        model.requires_grad_(False)
        states = F.embedding(TOKENS, expected.model.embed_tokens.weight).requires_grad_()
        with pytest.MonkeyPatch.context() as patch, reread_for_gradients(model):
            patch.setattr(type(weights_map), "__getitem__", lambda self, key: (reads.update([key]), read(self, key))[1])
            loss = model(inputs_embeds=states).logits.square().sum()
            forward = forward or Counter(reads)
            gradients += torch.autograd.grad(loss, states)
    assert gradients[0].equal(gradients[1])
    matrices = {key for key, count in forward.items() if not key.endswith("norm.weight")}
    assert len(matrices) > 4
    assert {key: reads[key] - forward[key] for key in matrices} == dict.fromkeys(matrices, 1)


@pytest.fixture
def gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOEPLENS_CACHE", str(tmp_path / "cache"))
    return write_gguf(random_model("LlamaForCausalLM", **WIDE), tmp_path / "some.gguf")


def test_a_gguf_file_is_converted_once(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []
    expected = load_model(str(gguf_file), device="cpu")
    options: dict[str, Any] = {"device": "cpu", "memory": bound(gguf_file, weights=40_000)}
    actual = load_model(str(gguf_file), **options, on_progress=lambda *item: seen.append(item))
    assert actual.model(TOKENS).logits.equal(expected.model(TOKENS).logits)
    assert (actual.quantised, actual.missing, actual.unused) == (expected.quantised, (), ())
    assert seen[0] == ("conversion", 0, 21)
    assert seen[-1] == ("conversion", 21, 21)
    assert devices(actual) == {"cpu", "meta"}
    monkeypatch.setattr(offload, "save_file", lambda *_: pytest.fail("it was converted again"))
    assert load_model(str(gguf_file), **options).model(TOKENS).logits.equal(expected.model(TOKENS).logits)
    os.utime(gguf_file, (0, 0))  # another file by that name
    with pytest.raises(BaseException, match="it was converted again"):
        load_model(str(gguf_file), **options)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Files of this process cannot grow beyond this size."""
    handler, (before, hard) = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_fills_during_conversion_leaves_nothing(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"device": "cpu", "memory": bound(gguf_file, weights=40_000)}
    with largest_file(10_000), pytest.raises(EnvironmentFailure, match=r"^Cannot write .*: the file is larger than"):
        load_model(str(gguf_file), **options)
    assert [*gguf_file.parent.glob("cache/toeplens/gguf/*")] == []

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(offload, "save_file", full)
        with pytest.raises(EnvironmentFailure, match="the disk is full"):
            load_model(str(gguf_file), **options)
    assert [*gguf_file.parent.glob("cache/toeplens/gguf/*")] == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(EnvironmentFailure, match=r"converted to float32 once, which needs 1 MB in .* TOEPLENS_CACHE"):
        load_model(str(gguf_file), **options)
