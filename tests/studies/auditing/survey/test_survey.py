"""The survey of architectures: small models of any type, outcomes told apart, gone on with, never silently wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from toeplens.ground import InputError
from toeplens.sources.huggingface.capture.attention import low
from toeplens.sources.huggingface.capture.products import Products
from toeplens.studies.auditing.survey import check as checking
from toeplens.studies.auditing.survey import run as surveying
from toeplens.studies.auditing.survey.check import check, surveyed
from toeplens.studies.auditing.survey.models import (
    LARGEST,
    NotText,
    given_beside,
    model_class,
    model_types,
    refuse_other_inputs,
    small_config,
    small_inputs,
    small_model,
)
from toeplens.studies.auditing.survey.record import COLUMNS, Survey, Surveyed

transformers = pytest.importorskip("transformers")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A survey without processes of its own; the names that it went through."""
    gone: list[str] = []

    def carry_out(names: Any, directory: Path, count: int, limit: float, on_progress: Any) -> None:
        for name in names:
            gone.append(name)
            surveying.write_json(surveying._path(directory, name), surveyed(name).to_dict())
            on_progress(surveying._record(directory, name))

    monkeypatch.setattr(surveying, "_carry_out", carry_out)
    return gone


def test_types_and_their_classes() -> None:
    types = model_types()
    assert types == sorted(set(types))
    assert {"llama", "bert", "t5", "gpt2", "deberta-v2", "falcon+alibi", "vit"} <= set(types)
    classes = {"llama": "LlamaForCausalLM", "bert": "BertForMaskedLM", "bart": "BartForConditionalGeneration"}
    assert {name: model_class(name).__name__ for name in classes} == classes
    with pytest.raises(InputError, match="no model for 'nothing'"):
        model_class("nothing")


def test_configurations_are_small_and_have_each_kind_of_layer() -> None:
    gemma, latent, llama = (small_config(name) for name in ("gemma3_text", "deepseek_v3", "llama+yarn"))
    assert gemma.layer_types == ["sliding_attention", "full_attention"]
    assert (gemma.num_hidden_layers, gemma.hidden_size, gemma.sliding_window) == (2, 64, 8)
    assert latent.num_key_value_heads == latent.num_attention_heads == 4
    assert llama.rope_parameters["rope_type"] == "yarn"
    both = small_config("encoder-decoder")
    assert both.decoder.is_decoder
    assert both.encoder.hidden_size == 64


@pytest.mark.parametrize(("name", "calls", "placed"), [("gemma3_text", 2, 2), ("gpt_neo", 2, 2), ("bart", 6, 4)])
def test_what_is_understood_is_proved(name: str, calls: int, placed: int) -> None:
    state = torch.random.get_rng_state()
    found = surveyed(name)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (found.outcome, found.calls, found.placed) == ("proved", calls, placed)
    assert found.parameters is not None
    assert found.parameters < 1_000_000
    for value in (found.weights, found.outputs, found.whole):
        assert value is not None
        assert value < 1e-5
    assert (found.why is None) == (placed == calls)
    assert found.returned == calls


def test_attentions_that_are_not_the_weights_are_told_apart() -> None:
    """SqueezeBERT returns its logits."""
    found = [
        Surveyed(name, "proved", "X", calls=2, placed=2, returned=count) for name, count in (("a", 1), ("b", None))
    ]
    lines = Survey({}, tuple(found)).markdown("proved").splitlines()
    assert [line.split(" | ")[5] for line in lines] == ["returned", "---", "1 of 2", "–"]
    assert surveyed("squeezebert").returned == 0


def test_models_and_inputs_are_the_same_each_time() -> None:
    one, two = small_model("gpt2"), small_model("gpt2")
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    inputs = small_inputs(one)
    assert torch.equal(inputs["input_ids"], small_inputs(two)["input_ids"])
    assert inputs["attention_mask"].sum(1).tolist() == [12, 9]
    assert "attention_mask" not in small_inputs(one, padded=False)
    one.set_attn_implementation("eager")
    with torch.no_grad():
        attention = one(**inputs, output_attentions=True).attentions
    seen = attention[0][0, :, -1]  # the last query, which sees all 12 keys
    assert float(seen.max()) > 2 / 12  # not flat


