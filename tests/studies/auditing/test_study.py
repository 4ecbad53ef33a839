"""An audit's numbers are those of plain programs; a real model is audited; what cannot be audited is refused."""

from __future__ import annotations

import csv
import io
import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet
from tests.backends.hf.models import GPT, GROUPED, T5, calls_in, tiny
from torch import Tensor

from toeplens.backends import DecoderSource
from toeplens.backends.hf import attention as masks_module
from toeplens.backends.hf import calls as calls_module
from toeplens.encodings import cpu_products
from toeplens.encodings.conformance import _LargestTensor
from toeplens.lens import AttentionTrace, behaviour, fit_decay
from toeplens.studies import auditing
from toeplens.studies.auditing import COLUMNS, Audit, audit, effects, measuring, sentences
from toeplens.training import Batches, Run, run_spec, train
from toeplens.training.presets import starting_spec
from toeplens.utils import EnvironmentFailure, InputError

SIZES = GROUPED | {"vocab_size": 60}
TOKENS = torch.randint(3, 60, (9, 24), generator=torch.Generator().manual_seed(1))
LICENSE = Path(__file__).parents[3] / "LICENSE"

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", SIZES),
    "Mistral": ("MistralForCausalLM", SIZES | {"sliding_window": 5}),
    "GPT2": ("GPT2LMHeadModel", GPT | {"vocab_size": 60, "n_positions": 40}),
    "T5": ("T5ForConditionalGeneration", T5 | {"vocab_size": 60}),
}


@cache
def model_of(kind: str, **sizes: Any) -> Any:
    name, standard = KINDS[kind]
    return tiny(name, **standard | sizes)


@cache
def audit_of(kind: str) -> Audit:
    return audit(model_of(kind), TOKENS)


def attentions_of(model: Any, tokens: Tensor) -> list[Tensor]:
    """What the model itself returns under ``output_attentions``, in float64."""
    before = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        result = model(input_ids=tokens, output_attentions=True).attentions
    model.config._attn_implementation = before
    return [x.double() for x in result]


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "GPT2"])
def test_patterns_match_the_models_own_attention(kind: str) -> None:
    actual, size = audit_of(kind), TOKENS.shape[1]
    heads = {(head.layer, head.head): head for head in actual.heads}
    assert len(heads) == 8
    away = (torch.arange(size)[:, None] - torch.arange(size)).abs()
    for layer, weights in enumerate(attentions_of(model_of(kind), TOKENS)):
        for head in range(4):
            head_weights, record = weights[:, head], heads[layer, head]
            diagonal = [head_weights.diagonal(-k, dim1=1, dim2=2) for k in (0, 1)]
            assert record.current == pytest.approx(float(diagonal[0].mean()), abs=1e-6)
            assert record.previous == pytest.approx(float(diagonal[1].mean()), abs=1e-6)
            assert record.distance == pytest.approx(float((head_weights * away).sum() / head_weights.sum()), abs=1e-4)
            bins = [float((head_weights * (away.log2().floor() == k)).sum() / (9 * size)) for k in range(5)]
            assert record.profile == pytest.approx([float(diagonal[0].mean()), *bins], abs=1e-6)
            assert record.next is None
            assert record.sink == pytest.approx(0, abs=1e-6)


