"""A run's structure is what the lens finds on the run's own test set, as numbers that JSON can hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from toeplens.backends import DecoderSource, relevance
from toeplens.engine import examples_of
from toeplens.lens import AttentionTrace, decompose, toeplitz_profile
from toeplens.studies.decomposition import LOGIT_PARTS, MAX_SHOWN, _symbol, decompose_run
from toeplens.training import Run, run_spec, train
from toeplens.training.presets import starting_spec
from toeplens.utils import InputError


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    directories = {}
    for protocol, encoding in (("paper", "rope"), ("released", "alibi"), ("paper", "fox"), ("released", "mla")):
        content = starting_spec("smoke", protocol, "trigger-distance", encoding, 0)
        content |= {"epochs": 1, "train_examples": 64, "test_examples": 48}
        directories[encoding] = train(run_spec(**content), tmp_path_factory.mktemp("runs"), compile="off")
    return directories


def test_the_decomposition_matches_the_lens(runs: dict[str, Run]) -> None:
    run = runs["rope"]
    structure = decompose_run(run, examples=32)
    examples = examples_of(run.spec, 32)
    trace = AttentionTrace(DecoderSource(run.model()), torch.from_numpy(examples.tokens))
    assert [layer.layer for layer in structure.layers] == list(range(run.spec.model.num_layers))
    for layer in structure.layers:
        parts = decompose(trace, layer.layer)
        np.testing.assert_allclose(layer.parts.shares["logits"], parts.shares.logits, atol=1e-9)
        np.testing.assert_allclose(layer.parts.kinds["softmax"], parts.kinds.softmax, atol=1e-9)
        np.testing.assert_allclose(layer.toeplitz, parts.profile.share, atol=1e-9)
        np.testing.assert_allclose(layer.parts.branches["logits"].sum(1), 1, atol=1e-9)


def test_a_non_separable_encoding_gives_the_reason_and_the_rest(runs: dict[str, Run]) -> None:
    structure = decompose_run(runs["fox"], examples=8)
    for layer in structure.layers:
        assert layer.parts is None
        assert "content of other tokens" in layer.reason
    run = runs["fox"]
    examples = examples_of(run.spec, 8)
    actual = AttentionTrace(DecoderSource(run.model()), torch.from_numpy(examples.tokens))[0]
    logits = actual.logits().double()
    for delta in (0, 3):
        expected = logits.diagonal(-delta, 2, 3).mean((0, 2))
        np.testing.assert_allclose(structure.layers[0].means[:, delta], expected, atol=1e-6)


def test_the_example_shows_the_logits_of_one_sequence(runs: dict[str, Run]) -> None:
    for run in runs.values():
        for layer in decompose_run(run, examples=8, shown=2).layers:
            heads, rows, columns = layer.example.shape
            assert heads == len(layer.heads) <= 2
            assert rows == columns <= MAX_SHOWN
            future = np.triu(np.ones((rows, rows), bool), 1)
            assert np.isnan(layer.example[:, future]).all() == run.spec.model.causal
            assert np.isfinite(layer.example[:, ~future]).all()


def test_the_symbol_lies_within_the_eigenvalues_of_the_kernels_matrix(runs: dict[str, Run]) -> None:
    layer = decompose_run(runs["alibi"], examples=8).layers[0]
    half = (layer.parts.kernel + layer.parts.kernel[:, ::-1]) / 2
    size = (half.shape[1] + 1) // 2
    places = np.arange(size)
    for head in range(len(half)):
        values = np.linalg.eigvalsh(half[head][places[:, None] - places + size - 1])
        assert values[0] - 1e-9 <= layer.symbol[head].min()
        assert layer.symbol[head].max() <= values[-1] + 1e-9


def test_class_logits_are_attributed_where_possible(runs: dict[str, Run]) -> None:
    run = runs["alibi"]
    examples = examples_of(run.spec, 8)
    actual = relevance(run.model(), torch.from_numpy(examples.tokens))
    origins = decompose_run(run, examples=8).origins
    assert origins.parts.keys() == set(LOGIT_PARTS)
    assert origins.parts["position_attention"] == pytest.approx(actual.position_attention.sum(1).mean())
    assert sum(origins.parts.values()) == pytest.approx(origins.logit, rel=1e-9)
    assert origins.logit == pytest.approx(run.model()(torch.from_numpy(examples.tokens)).max(-1).values.mean().item())
    assert origins.share == pytest.approx(actual.share.mean())
    np.testing.assert_array_equal(origins.by_head, actual.by_layer)
    assert 0 <= origins.error < 1e-9
    refused = decompose_run(runs["fox"], examples=4)
    assert refused.origins is None
    assert refused.no_origins.startswith("encoding must be vectors added at the input")
    assert decompose_run(runs["rope"], examples=4).no_origins == ""


@pytest.mark.parametrize("causal", [True, False])
def test_padding_does_not_widen_a_window(causal: bool) -> None:
    """Sequences of 7 tokens and less in a width of 12 have the symbol that they have in a width of 7."""
    q, k = torch.randn(2, 3, 2, 12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lengths = torch.tensor([7, 4, 6])
    padded = toeplitz_profile(q, k, causal=causal, lengths=lengths).pool(0)
    bare = toeplitz_profile(q[..., :7, :], k[..., :7, :], causal=causal, lengths=lengths).pool(0)
    for actual, expected in zip(_symbol(padded, causal), _symbol(bare, causal), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


def test_layers_can_be_selected_and_invalid_input_is_refused(runs: dict[str, Run], tmp_path: Path) -> None:
    assert [layer.layer for layer in decompose_run(runs["rope"], layers=[1], examples=4).layers] == [1]
    with pytest.raises(InputError, match="layers"):
        decompose_run(runs["rope"], layers=[9], examples=4)
