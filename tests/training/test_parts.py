"""A batch that is too large to be held at once is worked in parts, and their gradients add up to the batch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from toeplens.model import decoder_config
from toeplens.training import loop, run_spec, train


@pytest.mark.usefixtures("checked_in_ci")
@pytest.mark.parametrize("tokens_at_once", [1, 40, 64])
def test_parts_of_a_batch_give_the_same_run(
    tokens_at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder_config(
        encoding="t5", vocab_size=12, d_model=16, d_ff=32, num_heads=2, num_layers=2, max_len=8, dropout=0.0
    )
    spec = run_spec(
        task="trigger-count",
        task_options={"length": 8, "vocab_size": 12, "num_triggers": 4},
        model=model,
        train_examples=50,
        test_examples=20,
        epochs=3,
        batch_size=16,
        lr=1e-3,
        ignore_label=0,
    )
    whole = train(spec, tmp_path / "whole")
    monkeypatch.setitem(loop._TOKENS_AT_ONCE, "cpu", tokens_at_once)
    parts = train(spec, tmp_path / "parts")
    for (name, ours), theirs in zip(parts.model().named_parameters(), whole.model().parameters(), strict=True):
        if name.endswith("qkv.bias"):  # a bias of the keys moves all logits of a query alike: its gradient is rounding
            ours, theirs = ours[32:], theirs[32:]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)  # float32, twelve steps of AdamW
    for ours, theirs in zip(parts.metrics, whole.metrics, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=1e-5)
        assert ours["train_accuracy"] == theirs["train_accuracy"]
