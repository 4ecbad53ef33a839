"""Names of version 0.2 and what replaced them. The old names work until 0.4, with a DeprecationWarning.

The tables hold old names and new ones: of modules, of names in a package, of class members and keywords, and of keys in
records. Members and keywords are listed under the name of their class or function, which is decorated by `renamed`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

MODULES = {
    "toeplens.ground": "toeplens.utils",
    "toeplens.sources.huggingface": "toeplens.backends.hf",
    "toeplens.sources": "toeplens.backends",
}
NAMES: dict[str, dict[str, str]] = {
    "toeplens": {"ground": "utils", "sources": "backends"},
    "toeplens.encodings": {
        "BandControl": "FrequencyMask",
        "KEPT": "MAX_SHARED_BIAS",
        "Seen": "AttentionInputs",
        "canonical": "canonical_name",
        "controlled": "with_frequency_mask",
        "named": "split_names",
        "swapped": "swap_bands",
    },
    "toeplens.engine": {
        "Asked": "ExampleRequest",
        "HeadWatch": "HeadProbe",
        "Watched": "HeadProbeRow",
        "must_have": "check_workers",
        "spread": "run_parallel",
    },
    "toeplens.hosts": {"Host": "PatchedModel"},
    "toeplens.lens": {
        "Memory": "AblationCache",
        "NoForm": "NotSeparable",
        "Retrieval": "RetrievalScores",
        "Shares": "TermShares",
        "ablate_by": "ablate_heads_by_metric",
        "over_seeds": "mean_over_seeds",
    },
    "toeplens.model": {
        "Attention": "DecoderAttention",
        "Context": "PassContext",
        "scale_left_open": "without_published_scale",
    },
    "toeplens.report": {"free_for_cards": "check_cards_directory"},
    "toeplens.studies": {"ENOUGH": "MIN_SEEDS", "Entry": "LedgerEntry", "Key": "CellKey"},
    "toeplens.training": {
        "Watcher": "TrainingProbe",
        "answer": "eval_batch",
        "correct": "is_correct",
        "told": "describe_history",
        "train_as_one": "train_batched",
    },
    "toeplens.utils": {
        "checked": "validate_as",
        "plain": "to_json_types",
        "rounded": "round_floats",
        "sentence": "validation_message",
        "shown": "repr_of",
    },
}
_ATTENTION = {"notes": "key_features", "texts": "document_ids", "turned": "rotated"}
MEMBERS: dict[str, dict[str, str]] = {  # keywords of functions and constructors; members of classes
    "AttentionInputs": {
        "notes": "key_features",
        "texts": "document_ids",
        "of": "with_defaults",
        "own_notes": "query_features",
        "visible": "visible_mask",
        "past": "causal_mask",
        "part": "select",
    },
    "Cache": {"notes": "key_features"},
    "Execution": {"why": "reason"},
    "FrequencyMask": {"still": "freeze", "silent": "drop", "order": "permute"},
    "LayerTrace": {
        "added": "position_vectors",
        "part": "project_part",
        "notes": "key_features",
        "whole": "has_all_positions",
        "read": "read_position",
    },
    "PositionalEncoding": {
        "note": "key_features",
        "place": "to_positions",
        "by_sequence": "is_per_sequence",
        "hook": "call_hook",
        "factors_at": "has_low_rank_bias",
        "turns_alike": "rotation_is_shared",
        "looks_at_keys": "needs_per_head_keys",
        "fixed_bias": "has_fixed_bias",
        "learned": "new_parameter",
        "starts": "initialise",
    },
    "Run": {"watched": "probe_rows"},
    "Task": {
        "sizes": "vocab_and_labels",
        "each": "per_token",
        "watched": "eval_split",
        "pinned": "pinned_options",
        "unseen": "unseen_dataset",
    },
    "TrainingProbe": {"moments": "probe_steps", "look": "measure", "look_at": "measure_events"},
    "ablate_heads": {"memory": "cache"},
    "ablate_run": {"limits": "execution"},
    "above": {"bar": "threshold"},
    "attend": {"added": "shared_bias", "at_once": "pairs_per_chunk", **_ATTENTION},
    "attention_logits": _ATTENTION,
    "attention_weights": _ATTENTION,
    "below": {"bar": "threshold"},
    "in_test": {"marks": "hashes"},
    "representation": {"least": "min_sequences"},
    "retrieval": {"places": "answer_positions"},
    "train": {"watcher": "probe"},
}
CHANGE_KEYS = {"still": "freeze", "silent": "drop"}  # in texts of interventions
RECORD_KEYS = {  # in records of earlier versions, of classes that have the new field and not the old one
    "plain": "uncorrected",
    "wanting": "missing",
    "watched": "probe_rows",
    "whole": "max_difference",
    "why": "reason",
}

Entry = TypeVar("Entry", bound=Callable[..., Any])


def warn(old: str, new: str, level: int = 3) -> None:
    """Warn, at the caller's line, that ``old`` is now called ``new``."""
    import torch  # here, so that importing toeplens stays fast

    if not torch.compiler.is_compiling():
        warnings.warn(f"{old} is now {new}. The old name will be removed in 0.4.", DeprecationWarning, stacklevel=level)


