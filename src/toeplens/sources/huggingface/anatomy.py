"""Where the layers, the attention and the head of a Hugging Face model are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from toeplens.sources.huggingface.watch import attention_modules, functions_of


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
    written = frozenset(module for module in attention if not _asks(module))
    embedding = model.get_output_embeddings()
    if embedding is None or embedding is input_embedding(model):
        return Anatomy(items, written, frozenset(parts), None)
    whole = {part for part in parts if embedding in set(part.modules())}
    parts -= {part for part in whole if any(each in parts - whole for each in part.modules())}
    if whole & parts:
        embedding = None
    return Anatomy(items, written, frozenset(parts), embedding)


def input_embedding(model: Any) -> Any:
    """The module that embeds the tokens; None where the model does not tell."""
    try:
        return model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None


def _asks(module: nn.Module) -> bool:
    """Whether the module itself goes through transformers' attention interface."""
    return any("get_interface" in each.__code__.co_names for each in functions_of(module))
