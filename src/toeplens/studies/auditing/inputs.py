"""What a model is given to read in an audit, and what of it is refused."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from toeplens.ground import InputError
from toeplens.sources.huggingface.loading import Loaded
from toeplens.studies.auditing.texts import TOKENS, Sequences, from_texts, given, repeated


def sequences_of(
    loaded: Loaded, data: Any, tokenizer: Any, sequences: int, max_tokens: int | None, seed: int
) -> tuple[Sequences, Any]:
    """What the model reads, and the tokenizer, if there is one."""
    limit, length = loaded.longest, max_tokens or TOKENS
    length = length if limit is None or max_tokens is not None else min(length, limit)
    if data is None:
        words = loaded.vocabulary
        if words is None:
            raise InputError("tokens: they must be given; the vocabulary of this model is not known.")
        named = (each for key, each in vars(loaded.model.config).items() if key.endswith("token_id"))
        special = [each for each in named if isinstance(each, int)]
        return repeated(words, special, sequences, length, seed), tokenizer
    texts = [data] if isinstance(data, str) else data
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
        return given(data, sequences, max_tokens), tokenizer
    tokenizer = loaded.tokenizer() if tokenizer is None else tokenizer
    return from_texts(tokenizer, texts, sequences, length, "text as given"), tokenizer


def inputs_of(model: Any, tokens: Int[Tensor, "B N"]) -> dict[str, Tensor]:
    """What ``forward`` takes; an encoder-decoder reads the same on both sides, the decoder's one place later."""
    tokens = tokens.to(model.device)
    found = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        found["decoder_input_ids"] = _shifted(tokens, model.config)
    return found


def _shifted(tokens: Int[Tensor, "B N"], config: Any) -> Int[Tensor, "B N"]:
    """What the decoder of an encoder-decoder reads: the token it starts with, then the tokens but the last."""
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    start = next((getattr(config, name) for name in names if getattr(config, name, None) is not None), 0)
    return torch.cat((torch.full_like(tokens[:, :1], start), tokens[:, :-1]), dim=1)


def check_fit(loaded: Loaded, read: Sequences) -> None:
    """Refuse tokens that the model has no vectors for, and places that it has none for."""
    words = loaded.vocabulary
    least, most = int(read.tokens.min()), int(read.tokens.max())
    if words is not None and not 0 <= least <= most < words:
        raise InputError(
            f"tokens: they go from {least} to {most}; the model's vocabulary goes from 0 to {words - 1} (is the "
            "tokenizer another model's?)."
        )
    limit, length = loaded.longest, read.tokens.shape[1]
    if limit is not None and length > limit:
        raise InputError(f"max_tokens: sequences of {length} tokens were given; the model has positions for {limit}.")


def mask_token_of(tokenizer: Any) -> int | None:
    """The token that masks others; None where there is none."""
    found = getattr(tokenizer, "mask_token_id", None)
    return found if isinstance(found, int) else None
