"""One stack of a host's layers: what it knows of a pass, and what it puts in at the input."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from toeplens.encodings import PositionalEncoding
from toeplens.hosts.passes import Pass, begin, remember
from toeplens.hosts.seat import PASS


class Stack:
    """A module that runs layers one after another: a decoder-only model's trunk, or one side of an encoder-decoder.

    Arguments
        module    the stack
        encoding  what acts in its first layer; its vectors are added to the token embeddings
        tables    the modules that look positions up in a table, whose vectors are left out
        carries   whether an argument given to the stack is handed on to its layers
        causal    whether its attention is, where a module does not say
    """

    def __init__(
        self, module: nn.Module, encoding: PositionalEncoding, tables: list[nn.Module], *, carries: bool, causal: bool
    ) -> None:
        self.encoding, self.carries, self.causal = encoding, carries, causal
        self.now: Pass | None = None
        self._signature = inspect.signature(module.forward)
        embeddings = getattr(module, "get_input_embeddings", lambda: None)()
        self._hooks = [
            module.register_forward_pre_hook(self._begin, with_kwargs=True),
            module.register_forward_hook(self._end, with_kwargs=True),
            *(each.register_forward_hook(self._embed) for each in (embeddings,) if each is not None),
            *(table.register_forward_hook(_nothing) for table in tables),
        ]

    def leave(self) -> None:
        """Give the stack back as it was."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = self._signature.bind_partial(*args, **kwargs).arguments
        tokens = given.get("input_ids")
        name = "inputs_embeds" if "inputs_embeds" in self._signature.parameters else "hidden_states"
        x = given.get(name) if tokens is None else tokens
        if not isinstance(x, Tensor):
            return args, kwargs
        cache = given.get("past_key_values")
        self.now = begin(
            x.shape[0],
            x.shape[1],
            x.device,
            position_ids=given.get("position_ids"),
            attention_mask=given.get("attention_mask"),
            cache=cache,
        )
        kwargs = dict(kwargs)
        if tokens is None and name in kwargs:
            kwargs[name] = self._embedded(x)
        elif tokens is None:  # a stack that is given states is given them first
            args = (self._embedded(args[0]), *args[1:])
        if self.carries:
            kwargs[PASS] = self.now
        return args, kwargs

    def _end(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        cache = getattr(output, "past_key_values", None)
        if cache is not None and self.now is not None and hasattr(cache, "get_seq_length"):
            remember(cache, self.now.memory)

    def _embed(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return self._embedded(output)

    def _embedded(self, x: Tensor) -> Tensor:
        if self.now is None or not self.encoding.overrides("embed") or self.now.positions.shape[-1] != x.shape[1]:
            return x
        return self.encoding.embed(x, self.encoding.place(self.now.positions))


def _nothing(module: nn.Module, args: Any, output: Any) -> Any:
    """A table's vectors, all 0."""
    return torch.zeros_like(output)
