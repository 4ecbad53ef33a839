"""An audit: which heads of a model are positional, which symbolic, what they look at, and what is lost without them."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Int
from torch import Tensor

from toeplens.ground import EnvironmentFailure, InputError, ToeplensError, choose
from toeplens.sources.huggingface import AttentionCall, NoGradient, compared
from toeplens.sources.huggingface.failures import of_libraries, out_of_memory, words
from toeplens.sources.huggingface.lacking import Lacking
from toeplens.sources.huggingface.loading import Dtype, library, load_model, load_tokenizer, position_limit, vocabulary
from toeplens.sources.huggingface.watch import attention_modules
from toeplens.studies.auditing.measured import Measured, measure_call
from toeplens.studies.auditing.own import audit_run, is_run
from toeplens.studies.auditing.record import Audit
from toeplens.studies.auditing.silenced import not_silenced, silence
from toeplens.studies.auditing.texts import SEQUENCES, TOKENS, Sequences, from_texts, given, repeated

Silencing = Literal["exact", "attribution", "none"]
Progress = Callable[[str, int, int], None]
EXAMPLES = 256  # of a run's test set, unless told otherwise


def audit(
    model: Any,
    data: Any = None,
    *,
    tokenizer: Any = None,
    layers: Sequence[int] | None = None,
    sequences: int | None = None,
    max_tokens: int | None = None,
    effects: Silencing = "exact",
    dtype: Dtype = "auto",
    device: str = "auto",
    pickled: bool = False,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> Audit:
    """Audit every attention head of a transformers model: its numbers are `toeplens.studies.auditing.COLUMNS`.

    Each attention call is taken apart and proved on the audited tokens, and the whole pass against a plain one; a model
    that is not understood is refused, by the name of the module. Layers are gone through one by one, with some queries
    at a time: memory grows with the tokens, not with their square, unless the model itself forms a table of all
    queries by all keys.

    Arguments
        model        a `transformers.PreTrainedModel`; a directory that holds one, or its name on the hub; or a finished
                     `toeplens.training.Run` or its directory, which is audited on examples of its test set
        data         token ids [B, N] or [N] (a tensor, an array, lists), or a text or several; random tokens whose
                     second half repeats the first unless given. An encoder-decoder reads the same on both sides, the
                     decoder's one place later
        tokenizer    of a text; the one that lies with the model unless given
        layers       which layers are measured, as `LayerRecord.layer` counts them; all unless given
        sequences    at most so many; 16 unless given, of a run's examples 256
        max_tokens   of a sequence, at most; 256 unless given, of tokens as many as they have
        effects      how heads are silenced: ``exact``, ``attribution`` (a first-order estimate, for language models),
                     ``none``
        dtype, device, pickled  of a model that is loaded, as in `toeplens.sources.huggingface.loading.load_model`
        seed         of random tokens, of masked ones, and of intervals
        on_progress  is called with what is being done, how much of it is, and all

    Raises `InputError` for a model that is not understood and for tokens that do not fit it, `EnvironmentFailure` where
    memory runs out.
    """
    started = time.monotonic()
    choose("effects", effects, get_args(Silencing))
    for field, number, least in (("sequences", sequences, 1), ("max_tokens", max_tokens, 2), ("seed", seed, 0)):
        if number is not None and number < least:
            raise InputError(f"{field}: {number} was given; it must be at least {least}.")
    report = on_progress or (lambda what, done, total: None)
    wanted = None if layers is None else frozenset(layers)
    if is_run(model):
        if data is not None:
            raise InputError("data: it was given; a run is audited on examples of its own test set.")
        method = None if effects == "none" else effects
        options = {"sequences": sequences or EXAMPLES, "device": device, "seed": seed, "on_progress": report}
        return audit_run(model, layers=wanted, method=method, **options)
    name, missing, left_over = None, (), ()
    if isinstance(model, str | Path):
        loaded = load_model(str(model), dtype=dtype, device=device, pickled=pickled)
        model, name, missing = loaded.model, loaded.name, loaded.missing
        left_over = loaded.left_over
    if not isinstance(model, library().PreTrainedModel):
        raise InputError(f"model: a {type(model).__name__} was given; it must be a transformers.PreTrainedModel.")
    _on_a_device(model)
    read, tokenizer = _sequences(model, name, data, tokenizer, sequences or SEQUENCES, max_tokens, seed)
    _fits(model, read)
    try:
        measured, inputs, whole = _measure(model, read, wanted, Lacking(model, missing, left_over), report)
        changed, unknown = not_silenced(measured), None
        if effects != "none":
            mask_token, heads = _mask_token(tokenizer), partial(report, "heads")
            try:
                changed = silence(model, inputs, measured, effects, mask_token, seed, heads)
            except NoGradient:  # what was asked for cannot be: nothing the model is to blame for
                raise
            except InputError as error:
                unknown = str(error)
    except ToeplensError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise _too_much(read, model) from error
        if of_libraries(error):
            raise InputError(f"model: the audit of {type(model).__name__} broke off: {words(error)}.") from error
        raise
    about = {
        "model": _called(name or getattr(model.config, "name_or_path", "") or type(model).__name__),
        "class": type(model).__name__,
        "model_type": model.config.model_type,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "random_weights": list(missing),
        "unused_weights": list(left_over),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "text": read.origin,
        "sequences": len(read.tokens),
        "tokens": read.tokens.shape[1],
        "seed": seed,
        **({} if unknown is None else {"no_effects": unknown}),
        **({} if changed.intervals is None else {"intervals": changed.intervals}),
        "torch": torch.__version__,
        "transformers": library().__version__,
        "python": platform.python_version(),
        "seconds": round(time.monotonic() - started, 1),
    }
    return Audit(
        about=about,
        layers=changed.layers,
        heads=changed.heads,
        effect=changed.effect,
        method=changed.method,
        baseline=changed.baseline,
        whole=whole,
        words=read.words,
    )


def _measure(
    model: Any, read: Sequences, layers: frozenset[int] | None, lacking: Lacking, report: Progress
) -> tuple[list[Measured], dict[str, Tensor], float]:
    """The measured calls, what the model was given, and the distance of the captured pass from a plain one."""
    tokens = read.tokens.to(model.device)
    inputs = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = _shifted(tokens, model.config)
    seen: set[int] = set()
    measured: list[Measured] = []
    count = len(attention_modules(model))

    def look(call: AttentionCall) -> None:
        lacking.check(call.module)
        seen.add(call.layer)
        if layers is None or call.layer in layers:
            measured.append(measure_call(call, inputs.get(f"{call.side}_input_ids", tokens)))
        report("layers", len(seen), count)

    report("layers", 0, count)
    whole = compared(model, inputs, look)
    if layers is not None and not layers <= seen:
        first = min(layers - seen)
        raise InputError(f"layers: {first} was given; the model has layers 0 to {max(seen)}.")
    return measured, inputs, whole


def _shifted(tokens: Int[Tensor, "B N"], config: Any) -> Int[Tensor, "B N"]:
    """What the decoder of an encoder-decoder reads: the token it starts with, then the tokens but the last."""
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    start = next((getattr(config, name) for name in names if getattr(config, name, None) is not None), 0)
    return torch.cat((torch.full_like(tokens[:, :1], start), tokens[:, :-1]), dim=1)


def _sequences(
    model: Any, name: str | None, data: Any, tokenizer: Any, sequences: int, max_tokens: int | None, seed: int
) -> tuple[Sequences, Any]:
    """What the model reads, and the tokenizer, if there is one."""
    limit, length = position_limit(model), max_tokens or TOKENS
    length = length if limit is None or max_tokens is not None else min(length, limit)
    if data is None:
        words = vocabulary(model)
        if words is None:
            raise InputError("tokens: they must be given; the vocabulary of this model is not known.")
        special = [
            each for key, each in vars(model.config).items() if key.endswith("token_id") and isinstance(each, int)
        ]
        return repeated(words, special, sequences, length, seed), tokenizer
    texts = [data] if isinstance(data, str) else data
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
        return given(data, sequences, max_tokens), tokenizer
    if tokenizer is None:
        source = name or getattr(model.config, "name_or_path", "")
        if not source:
            raise InputError("tokenizer: it was not given; a text needs one, as the model has no name to load it by.")
        tokenizer = load_tokenizer(source)
    return from_texts(tokenizer, texts, sequences, length, "text as given"), tokenizer


def _called(name: str) -> str:
    """A name on the hub as it is; of a directory the last two folders."""
    return "/".join(Path(name).resolve().parts[-2:]) if Path(name).is_dir() else name


def _on_a_device(model: Any) -> None:
    """Refuse weights without numbers, but for those that are brought from elsewhere when they are needed."""
    for name, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        lost = [each for each, x in own if x.is_meta]
        if lost and not hasattr(module, "_hf_hook"):
            raise InputError(
                f"model: {f'{name}.' if name else ''}{lost[0]} is on the device meta, where it has no numbers; it must "
                "be on another."
            )


def _fits(model: Any, read: Sequences) -> None:
    """Refuse tokens that the model has no vectors for, and places that it has none for."""
    words = vocabulary(model)
    least, most = int(read.tokens.min()), int(read.tokens.max())
    if words is not None and not 0 <= least <= most < words:
        raise InputError(
            f"tokens: they go from {least} to {most}; the model's vocabulary goes from 0 to {words - 1} (is the "
            "tokenizer another model's?)."
        )
    limit, length = position_limit(model), read.tokens.shape[1]
    if limit is not None and length > limit:
        raise InputError(f"max_tokens: sequences of {length} tokens were given; the model has positions for {limit}.")


def _mask_token(tokenizer: Any) -> int | None:
    found = getattr(tokenizer, "mask_token_id", None)
    return found if isinstance(found, int) else None


def _too_much(read: Sequences, model: Any) -> EnvironmentFailure:
    count, length = read.tokens.shape
    return EnvironmentFailure(
        f"memory: it was used up on {model.device} by {count} sequences of {length} tokens; lower sequences or "
        "max_tokens, take fewer layers or a smaller dtype, or do without effects."
    )