def reference_shares(q: Tensor, k: Tensor, turns: Tensor | None, window: int | None) -> list[float]:
    """Positional, symbolic and interaction share of one head, from each query's table of logits, in full."""
    sums, size = np.zeros(3), q.shape[1]
    for b in range(len(q)):
        place = torch.zeros_like(k[b]) if turns is not None else k.mean(0)
        for i in range(1, size):
            first = 0 if window is None else max(0, i - window + 1)
            visible = range(first, i + 1)
            rows = []
            for j in visible:
                contents = (k[b] - place)[first : i + 1] + place[j]
                if turns is not None:
                    z, w = torch.complex(contents[:, :4], contents[:, 4:]), torch.complex(q[b, i, :4], q[b, i, 4:])
                    rows.append((w * z.conj() * torch.exp(1j * turns * (i - j))).real.sum(-1))
                else:
                    rows.append(contents @ q[b, i])
            table = torch.stack(rows).numpy()
            p, s = table.mean(1), table.mean(0)
            rest = table - p[:, None] - s + table.mean()
            sums += [p.var(), s.var(), (rest**2).mean()]
    return list(sums / sums.sum())


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "GPT2"])
def test_shares_match_explicit_tables(kind: str) -> None:
    """Rotated keys are moved whole; keys that nothing turns have their mean over the sequences as position part."""
    model = model_of(kind)
    with torch.no_grad():
        if kind == "GPT2":
            block = model.transformer.h[0]
            x = model.transformer.wte(TOKENS) + model.transformer.wpe.weight[: TOKENS.shape[1]]
            q, k, _ = block.attn.c_attn(block.ln_1(x)).double().split(32, dim=-1)
            turns = None
        else:
            block = model.model.layers[0]
            x = block.input_layernorm(model.model.embed_tokens(TOKENS))
            q, k = block.self_attn.q_proj(x).double(), block.self_attn.k_proj(x).double()
            turns = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    window = 5 if kind == "Mistral" else None
    for head in range(4):
        key = head if kind == "GPT2" else head // 2
        parts = q[..., 8 * head : 8 * head + 8], k[..., 8 * key : 8 * key + 8]
        record = audit_of(kind).heads[head]
        expected = reference_shares(*parts, turns, window)
        assert [record.positional, record.symbolic, record.interaction] == pytest.approx(expected, abs=1e-5)


def test_rotary_layers_have_frequencies_and_others_state_their_position() -> None:
    llama, gpt, t5 = audit_of("Llama"), audit_of("GPT2"), audit(model_of("T5"), TOKENS, effects="none")
    assert llama.layers[0].frequencies == pytest.approx([1, 0.1, 0.01, 0.001], abs=1e-6)
    assert llama.layers[0].position == "rotation of 4 pairs, 8 of 8 dimensions (half)"
    for head in llama.heads:
        assert len(head.norm_use) == 5
        assert sum(head.norm_use) == pytest.approx(1)
        assert sum(head.variance_use) == pytest.approx(1)
        assert -10 < (head.centre or 0) <= 0
    assert [layer.window for layer in audit_of("Mistral").layers] == [5, 5]
    assert gpt.layers[0].position == "none in the attention"
    assert [(x.side, x.kind, x.position) for x in t5.layers[:1]] == [("encoder", "self", "bias by offset")]
    assert {x.kind for x in t5.layers} == {"self", "cross"}
    assert [x.unknown is None for x in t5.layers] == [x.kind == "self" for x in t5.layers]


@pytest.mark.parametrize("kind", ["Llama", "T5"])
def test_decays_are_fitted_to_mean_logits_by_distance(kind: str) -> None:
    """Of the captured logits, written out pair by pair; causal, and with keys on both sides."""
    model, size = model_of(kind), TOKENS.shape[1]
    inputs = {"input_ids": TOKENS} | ({"decoder_input_ids": TOKENS} if kind == "T5" else {})
    actual, logits = audit(model, TOKENS, effects="none"), calls_in(model, inputs)[0].logits()
    pairs = [(i, j) for i in range(size) for j in range(size) if kind == "T5" or j <= i]
    for head in actual.heads_of(actual.layers[0]):
        by_distance: list[list[float]] = [[] for _ in range(size)]
        for i, j in pairs:
            by_distance[abs(i - j)] += logits[:, head.head, i, j].tolist()
        means, counts = (np.array([f(each) for each in by_distance]) for f in (np.mean, len))
        best = fit_decay(np.arange(size), means, counts=counts)[0]
        assert head.decay.form == best.form
        assert head.decay.r2 == pytest.approx(best.r2, abs=1e-5)
        assert head.decay.parameters == pytest.approx(dict(best.parameters), rel=1e-3, abs=1e-4)
        half = best.half_distance if best.r2 >= 0.5 else np.nan
        assert head.half_distance == (pytest.approx(half, rel=1e-3) if np.isfinite(half) else None)
    assert {head.decay for head in actual.heads if head.kind == "cross"} <= {None}


