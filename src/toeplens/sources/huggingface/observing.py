"""A Hugging Face model in whose passes layers and attention ask a `Replay`, for as long as that is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from torch import nn

from toeplens.ground import EnvironmentFailure
from toeplens.sources.huggingface.anatomy import Anatomy
from toeplens.sources.huggingface.asking import eager_entries, table_entries
from toeplens.sources.huggingface.lent import alone, changed
from toeplens.sources.huggingface.replays import RUN
from toeplens.sources.huggingface.settings import Entry, configs_of, evaluation
from toeplens.sources.huggingface.watch import asks_interface


@contextmanager
def observed(model: Any, anatomy: Anatomy) -> Iterator[None]:
    """Evaluation mode, no cache of keys, and passes of `Replay` observed; afterwards all is as it was.

    Raises `EnvironmentFailure` where transformers is not installed.
    """
    try:
        from transformers import AttentionInterface
    except ImportError as error:
        raise EnvironmentFailure("transformers: it is missing; pip install 'toeplens[hf]' installs it.") from error
    with (
        alone(model),
        changed([*evaluation(model), *_forwards(anatomy), *_attention(model, AttentionInterface._global_mapping)]),
    ):
        yield


def _forwards(anatomy: Anatomy) -> Iterator[Entry]:
    modules = {*anatomy.items, *anatomy.written, *anatomy.parts}
    for module in modules | ({anatomy.embedding} if anatomy.embedding is not None else set()):
        yield vars(module), "forward", partial(_visited, module)


def _visited(module: nn.Module, _before: Any) -> Callable[..., Any]:
    original = module.forward

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        run = RUN.get()
        return original(*args, **kwargs) if run is None else run.visit(module, original, args, kwargs)

    return forward


def _attention(model: nn.Module, table: dict[str, Any]) -> Iterator[Entry]:
    """What modules that ask the attention interface are given: the entries of its table, or their own eager attention.

    The entries keep their names, so that masks and whatever else goes by the name stay as they were.
    """
    if not asks_interface(model):
        return
    names = {str(getattr(config, "_attn_implementation", None)) for config in configs_of(model)}
    yield from table_entries(table, names & table.keys())
    yield from eager_entries(model)
