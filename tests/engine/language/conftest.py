"""A small language model on a synthetic corpus with documents long enough for everything; a corpus of unequal ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch

from toeplens.model import Decoder, decoder_config
from toeplens.tasks import Split
from toeplens.tasks.corpus import Corpus, CorpusSplit
from toeplens.tasks.language import LanguageTask
from toeplens.tasks.synthetic import MarkovLanguage

LENGTH = 32
UNEVEN_LENGTH = 12  # training length of the language of unequal documents
# tokens of its documents, and bytes of each document's tokens
SIZES: dict[Split, tuple[int, ...]] = {
    "train": (500, 300, 400, 200),
    "validation": (60, 50),
    "test": (197, 420, 250, 640, 300, 205),
}
BYTES: dict[Split, tuple[int, ...]] = {"train": (7, 7, 7, 7), "validation": (7, 7), "test": (2, 3, 5, 3, 2, 5)}


@pytest.fixture(scope="session")
def task() -> LanguageTask:
    return MarkovLanguage(words=40, documents=60, document=16 * LENGTH + 40, length=LENGTH)


@dataclass(frozen=True, kw_only=True)
class UnevenTask(LanguageTask):
    """Documents of unequal length, of which a token is two, three or five bytes."""

    name = "uneven"
    length: int = UNEVEN_LENGTH

    def vocab_and_labels(self) -> tuple[int, range]:
        return 40, range(40)

    def corpus(self) -> Corpus:
        return _uneven(self.vocab_size)


@cache
def _uneven(vocab_size: int) -> Corpus:
    rng = np.random.default_rng(0)

    def part(split: Split) -> CorpusSplit:
        sizes = np.array(SIZES[split])
        tokens = [np.append(rng.integers(1, vocab_size, size), 0) for size in sizes]
        return CorpusSplit(np.concatenate(tokens), np.append(0, np.cumsum(sizes + 1)), sizes * np.array(BYTES[split]))

    parts: dict[Split, CorpusSplit] = {split: part(split) for split in SIZES}
    counts = np.bincount(parts["train"].tokens, minlength=vocab_size)
    return Corpus("0" * 64, vocab_size, 0, False, {}, parts, counts)


@pytest.fixture(scope="session")
def uneven() -> LanguageTask:
    return UnevenTask()


def losses_of(model: Decoder, tokens: np.ndarray) -> np.ndarray:
    """Nats of each token of texts [K, n + 1] but the first."""
    ids = torch.from_numpy(tokens)
    with torch.no_grad():
        chances = model(ids[:, :-1]).double().log_softmax(-1)
    return -chances.gather(-1, ids[:, 1:, None]).squeeze(-1).numpy()


def model_of(task: LanguageTask, encoding: str = "rope", **changes: object) -> Decoder:
    torch.manual_seed(0)
    sizes = {"vocab_size": task.vocab_size, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    fields = {"max_len": task.length, "encoding": encoding, "readout": "each", "dropout": 0.0}
    model = Decoder(decoder_config(**sizes | fields | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model