@pytest.mark.parametrize(
    ("name", "calls", "placed", "effect", "why"),
    [
        ("bros", 2, 0, "states", "its bias is no function of the offset alone"),
        ("blt", 11, 8, "states", "it has 26 queries for 12 keys"),
        ("diffllama", 2, 2, None, "DiffLlamaAttention puts out several products of the same weights"),
        ("inkling2_text", 2, 0, "loss", "depend on the position in a way that was not found"),
        ("lilt", 2, 0, None, "depend on the position in a way that was not found"),
        ("vits", 2, 0, "states", "its bias is no function of the offset alone"),
    ],
)
def test_what_reads_draws_or_attends_otherwise_is_proved(
    name: str, calls: int, placed: int, effect: str | None, why: str
) -> None:
    """Boxes beside tokens, patches of bytes, several products of the same weights, sinks a query, noise in the pass."""
    found = surveyed(name)
    assert (found.outcome, found.calls, found.placed, found.effect) == ("proved", calls, placed, effect)
    assert why in str(found.why)
    for value in (found.weights, found.outputs, found.whole):
        assert value is not None
        assert value < 1e-5


def test_other_outcomes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert surveyed("mamba").outcome == "none"
    vision, refused = surveyed("vit"), surveyed("longformer")
    assert vision.outcome == "other"
    assert "takes no token ids but pixel_values" in str(vision.why)
    assert refused.outcome == "refused"
    assert "layer.0.attention.self (LongformerSelfAttention)" in str(refused.why)
    with pytest.raises(NotText, match="its configuration has vision_config"):
        small_model("qwen3_5")
    monkeypatch.setattr("toeplens.studies.auditing.survey.models.BESIDE", {})
    cut = surveyed("bros")
    assert cut.outcome == "failed"
    assert "bbox" in str(cut.why)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("dia", "its decoder_config reads num_channels codes at each place"),
        ("gemma4_assistant", "reads what another model has computed: it takes shared_kv_states"),
        ("gemma4_unified_assistant", "reads what another model has computed: it takes shared_kv_states"),
        ("higgs_audio_v2_tokenizer", "HiggsAudioV2TokenizerModel is for more than text: it needs torchaudio"),
        ("voxtral_realtime_text", "VoxtralRealtimeTextModel is not among what transformers loads"),
    ],
)
def test_what_is_no_text_model_by_itself_is_another_thing(name: str, why: str) -> None:
    found = surveyed(name)
    if name.startswith("higgs") and "input_values" in str(found.why):  # torchaudio is there
        why = "takes no token ids but input_values"
    assert found.outcome == "other"
    assert why in str(found.why)


def test_a_placeholder_of_another_library_is_no_text_model() -> None:
    class Placeholder:
        _backends = ("torch", "torchvision")

    with pytest.raises(NotText, match="Placeholder is for more than text: it needs torchvision"):
        refuse_other_inputs(Placeholder, "bert")


def test_what_goes_with_tokens_is_made_of_them() -> None:
    model = small_model("bros")
    inputs = small_inputs(model)
    assert inputs["bbox"].shape == (2, 12, 4)
    assert bool((inputs["bbox"][..., 2:] > inputs["bbox"][..., :2]).all())
    with torch.no_grad():
        wanted = model(**inputs)[0]
        with given_beside(model):
            for found in (model(inputs["input_ids"], attention_mask=inputs["attention_mask"]), model(**inputs)):
                torch.testing.assert_close(found[0], wanted)
            row = model(input_ids=inputs["input_ids"][:1])[0]
    torch.testing.assert_close(row, wanted[:1], atol=1e-5, rtol=1e-5)
    assert "forward" not in vars(model)
    with pytest.raises(ValueError, match="bbox"):
        model(inputs["input_ids"])
    with given_beside(gpt := small_model("gpt2")):
        assert "forward" not in vars(gpt)


def summed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """[N, B, H, d], as XLNet has it."""
    logits = torch.einsum("ibnd,jbnd->bnij", q, k) * 0.5 - 1e30 * torch.einsum("ij->ij", mask)
    return torch.einsum("bnij,jbnd->ibnd", logits.softmax(3), v).permute(1, 2, 0, 3)


