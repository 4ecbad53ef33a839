"""Where the layers, the attention and the head of a Hugging Face model are; and passes in which they are observed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from torch import nn

from toeplens.sources.huggingface.interface import OBSERVER, Entry, eager_entries, patched, table, table_entries
from toeplens.sources.huggingface.model import (
    NAME,
    asks_interface,
    attention_modules,
    configs_of,
    input_embedding,
    is_host,
)


@dataclass(frozen=True)
class Anatomy:
    """Where the layers, the attention and the head of a model are.

    items      the layers: what lies in the outermost lists of modules that hold attention, and the name of the list
    written    attention modules that do not ask transformers' attention interface
    parts      what the layers, or attention outside of them, lie in, but the model itself, and what has its head beside
               such a part: the outermost of those that are called give the hidden states that the head is given
    embedding  the output embedding; None where there is none, or it is in a part or embeds the input as well
    """

    items: dict[nn.Module, str]
    written: frozenset[nn.Module]
    parts: frozenset[nn.Module]
    embedding: nn.Module | None


def anatomy_of(model: Any) -> Anatomy:
    """Where the layers, the attention and the head of a transformers model are."""
    attention = attention_modules(model)
    named = dict(model.named_modules(remove_duplicate=False))
    items: dict[nn.Module, str] = {}
    parts: set[nn.Module] = set()
    for name in attention.values():
        words = name.split(".")
        above = [".".join(words[:count]) for count in range(1, len(words))]
        lists = next((each for each in above if isinstance(named[each], nn.ModuleList)), None)
        if lists is not None:
            items |= dict.fromkeys(named[lists].children(), lists)
            above = above[: above.index(lists)]
        parts |= {named[each] for each in above}
    written = frozenset(module for module in attention if not asks_interface(module))
    embedding = model.get_output_embeddings()
    if embedding is None or embedding is input_embedding(model):
        return Anatomy(items, written, frozenset(parts), None)
    whole = {part for part in parts if embedding in set(part.modules())}
    parts -= {part for part in whole if any(each in parts - whole for each in part.modules())}
    if whole & parts:
        embedding = None
    return Anatomy(items, written, frozenset(parts), embedding)


def observed(model: Any, anatomy: Anatomy) -> AbstractContextManager[None]:
    """The passes in it are told, layer by layer, to the observer of their thread (`patched`)."""
    return patched(model, _forwards(anatomy), _attention(model))


def _forwards(anatomy: Anatomy) -> Iterator[Entry]:
    modules = {*anatomy.items, *anatomy.written, *anatomy.parts}
    for module in modules | ({anatomy.embedding} if anatomy.embedding is not None else set()):
        yield vars(module), "forward", partial(_visited, module)


def _visited(module: nn.Module, _before: Any) -> Callable[..., Any]:
    original = module.forward

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return OBSERVER.get().visit(module, original, args, kwargs)

    return forward


def _attention(model: nn.Module) -> Iterator[Entry]:
    """What modules that ask the attention interface are given: the entries of its table, or their own eager attention.

    The entries keep their names, so that masks and whatever else goes by the name stay as they were.
    """
    if not asks_interface(*attention_modules(model)):
        return
    names = {str(getattr(config, "_attn_implementation", None)) for config in configs_of(model)}
    names |= {NAME} if is_host(model) else set()
    yield from table_entries(names & table().keys())
    yield from eager_entries(model)
