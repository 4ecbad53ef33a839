"""One small model, checked: its attention taken apart and proved, its captured pass against its plain one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tests.architectures.models import FIRST_WORD, NotTextModel, small_inputs, small_model, with_extra_inputs
from torch import Tensor
from torch.utils._pytree import tree_leaves

from toeplens.backends.hf import AttentionCall, capture_attention
from toeplens.backends.hf.model import apply_patches, attention_modules, implementation_entries
from toeplens.backends.hf.trace import ProductTracer, TracedTensor, attends_within_tokens
from toeplens.studies.auditing.inputs import repeated_tokens
from toeplens.studies.auditing.record import LayerRecord
from toeplens.studies.auditing.study import audit
from toeplens.utils import InputError

TOLERANCE = 1e-3  # of the largest output: what a captured pass may differ by from a plain one
_SEQUENCES, _TOKENS = 9, 12  # of the audit: enough for means over sequences
_WORDS = 30  # are in every vocabulary, those before `FIRST_WORD` among them
SAME_OUTPUT = 1e-4  # of weights: what formed ones may differ by from those that a pass returns
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
    result: dict[str, Any]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_FIRST)
            result = _checked(name)
    except NotTextModel as error:
        result = {"outcome": "other", "why": str(error)}
    except Exception as error:  # whatever a library of hundreds of models may raise
        result = {"outcome": "failed", "why": _one_line(error)}
    return dict.fromkeys(FIELDS) | {"name": name, "unplaced": {}} | result


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
        product_count = attention_product_count(model, inputs)
        reason = f"model: {type(model).__name__} has no module named after attention"
        if product_count:
            return about | {
                "outcome": "refused",
                "why": f"{reason}, and {product_count} products of its pass are attention.",
            }
        return about | {"outcome": "none", "why": f"{reason}, and no softmax of a product in its pass."}
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
        products += call.products
        outputs.append(call.proof.outputs)
        formed.append(call.softmax(call.logits()))
        if call.proof.weights is not None:
            weights.append(call.proof.weights)

    plain = _plain(model, inputs)
    torch.manual_seed(_SEED)
    own = capture_attention(model, inputs, look)[0]
    difference = _difference(plain, own, inputs)
    if not difference <= TOLERANCE:
        raise InputError(
            f"model: the output of {type(model).__name__} differs by {difference:.1e} of the largest from that of its "
            f"plain pass, where at most {TOLERANCE:.0e} is allowed."
        )
    product_count = attention_product_count(model, inputs)
    if product_count > products:
        raise InputError(
            f"model: of {product_count} softmaxes of products in the plain pass of {type(model).__name__}, {products} "
            "were captured as attention."
        )
    returned = _returned(model, inputs)
    tokens = repeated_tokens(_WORDS, range(FIRST_WORD), _SEQUENCES, _TOKENS, _SEED)
    with with_extra_inputs(model):
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
        "returned": None if returned is None else sum(any(same_attention(x, y) for y in returned) for x in formed),
        "weights": max(weights, default=None),
        "outputs": max(outputs),
        "whole": max(difference, audited.max_difference),
        "why": " ".join(reasons[:1] + ([without] if without else [])) or None,
        "unplaced": calls_without_shares(audited.layers),
    }


def calls_without_shares(layers: Sequence[LayerRecord]) -> dict[str, dict[str, list[int]]]:
    """Why calls have no shares, without the names of their modules; and which those are, by side and kind."""
    result: dict[str, dict[str, list[int]]] = {}
    for layer in layers:
        if layer.unknown is not None:
            why = layer.unknown.removeprefix(f"{layer.module}: ")
            result.setdefault(why, {}).setdefault(f"{layer.side} {layer.kind}", []).append(layer.layer)
    return result


@torch.no_grad()
def _plain(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    torch.manual_seed(_SEED)
    return model(**inputs)[0]


def _returned(model: Any, inputs: Mapping[str, Tensor]) -> list[Tensor] | None:
    """The attentions that a plain pass with the model's eager attention returns; None where it returns none."""
    try:
        with torch.no_grad(), apply_patches(model, implementation_entries(model, "eager")):
            torch.manual_seed(_SEED)
            output = model(**inputs, output_attentions=True)
        lists = [value for name, value in output.items() if name.endswith("attentions")]
    except Exception:  # some do not take the question
        return None
    return [x for x in tree_leaves(lists) if isinstance(x, Tensor)] or None


def same_attention(formed: Tensor, returned: Tensor) -> bool:
    """At the queries that see a key."""
    return formed.shape == returned.shape and not bool(((formed - returned).abs() > SAME_OUTPUT).any())


def attention_product_count(model: Any, inputs: Mapping[str, Tensor]) -> int:
    """How many products with values are taken, in any module of a plain pass, of a softmax of queries times keys.

    Those that are taken at each token alone, over what it holds itself, are no attention.
    """
    result: list[TracedTensor] = []
    with ProductTracer(lambda: True, lambda made, values, out: result.append(made)):
        _plain(model, inputs)
    return sum(not attends_within_tokens(made) for made in result)


def _difference(plain: Tensor, own: Tensor, inputs: Mapping[str, Tensor]) -> float:
    is_token = inputs.get("attention_mask")
    if is_token is not None and plain.shape[:2] == is_token.shape:
        plain, own = plain[is_token.bool()], own[is_token.bool()]
    return float((plain - own).abs().max() / plain.abs().max().clamp_min(torch.finfo(plain.dtype).tiny))


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