def emptied(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, value: float = 0.0) -> Tensor:
    """Weights of hidden keys set to 0 after the softmax too, as CPM-Ant has it."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    logits = (q @ k.transpose(-1, -2) * 0.5).masked_fill(mask > 0, -torch.inf)
    return logits.softmax(-1).masked_fill(mask > 0, value) @ v


def zeroed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Logits of hidden keys multiplied by 0 and put low, as GPT-1 has it."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    logits = torch.matmul(q, k.transpose(-1, -2)) * 0.5
    return (logits * (1 - mask) + -1e4 * mask).softmax(-1) @ v


@pytest.mark.parametrize("form", [summed, emptied, zeroed])
def test_other_ways_to_write_attention_are_followed(form: Any) -> None:
    """float64, loops: what is handed over says which keys were hidden, and gives the outputs."""
    q, k, v = torch.randn(3, 5, 2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.ones(5, 5, dtype=torch.float64).triu(1)
    found: list[tuple[Any, Tensor, Tensor]] = []
    with Products(lambda: True, lambda *made: found.append(made)):
        wanted = form(q, k, v, mask)
    ((made, values, out),) = found
    assert made.scale == 0.5
    hidden = [table for table, _ in made.hidden] + [table <= low(table.dtype) for table, _ in made.terms]
    covered = torch.stack([torch.broadcast_to(table, (5, 5)) for table in hidden]).any(0)
    assert torch.equal(covered, mask > 0)
    for batch in range(2):
        for head in range(3):
            for row in range(5):
                logits = [0.5 * float(q[row, batch, head] @ k[key, batch, head]) for key in range(row + 1)]
                weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
                torch.testing.assert_close(made.weights[batch, head, row, : row + 1], weights, atol=1e-12, rtol=0)
                mean = sum(weights[key] * v[key, batch, head] for key in range(row + 1))
                torch.testing.assert_close(out[batch, head, row], mean, atol=1e-12, rtol=0)
    assert torch.equal(out, wanted)
    torch.testing.assert_close(values, v.permute(1, 2, 0, 3), atol=0, rtol=0)


def test_other_sums_and_other_masks_of_weights_are_not_followed() -> None:
    q, k, v = torch.randn(3, 5, 2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found: list[Any] = []
    with Products(lambda: True, lambda *made: found.append(made)):
        emptied(q, k, v, torch.ones(5, 5).triu(1), value=0.1)
        for form in ("ibnd,jbnd->nij", "ibnd,jbnd->bnji", "ibnd,jbnd->bnidj", "...d,...d->..."):
            torch.einsum(form, q, k).softmax(-1)
        half = (torch.einsum("ibnd,jbnd->bnij", q, k) * torch.full((5, 5), 0.5)).softmax(-1) @ v.permute(1, 2, 0, 3)
    assert half.shape == (2, 3, 5, 4)
    assert found == []


def test_large_models_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LARGEST == 50_000_000
    monkeypatch.setattr("toeplens.studies.auditing.survey.models.LARGEST", 1000)
    found = surveyed("gpt2")
    assert found.outcome == "failed"
    assert "at most 1,000 are made" in str(found.why)


def test_another_pass_is_never_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the proof of each call cannot see: a captured pass that is not the model's own, attention that is missed."""
    model = small_model("gpt2")
    inputs, captured = small_inputs(model), checking.captured

    def other(model: Any, inputs: Any, look: Any) -> Any:
        return [1.01 * captured(model, inputs, look)[0]]

    def fewer(model: Any, inputs: Any, look: Any) -> Any:
        return captured(model, inputs, lambda call: look(call) if call.layer else None)

    for planted, words in ((other, "differs by 1.0e-02"), (fewer, "of 2 softmaxes .* 1 were captured")):
        monkeypatch.setattr(checking, "captured", planted)
        with pytest.raises(InputError, match=words):
            check(model, inputs)

    def broken(model: Any, inputs: Any, look: Any) -> Any:
        raise TypeError("a mask is missing")

    monkeypatch.setattr(checking, "captured", broken)
    found = surveyed("gpt2")
    assert found.outcome == "refused"
    assert "broke off: TypeError: a mask is missing" in str(found.why)


def test_calls_without_shares_are_told_by_their_reason() -> None:
    bart, gpt = surveyed("bart"), surveyed("gpt2")
    assert gpt.unplaced == {}
    assert bart.unplaced == {"its queries and keys are of different sequences.": {"decoder cross": [0, 1]}}
    other = Surveyed("c_d", "proved", "X", unplaced={"a | b": {"encoder self": [0], "decoder self": [2]}})
    refused = Surveyed("e", "refused", "X", unplaced={"a | b": {"encoder self": [0]}})
    assert Survey({}, (bart, gpt, other, refused)).without_shares().splitlines()[2:] == [
        "| a / b | `c_d` (encoder self 1; decoder self 3) |",
        "| its queries and keys are of different sequences | `bart` (decoder cross 1, 2) |",
    ]


def test_a_survey_goes_on_where_it_was(tmp_path: Path, in_process: list[str]) -> None:
    told: list[Surveyed] = []
    first = surveying.survey(tmp_path, only=["gpt2", "mamba"], on_progress=told.append)
    assert in_process == ["gpt2", "mamba"]
    assert [each.name for each in told] == in_process
    second = surveying.survey(tmp_path, only=["gpt2", "mamba", "vit"])
    assert in_process == ["gpt2", "mamba", "vit"]
    assert second.found[:2] == first.found
    assert second.totals() == {"proved": 1, "refused": 0, "none": 1, "failed": 0, "other": 1}
    table = second.table("proved", "none")
    assert list(table) == list(COLUMNS)
    assert table["name"] == ["gpt2", "mamba"]
    assert second.largest()["outputs"] == first.found[0].outputs
    stored = json.loads((tmp_path / "survey.json").read_text())
    assert Survey.from_dict(stored) == second
    assert Survey.from_dict(json.loads(json.dumps(first.to_dict()))) == first
    assert Survey({}, ()).largest() == {"weights": None, "outputs": None, "whole": None}


def test_wrong_input_and_damaged_records_are_refused(tmp_path: Path, in_process: list[str]) -> None:
    with pytest.raises(InputError, match="only: there is no 'gpt22'"):
        surveying.survey(tmp_path, only=["gpt22"])
    surveying.survey(tmp_path, only=["mamba"])
    record = tmp_path / "types" / "mamba.json"
    for damaged in ('{"name": "mamba"}', '{"name": "mamba", "outcome": "fine"}', "[1]", "{"):
        record.write_text(damaged)
        with pytest.raises(InputError, match="damaged"):
            surveying.survey(tmp_path, only=["mamba"])
    record.unlink()
    stored = json.loads((tmp_path / "survey.json").read_text())
    for damaged in ({"about": {}}, [], stored | {"found": 3}, stored | {"found": [{"name": 1, "outcome": "proved"}]}):
        with pytest.raises(InputError, match="damaged"):
            Survey.from_dict(damaged)
    (tmp_path / "survey.json").write_text(json.dumps(stored | {"about": {"transformers": "4.0"}}))
    with pytest.raises(InputError, match=r"a survey of transformers 4\.0"):
        surveying.survey(tmp_path, only=["mamba"])


def test_processes_that_die_or_hang_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for processes: one that leaves no record, one that never ends."""

    class Process:
        exitcode: int | None = None

        def __init__(self, target: Any, args: tuple[str, Path], daemon: bool) -> None:
            self.hangs, self.sentinel = args[0] == "bert", 0

        def start(self) -> None:
            self.exitcode = None if self.hangs else -11

        def is_alive(self) -> bool:
            return self.exitcode is None

        def kill(self) -> None:
            self.exitcode = self.exitcode or -9

        def join(self) -> None:
            pass

    class Context:
        def __init__(self, kind: str) -> None:
            self.Process = Process

        def set_forkserver_preload(self, names: list[str]) -> None:
            pass

    monkeypatch.setattr(surveying.multiprocessing, "get_context", Context)
    monkeypatch.setattr(surveying, "wait", lambda sentinels, timeout: [])
    found = surveying.survey(tmp_path, only=["bert", "gpt2"], workers=2, limit=0.2)
    assert [(each.name, each.outcome, each.why) for each in found.found] == [
        ("bert", "failed", "it took more than 0.2 seconds."),
        ("gpt2", "failed", "its process died (-11)."),
    ]