def renamed_getattr(package: str) -> Callable[..., Any]:
    """The ``__getattr__`` of a package: the names of `NAMES`."""

    def get(name: str, level: int = 3) -> Any:
        new = NAMES.get(package, {}).get(name)
        if new is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        warn(f"{package}.{name}", f"{package}.{new}", level)
        return getattr(sys.modules[package], new)

    return get


class _RenamedMember:
    """A member of a class under its old name."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def __get__(self, entry: Any, owner: type) -> Any:
        warn(f"{owner.__name__}.{self.old}", self.new)
        return getattr(owner if entry is None else entry, self.new)


def renamed(entry: Entry) -> Entry:
    """Decorator of a function or class whose keywords or members have old names in `MEMBERS`."""
    function: Any = entry.__init__ if inspect.isclass(entry) else entry  # type: ignore[misc]
    table = MEMBERS[entry.__name__]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for old in [old for old in table if old in kwargs]:
            warn(f"{entry.__name__}({old}=)", f"{table[old]}=")
            kwargs[table[old]] = kwargs.pop(old)
        return function(*args, **kwargs)

    if not inspect.isclass(entry):
        return call  # type: ignore[return-value]
    entry.__init__ = call  # type: ignore[misc]
    for old, new in table.items():
        setattr(entry, old, _RenamedMember(old, new))
    return entry  # type: ignore[return-value]


def rename_overrides(cls: type, base: str) -> None:
    """Give the members that a subclass defines under an old name their new name."""
    for old, new in MEMBERS[base].items():
        if old in vars(cls):
            warn(f"{cls.__name__}.{old}", new, level=4)
            setattr(cls, new, vars(cls)[old])
            delattr(cls, old)


def rename_keys(content: Any, fields: Collection[str]) -> Any:
    """The content of a record with these fields, with the present names of the keys in `RECORD_KEYS`."""
    renamed_keys = RECORD_KEYS.keys() & content if isinstance(content, dict) else ()
    new = {old: RECORD_KEYS[old] for old in renamed_keys if old not in fields and RECORD_KEYS[old] in fields}
    return {new.get(key, key): value for key, value in content.items()} if new else content


def adapt(entry: Any, base: str) -> None:
    """Give an object that has members under their old names the new ones."""
    for old, new in MEMBERS[base].items():
        if hasattr(entry, old) and not hasattr(entry, new):
            warn(f"{type(entry).__name__}.{old}", new, level=4)
            setattr(type(entry), new, property(operator.attrgetter(old)))


class RenamedModules(MetaPathFinder, Loader):
    """Imports the modules of `MODULES`, and those in them, under their old names."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """The module that replaced ``name``, if it is an old name."""
        old = next((old for old in MODULES if f"{name}.".startswith(f"{old}.")), None)
        return None if old is None else ModuleSpec(name, self, origin=MODULES[old] + name.removeprefix(old))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The renamed module itself, which the import system must not change."""
        assert spec.origin is not None
        warn(spec.name, spec.origin)
        module = importlib.import_module(spec.origin)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore what the import system has set."""
        module.__spec__ = self.spec
