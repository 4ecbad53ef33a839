"""One small model, checked: its attention taken apart and proved, its captured pass against its plain one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tests.architectures.models import FIRST_WORD, NotText, given_beside, small_inputs, small_model
from torch import Tensor
from torch.utils._pytree import tree_leaves

from toeplens.ground import InputError
from toeplens.sources.huggingface import AttentionCall, captured
from toeplens.sources.huggingface.model import asking_for, attention_modules, patched
from toeplens.sources.huggingface.trace import Followed, Products, at_each_token
from toeplens.studies.auditing.inputs import repeated
from toeplens.studies.auditing.record import LayerRecord
from toeplens.studies.auditing.study import audit

WHOLE = 1e-3  # of the largest output: what a captured pass may differ by from a plain one
_SEQUENCES, _TOKENS = 9, 12  # of the audit: enough for means over sequences
_WORDS = 30  # are in every vocabulary, those before `FIRST_WORD` among them
_ALIKE = 1e-4  # of weights: what formed ones may differ by from those that a pass returns
_SEED = 11  # of models that draw at random while they run
_FIRST = 67280421310721  # torch's own, which a fresh process begins with, as those of the record did
FIELDS = (
    *("model", "parameters", "calls", "heads", "effect", "placed", "returned"),
    *("weights", "outputs", "whole", "why"),
)


def checked(name: str) -> dict[str, Any]:
    """What became of a model type that is built small and audited: a row of results/survey, its seconds left out.

    Its outcome is ``proved``, ``refused`` (an attention was not understood), ``none`` (it has no attention), ``failed``
    (not built or not run) or ``other`` (it takes more than text, or is no model by itself).
    """
    found: dict[str, Any]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_FIRST)
            found = _checked(name)
    except NotText as error:
        found = {"outcome": "other", "why": str(error)}
    except Exception as error:  # whatever a library of hundreds of models may raise
        found = {"outcome": "failed", "why": _one_line(error)}
    return dict.fromkeys(FIELDS) | {"name": name, "unplaced": {}} | found


def _checked(name: str) -> dict[str, Any]:
    model = small_model(name)
    about = {"model": type(model).__name__, "parameters": sum(weight.numel() for weight in model.parameters())}
    inputs, plain = small_inputs(model), None
    try:
        plain = _plain(model, inputs)
    except Exception:  # some models take no padding
        inputs = small_inputs(model, padded=False)
        plain = _plain(model, inputs)
    if not bool(plain.isfinite().all()):
        return about | {"outcome": "failed", "why": "its own pass gives numbers that are not finite."}
    if not attention_modules(model):
        seen = _products(model, inputs)
        why = f"model: {type(model).__name__} has no module named after attention"
        if seen:
            return about | {"outcome": "refused", "why": f"{why}, and {seen} products of its pass are attention."}
        return about | {"outcome": "none", "why": f"{why}, and no softmax of a product in its pass."}
    try:
        return about | {"outcome": "proved"} | check(model, inputs)
    except InputError as error:
        return about | {"outcome": "refused", "why": str(error)}
    except Exception as error:  # the plain pass went well: this is ours
        return about | {"outcome": "refused", "why": f"the capture of its attention broke off: {_one_line(error)}"}


def check(model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a row has of a proved model, from a pass on padded sequences and a whole audit with exact effects.

    Raises `InputError` where an attention was not understood, where the model's output in the captured pass is not that
    of its plain pass, up to `WHOLE` of the largest at the tokens that are no padding, and where the plain pass has more
    attention than was captured.
    """
    weights: list[float] = []
    outputs: list[float] = []
    formed: list[Tensor] = []
    products = 0

    def look(call: AttentionCall) -> None:
        nonlocal products
        products += call.pieces
        outputs.append(call.proof.outputs)
        formed.append(call.softmax(call.logits()))
        if call.proof.weights is not None:
            weights.append(call.proof.weights)

    plain = _plain(model, inputs)
    torch.manual_seed(_SEED)
    own = captured(model, inputs, look)[0]
    whole = _difference(plain, own, inputs)
    if not whole <= WHOLE:
        raise InputError(
            f"model: the output of {type(model).__name__} differs by {whole:.1e} of the largest from that of its plain "
            f"pass, where at most {WHOLE:.0e} is allowed."
        )
    seen = _products(model, inputs)
    if seen > products:
        raise InputError(
            f"model: of {seen} softmaxes of products in the plain pass of {type(model).__name__}, {products} were "
            "captured as attention."
        )
    returned = _returned(model, inputs)
    tokens = repeated(_WORDS, range(FIRST_WORD), _SEQUENCES, _TOKENS, _SEED)
    with given_beside(model):
        audited = audit(model, tokens.tokens)
    outputs += [layer.outputs for layer in audited.layers]
    weights += [layer.weights for layer in audited.layers if layer.weights is not None]
    reasons = [layer.unknown for layer in audited.layers if layer.unknown is not None]
    without = audited.about.get("no_effects")
    return {
        "calls": len(audited.layers),
        "heads": len(audited.heads),
        "placed": sum(layer.unknown is None for layer in audited.layers),
        "effect": audited.effect,
        "returned": None if returned is None else sum(any(_same(x, y) for y in returned) for x in formed),
        "weights": max(weights, default=None),
        "outputs": max(outputs),
        "whole": max(whole, audited.whole),
        "why": " ".join(reasons[:1] + ([without] if without else [])) or None,
        "unplaced": _unplaced(audited.layers),
    }


def _unplaced(layers: Sequence[LayerRecord]) -> dict[str, dict[str, list[int]]]:
    """Why calls have no shares, without the names of their modules; and which those are, by side and kind."""
    found: dict[str, dict[str, list[int]]] = {}
    for layer in layers:
        if layer.unknown is not None:
            why = layer.unknown.removeprefix(f"{layer.module}: ")
            found.setdefault(why, {}).setdefault(f"{layer.side} {layer.kind}", []).append(layer.layer)
    return found


@torch.no_grad()
def _plain(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    torch.manual_seed(_SEED)
    return model(**inputs)[0]


def _returned(model: Any, inputs: Mapping[str, Tensor]) -> list[Tensor] | None:
    """The attentions that a plain pass with the model's eager attention returns; None where it returns none."""
    try:
        with torch.no_grad(), patched(model, asking_for(model, "eager")):
            torch.manual_seed(_SEED)
            output = model(**inputs, output_attentions=True)
        lists = [value for name, value in output.items() if name.endswith("attentions")]
    except Exception:  # some do not take the question
        return None
    return [x for x in tree_leaves(lists) if isinstance(x, Tensor)] or None


def _same(formed: Tensor, returned: Tensor) -> bool:
    """At the queries that see a key."""
    return formed.shape == returned.shape and not bool(((formed - returned).abs() > _ALIKE).any())


def _products(model: Any, inputs: Mapping[str, Tensor]) -> int:
    """How many products with values are taken, in any module of a plain pass, of a softmax of queries times keys.

    Those that are taken at each token alone, over what it holds itself, are no attention.
    """
    found: list[Followed] = []
    with Products(lambda: True, lambda made, values, out: found.append(made)):
        _plain(model, inputs)
    return sum(not at_each_token(made) for made in found)


def _difference(plain: Tensor, own: Tensor, inputs: Mapping[str, Tensor]) -> float:
    there = inputs.get("attention_mask")
    if there is not None and plain.shape[:2] == there.shape:
        plain, own = plain[there.bool()], own[there.bool()]
    return float((plain - own).abs().max() / plain.abs().max().clamp_min(torch.finfo(plain.dtype).tiny))


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
