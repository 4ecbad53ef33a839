"""A small language model on a synthetic corpus with documents long enough for everything."""

from __future__ import annotations

import pytest
import torch

from toeplens.model import Decoder, decoder_config
from toeplens.tasks.language import LanguageTask, MarkovLanguage

LENGTH = 32


@pytest.fixture(scope="session")
def task() -> LanguageTask:
    return MarkovLanguage(words=40, documents=60, document=16 * LENGTH + 40, length=LENGTH)


def model_of(task: LanguageTask, encoding: str = "rope", **changes: object) -> Decoder:
    torch.manual_seed(0)
    fields = {
        "vocab_size": task.vocab_size,
        "d_model": 32,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 2,
        "max_len": task.length,
        "encoding": encoding,
        "readout": "each",
        "dropout": 0.0,
    }
    model = Decoder(decoder_config(**fields | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model
