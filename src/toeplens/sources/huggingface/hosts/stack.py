"""One stack of a host's layers: what it knows of a pass, and what it puts in at the input."""

from __future__ import annotations

import inspect
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor, nn

from toeplens.encodings import PositionalEncoding
from toeplens.encodings.shapes import Positions
from toeplens.ground import InputError
from toeplens.sources.huggingface.hosts.passes import PASS, Pass, begin, remember
from toeplens.sources.huggingface.interface import NOBODY, OBSERVER

_VECTORS = ("inputs_embeds", "hidden_states")


class Stack:
    """A module that runs layers one after another: a decoder-only model's trunk, or one side of an encoder-decoder.

    Arguments
        module    the stack
        encoding  what acts in its first layer; its vectors are added to the token embeddings
        tables    the modules that look positions up in a table, whose vectors are left out
        carries   whether an argument given to the stack is handed on to its layers
        causal    whether its attention is, where a module does not say
        asks      the name by which its attention must go, so that ours is asked; None where a family's own is ours
        name      of the encoding
    """

    def __init__(
        self,
        module: Any,
        encoding: PositionalEncoding,
        tables: list[nn.Module],
        *,
        carries: bool,
        causal: bool,
        asks: str | None,
        name: str,
    ) -> None:
        self.encoding, self.carries, self.causal, self.asks, self.name = encoding, carries, causal, asks, name
        self.now: Pass | None = None
        self.owner = token_hex(8)
        self._signature = inspect.signature(module.forward)
        self._vectors = next(name for name in _VECTORS if name in self._signature.parameters)
        self._hooks = [
            module.register_forward_pre_hook(self._begin, with_kwargs=True),
            module.register_forward_hook(self._end, with_kwargs=True, always_call=True),
            *(table.register_forward_hook(_nothing) for table in tables),
        ]
        self._waiting: Positions | None = None  # of the tokens whose embedding has not been called in this pass
        self._embedding: nn.Module | None = None  # which is heard
        if encoding.overrides("embed") and "input_ids" in self._signature.parameters:
            self._hear(module.get_input_embeddings())

    def leave(self) -> None:
        """Give the stack back as it was."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self.asks is not None and module.config._attn_implementation != self.asks:
            raise InputError(
                f"model: its attention was set to {module.config._attn_implementation!r} since an encoding was "
                "installed, which is then not asked; uninstall it first."
            )
        given = dict(zip(self._signature.parameters, args, strict=False)) | kwargs
        tokens = given.get("input_ids")
        x = given.get(self._vectors) if tokens is None else tokens
        if not isinstance(x, Tensor):
            return args, kwargs
        now = begin(
            x.shape[0],
            x.shape[1],
            x.device,
            owner=self.owner,
            position_ids=given.get("position_ids"),
            attention_mask=given.get("attention_mask"),
            cache=given.get("past_key_values"),
            weights=bool(given.get("output_attentions", getattr(module.config, "output_attentions", False))),
        )
        self.now = now
        if self.encoding.overrides("embed"):
            positions = self.encoding.place(now.positions)
            if tokens is None:
                given[self._vectors] = self.encoding.embed(x, positions)
            else:  # the model makes more of tokens than their vectors
                if module.get_input_embeddings() is not self._embedding:  # it was given another
                    self._hear(module.get_input_embeddings())
                self._waiting = positions
        if self.carries:
            given[PASS] = now
        return (), given

    def _hear(self, embedding: nn.Module) -> None:
        self._embedding = embedding
        self._hooks.append(embedding.register_forward_hook(self._embed))

    def _embed(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """The tokens' vectors with their positions', the first time in a pass that they are asked for."""
        if self._waiting is None:
            return None
        positions, self._waiting = self._waiting, None
        return self.encoding.embed(output, positions)

    def _end(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        now, self.now = kwargs.get(PASS, self.now), None
        unused, self._waiting = self._waiting is not None, None
        if unused and output is not None and OBSERVER.get() is NOBODY:  # who observes may leave layers out
            raise InputError("model: it does not call the module that embeds its tokens, so that nothing can be added.")
        cache = getattr(output, "past_key_values", None)
        if cache is not None and now is not None and hasattr(cache, "get_seq_length"):
            remember(cache, now.memory)


def _nothing(module: nn.Module, args: Any, output: Any) -> Any:
    """A table's vectors, all 0."""
    return torch.zeros_like(output)