@pytest.mark.parametrize("size", [24, 8])
def test_spectrum_ends_of_known_kernels_are_eigenvalues(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the Hermitian part of the bias as a matrix of all tokens or of the most that are asked for.

    T5's of both sides, and of a decoder, which sees one.
    """
    if size < TOKENS.shape[1]:
        monkeypatch.setattr(measuring, "MAX_ROWS", size)
    model = model_of("T5")
    actual = audit(model, TOKENS, effects="none")
    buckets = {"encoder": model.encoder.block[0].layer[0].SelfAttention, "decoder": model.decoder.block[0].layer[0]}
    buckets["decoder"] = buckets["decoder"].SelfAttention
    for side, attention in buckets.items():
        bias = attention.compute_bias(size, size)[0].detach().double().numpy()
        for head in (head for head in actual.heads if (head.side, head.kind, head.layer) == (side, "self", 0)):
            matrix = bias[head.head] if side == "encoder" else np.tril(bias[head.head])
            eigenvalues = np.linalg.eigvalsh((matrix + matrix.T) / 2)
            assert head.kernel.size == size
            assert [head.kernel.lowest, head.kernel.highest] == pytest.approx(eigenvalues[[0, -1]], abs=1e-5)
            assert head.kernel.symbol_low <= head.kernel.lowest + 1e-9
            assert head.kernel.symbol_high >= head.kernel.highest - 1e-9
    assert {head.kernel for head in audit_of("Llama").heads} == {None}
    assert f"matrices of {size} tokens, have eigenvalues from " in " ".join(sentences.finding_sentences(actual))
    assert Audit.from_dict(json.loads(json.dumps(actual.to_dict()))) == actual


def test_layers_can_be_selected_and_deposits_sum_effects() -> None:
    exact, whole = audit(model_of("Llama"), TOKENS, layers=[1]), audit_of("Llama")
    assert (exact.effect, exact.baseline) == ("loss", whole.baseline)
    assert [head.layer for head in exact.heads] == [1] * 4
    for head, same in zip(exact.heads, whole.heads[4:], strict=True):
        assert head.effect == pytest.approx(same.effect, abs=1e-5)
        assert head.effect_low <= head.effect <= head.effect_high
    drops = np.clip([head.effect or 0.0 for head in exact.heads], 0, None)
    deposit = exact.layers[0].deposit
    assert deposit["helps"] == pytest.approx(drops.sum())
    assert deposit["harms"] == pytest.approx(sum(head.effect or 0.0 for head in exact.heads) - drops.sum())


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_logits_by_offset_match_with_ffts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on long inputs, where nothing but causality hides keys; float32 logits, so to 1e-5."""
    whole = audit_of(kind)
    monkeypatch.setattr(measuring, "_FOURIER_FACTOR", 0)
    parts = audit(model_of(kind), TOKENS, effects="none")
    for a, b in zip(whole.heads, parts.heads, strict=True):
        for name in set(COLUMNS) - {"side", "kind", "effect", "effect_low", "effect_high"}:
            assert getattr(a, name) == pytest.approx(getattr(b, name), abs=1e-5), name


def test_long_inputs_allocate_no_n_by_n_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor that any operation makes stays far below N x N."""
    length = 1024
    tokens = torch.randint(3, 60, (1, length), generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(masks_module, "AT_ONCE", 1 << 14)
    monkeypatch.setattr(calls_module, "_AT_ONCE", 1 << 14)
    monkeypatch.setattr(calls_module, "_BLOCK", 1 << 14)
    model = model_of("Llama", max_position_embeddings=length, num_hidden_layers=1)
    cpu_products.medium_is_exact()
    with _LargestTensor() as seen:
        audit(model, tokens, effects="none")
    assert seen.elements < length**2 / 2


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    start = starting_spec("smoke", "paper", "trigger-distance", "rope", seed=0)
    return train(run_spec(**start), tmp_path_factory.mktemp("runs"))


def test_own_runs_are_audited_like_pretrained_models(own_run: Run) -> None:
    actual = audit(own_run, sequences=20)
    assert audit(own_run.directory, sequences=20).heads == actual.heads
    data = Batches.of(own_run.spec.build_task().dataset("test", 20, own_run.spec.data_seed), torch.device("cpu"))
    trace = AttentionTrace(DecoderSource(own_run.model()), data.tokens, data.lengths)
    expected = behaviour(trace, counted="used")
    made = np.array([head.positional for head in actual.heads]).reshape(expected.positional.shape)
    np.testing.assert_allclose(made, expected.positional, atol=1e-12)
    assert actual.effect == "loss"
    assert all(layer.outputs < 1e-5 and layer.frequencies[0] == 1 for layer in actual.layers)
    for layer in trace:
        weights = layer.weights() * layer.present[:, None, :, None]
        current = weights.diagonal(dim1=2, dim2=3).sum((0, 2)) / layer.present.sum()
        kept = [head.current for head in actual.heads if head.layer == layer.layer]
        np.testing.assert_allclose(kept, current, atol=1e-6)
    with pytest.raises(InputError, match="data must not be set for a run"):
        audit(own_run, "text")


def test_only_requested_layers_of_a_run_are_ablated(own_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    replay, copies = DecoderSource.replay, list[tuple[int, int]]()

    def count(self: Any, state: Any, gains: Tensor, *args: Any) -> Tensor:
        copies.append((state.layer, len(gains.unique(dim=0))))
        return replay(self, state, gains, *args)

    whole = audit(own_run, sequences=20)
    monkeypatch.setattr(DecoderSource, "replay", count)
    heads = audit(own_run, sequences=20, layers=(1,)).heads
    assert heads == tuple(head for head in whole.heads if head.layer == 1)
    assert copies == [(1, 1), (0, 1), (1, 4)]


def test_records_and_tables_round_trip(tmp_path: Path) -> None:
    actual = audit_of("Llama")
    auditing.save_audit(actual, tmp_path / "a")
    assert auditing.open_audit(tmp_path / "a") == Audit.from_dict(json.loads(json.dumps(actual.to_dict())))
    table = parquet.read_table(tmp_path / "a" / "heads.parquet").to_pydict()
    assert table == actual.table()
    rows = list(csv.DictReader(io.StringIO((tmp_path / "a" / "heads.csv").read_text())))
    assert [float(row["positional"]) for row in rows] == [head.positional for head in actual.heads]
    assert rows[0]["next"] == ""
    assert list(rows[0]) == list(COLUMNS)
    (tmp_path / "a" / "audit.json").write_text('{"layers": 3}')
    with pytest.raises(InputError, match=r"audit\.json is damaged: about is missing"):
        auditing.open_audit(tmp_path / "a")
    with pytest.raises(InputError, match=r"contains no audit\.json"):
        auditing.open_audit(tmp_path)


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        ([[0.5, 1.5]], {}, "must be whole numbers"),
        ([[3, 60]], {}, "^tokens must be from 0 to 59, the model's vocabulary, got 3 to 60"),
        ([[3, -1]], {}, "^tokens must be .*, got -1 to 3"),
        ([[3] * 41], {}, "^max_tokens must be at most 40, the max_position_embeddings .*, got 41"),
        (TOKENS, {"first": 2}, "first must not be set with effects 'none'"),
        (TOKENS, {"effects": "bands", "first": 2}, "first must not be set with effects 'bands'"),
        (TOKENS, {"effects": "exact", "first": 99}, "first must be at most 8, the number of heads, got 99"),
        (None, {"max_tokens": 10**6}, "max_tokens must be at most .*, got 1000000"),
        (TOKENS, {"effects": "some"}, "got 'some'"),
        (TOKENS, {"effects": "exact", "heads": [4]}, r"^heads must be from 0 to 3, got 4\."),
        (TOKENS, {"effects": "exact", "heads": (-1, 2)}, r"^heads must be from 0 to 3, got -1\."),
        (TOKENS, {"effects": "exact", "heads": (1.5,)}, r"^heads must be whole numbers in a tuple, got \(1\.5,\)"),
        (TOKENS, {"layers": 1}, "^layers must be whole numbers in a tuple, got 1"),
        (TOKENS, {"layers": ()}, "^layers must have at least one entry, got none"),
        (TOKENS, {"dtype": "float64"}, r"^dtype must not be set for a model object, .* Use model\.to"),
        (TOKENS, {"device": "nonsense"}, "^device must not be set for a model object"),
        (TOKENS, {"memory": "1G"}, "^memory must not be set for a model object"),
    ],
)
def test_invalid_input_is_refused(data: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        audit(model_of("GPT2"), data, **{"effects": "none"} | options)


def test_models_load_from_directories_or_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model must be .*, got a Linear"):
        audit(torch.nn.Linear(2, 2))

    class Tuned(torch.nn.Module):
        def get_base_model(self) -> Any:  # as of the package peft
            return model_of("Llama")

    with pytest.raises(InputError, match=r"; its get_base_model\(\) is one, got a Tuned"):
        audit(Tuned())
    model_of("Llama").save_pretrained(tmp_path)
    made = audit(tmp_path, TOKENS, effects="none")
    assert [head.positional for head in made.heads] == [head.positional for head in audit_of("Llama").heads]


def test_out_of_memory_suggests_what_to_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(measuring, "capture_and_compare", full)
    with pytest.raises(EnvironmentFailure, match=r"9 sequences of 24 tokens. Lower sequences, max_tokens"):
        audit(model_of("Llama"), TOKENS)


def test_audits_in_several_threads_match_sequential_audits() -> None:
    """Two models at once, and one model twice."""
    models = [model_of("Llama"), model_of("Llama", num_hidden_layers=1)]
    alone = [audit(model, TOKENS).heads for model in models]
    for pair in ([0, 1], [0, 0]):
        with ThreadPoolExecutor(2) as pool:
            actual = list(pool.map(lambda which: audit(models[which], TOKENS).heads, pair))
        assert actual == [alone[which] for which in pair]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    for name, content in (("empty.npy", b""), ("deep.json", b"[" * 100_000)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=f"tokens: .*{name} could not be read"):
            auditing.read_tokens(tmp_path / name)
    (tmp_path / "truths.json").write_text("[[1, 2, 3], [true, 1, 2]]")
    with pytest.raises(InputError, match=r"^tokens must be whole numbers, got true or false in .*truths\.json\.$"):
        auditing.read_tokens(tmp_path / "truths.json")
    (tmp_path / "marked.json").write_bytes(b"\xef\xbb\xbf[1, 2]")  # with a mark of UTF-8, as some editors write
    assert auditing.read_tokens(tmp_path / "marked.json").tolist() == [1, 2]


def test_intervals_of_few_sequences_resample_token_blocks() -> None:
    """Intervals of a few rows cover what they should."""
    model = model_of("Llama")
    one_sequence = audit(model, TOKENS[:1], layers=[1])
    assert one_sequence.about["intervals"] == "over blocks of about 8 tokens within the sequences"
    assert all((head.effect_low or 0) < (head.effect or 0) < (head.effect_high or 0) for head in one_sequence.heads)
    assert "intervals" not in audit(model, TOKENS[:1, :12], layers=[1]).about
    rows = np.random.default_rng(0).normal(1, 1, (2000, 3, 1, 1))
    ends = np.array([[end[0] for end in effects.interval_of(each, 0)[1:]] for each in rows])
    assert 0.93 < np.mean((ends[:, 0] < 1) & (ends[:, 1] > 1)) < 0.97
