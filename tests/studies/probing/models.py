"""A tiny language model with a tokenizer of its own, and a text that it can be asked about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from toeplens.studies.kit.probe_items import _LIST_WORDS, _NUMBERS, _PLACE_NAMES

transformers = pytest.importorskip("transformers")

WORDS = _LIST_WORDS.split()
TEXT = " ".join(WORDS[i * i % len(WORDS)] + ("." if i % 9 == 0 else "") for i in range(900))


def tokenizer() -> Any:
    """Pieces of words and bytes, in which the words of lists are one token each; a text begins with <s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    known = " ".join(
        [*WORDS, *_PLACE_NAMES.split(), *_NUMBERS, "so List Which How many times does occur Answer secret"] * 3
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([known], trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>")


def save_model(directory: Path, **more: int) -> Path:
    """A Llama with random weights and the tokenizer, on the disk."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=700, num_key_value_heads=2, **(sizes | more))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = transformers.LlamaForCausalLM(config)
    made.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory
