"""The input of an audit: sequences of given tokens, of one or several texts, or of random repeated tokens."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from toeplens.backends.hf import Change
from toeplens.backends.hf.load import LoadedModel
from toeplens.backends.hf.model import device_of, token_ids
from toeplens.backends.hf.offload import PASS_TOKENS
from toeplens.studies.auditing.record import AuditCache
from toeplens.studies.kit.options import AuditOptions
from toeplens.utils import InputError, invalid, repr_of
from toeplens.utils.formatting import join_list

DEFAULT_SEQUENCES, DEFAULT_TOKENS = 16, 256  # defaults
_MAX_ID = int(np.iinfo(np.int64).max)
_MAX_NAMED = 4  # up to this many texts are listed by name
_ABOUT_TEXT = {"special_tokens_mask", "offset_mapping", "length", "overflow_to_sample_mapping"}  # not for the model
Progress = Callable[[str, int, int], None]  # takes a description of the current work, the finished amount, the total


@dataclass(frozen=True)
class Sequences:
    """Sequences, the longest first, with padding on the right."""

    tokens: Int[Tensor, "B N"]  # 0 in the padding
    origin: str  # where they came from
    words: tuple[str, ...] = ()  # tokens of the first sequence; empty without a tokenizer
    lengths: tuple[int, ...] = ()  # without padding; empty if all have the same length
    texts: tuple[str, ...] = ()  # name of each sequence's text; empty if there are not several
    unused_bos: str | None = None  # beginning-of-text token that the tokenizer has but does not add

    @property
    def token_mask(self) -> Bool[Tensor, "B N"] | None:
        """Mask of the tokens that are not padding; None without padding."""
        return torch.arange(self.tokens.shape[1]) < torch.tensor(self.lengths).unsqueeze(1) if self.lengths else None


@dataclass(frozen=True)
class AuditContext:
    """An audit of a transformers model that is being made."""

    loaded: LoadedModel
    options: AuditOptions
    sequences: Sequences
    inputs: Mapping[str, Tensor]  # arguments of ``forward``
    mask_token: int | None  # its id; None if the tokenizer has none
    changes: Sequence[Change]
    cache: AuditCache
    report: Progress


def sequences_of(loaded: LoadedModel, data: Any, tokenizer: Any, options: AuditOptions) -> tuple[Sequences, Any]:
    """The sequences that the model reads, and the tokenizer, if there is one.

    Raises `InputError` for tokens outside the vocabulary and for sequences that are too long for the model.
    """
    vocabulary, texts, count = loaded.vocabulary, texts_of(data), options.sequences or DEFAULT_SEQUENCES
    length = options.max_tokens or min(DEFAULT_TOKENS, loaded.max_length or DEFAULT_TOKENS)
    if data is None:
        if vocabulary is None:
            raise InputError("tokens must be set: the vocabulary of this model is unknown.")
        loaded.check_length("max_tokens", length)
        ids = (value for key, value in vars(loaded.model.config).items() if key.endswith("token_id"))
        special = [value for value in ids if isinstance(value, int) and 0 <= value < vocabulary]
        batch = repeated_tokens(vocabulary, special, count, length, options.seed)
    elif texts is None:
        batch = given_tokens(data, count, options.max_tokens)
    else:
        tokenizer = loaded.tokenizer() if tokenizer is None else tokenizer
        batch = from_texts(tokenizer, texts, count, length)
    lowest, highest = int(batch.tokens.min()), int(batch.tokens.max())
    if vocabulary is not None and not 0 <= lowest <= highest < vocabulary:
        raise invalid("tokens", f"be from 0 to {vocabulary - 1}, the model's vocabulary", got=f"{lowest} to {highest}")
    loaded.check_length("max_tokens", batch.tokens.shape[1])
    return batch, tokenizer


def expected_tokens(data: Any, options: AuditOptions) -> int:
    """The largest number of tokens of a pass, before the model is known."""
    count, length = options.sequences or DEFAULT_SEQUENCES, options.max_tokens or DEFAULT_TOKENS
    if data is not None and texts_of(data) is None and not isinstance(data, Mapping):
        rows = given_tokens(data, count, options.max_tokens).tokens
        count, length = rows.shape
    return max(count * length, 0 if options.effects == "none" else PASS_TOKENS)


def texts_of(data: Any) -> dict[str, str] | None:
    """Texts by name, if data is one or several texts; None for other data."""
    if isinstance(data, str):
        return {"given text": data}
    if isinstance(data, list | tuple) and all(isinstance(text, str) for text in data):
        data = {f"text {number}" if len(data) > 1 else "given text": text for number, text in enumerate(data, 1)}
    if not isinstance(data, Mapping) or not data or not all(isinstance(text, str) for text in data.values()):
        return None
    return {str(name): text for name, text in data.items()}


def tokens_by_name(data: Mapping[str, Any]) -> Any:
    """The token ids in a tokenizer's output, ``input_ids``, without the padding that ``attention_mask`` hides.

    Raises `InputError` for other inputs of a model, except token types that are all 0, and for masks with gaps.
    """
    ids, mask = data["input_ids"], data.get("attention_mask")
    for name, x in data.items():
        if x is None or name in {"input_ids", "attention_mask", *_ABOUT_TEXT}:
            continue
        if name != "token_type_ids" or any(bool(torch.as_tensor(types).any()) for types in x):
            raise invalid("tokens", "have no inputs besides input_ids and attention_mask", got=name)
    if mask is None or not len(ids):
        return ids
    rows, masks = ([x] if np.ndim(x[0]) == 0 else x for x in (ids, mask))
    result = []
    for row, row_mask in zip_longest(rows, masks, fillvalue=()):
        kept = torch.as_tensor(row_mask).nonzero().flatten().tolist()
        if not kept or len(row_mask) != len(row) or kept != [*range(kept[0], kept[-1] + 1)]:
            raise InputError("attention_mask must be 1 at the tokens of each sequence and 0 only before or after them.")
        result.append(row[kept[0] : kept[-1] + 1])
    return result


def inputs_of(model: Any, batch: Sequences) -> dict[str, Tensor]:
    """The arguments of ``forward``; the decoder of an encoder-decoder reads the encoder's tokens shifted by one.

    Raises `InputError` for padding if the model takes no attention mask.
    """
    tokens, mask = batch.tokens, batch.token_mask
    pad, vocab_size = (getattr(model.config, name, None) for name in ("pad_token_id", "vocab_size"))
    if mask is not None and isinstance(pad, int) and isinstance(vocab_size, int) and 0 <= pad < vocab_size:
        tokens = tokens.masked_fill(~mask, pad)
    inputs, sides = {"input_ids": tokens.to(device_of(model))}, [""]
    if model.config.is_encoder_decoder:
        names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
        starts = ((name, id) for name in names if (id := getattr(model.config, name, None)) is not None)
        name, start = next(starts, ("", 0))
        if not isinstance(start, int) or not 0 <= start <= _MAX_ID:
            raise InputError(f"model: {name} must be a token of its vocabulary, got {repr_of(start)}.")
        ids = inputs["input_ids"]
        inputs["decoder_input_ids"] = torch.cat((torch.full_like(ids[:, :1], start), ids[:, :-1]), dim=1)
        sides.append("decoder_")
    if mask is not None:
        names = [f"{side}attention_mask" for side in sides]
        inputs |= dict.fromkeys(names, mask.to(device=device_of(model), dtype=torch.long))
        unknown = [name for name in names if name not in inspect.signature(model.forward).parameters]
        if unknown:
            raise InputError(f"tokens must be sequences of one length: {type(model).__name__} takes no {unknown[0]}.")
    return inputs


def repeated_tokens(vocabulary: int, special: Sequence[int], sequences: int, tokens: int, seed: int) -> Sequences:
    """Random tokens, none ``special``, whose second half repeats the first: reveals induction (Elhage et al. 2021)."""
    plain = np.setdiff1d(np.arange(vocabulary), np.asarray(list(special), dtype=np.int64))
    random = np.random.Generator(np.random.Philox(seed))
    half = random.choice(plain if len(plain) else np.arange(vocabulary), (sequences, (tokens + 1) // 2))
    drawn = np.concatenate((half, half), axis=1)[:, :tokens]
    return Sequences(torch.from_numpy(drawn), f"random tokens, second half repeats the first (seed {seed})")


def given_tokens(tokens: Any, sequences: int, length: int | None) -> Sequences:
    """Token ids as a tensor, an array or lists: [B, N], or [N] for one sequence; cut to ``sequences`` and ``length``.

    Lists may hold sequences of different lengths.
    """
    if not _is_ragged(tokens):
        array = _token_array(tokens, 2, slice(sequences), slice(length))
        if array.shape[0] < 1 or array.shape[1] < 2:
            raise invalid("tokens", "have at least one sequence of 2 tokens", got=f"shape {list(array.shape)}")
        return Sequences(torch.from_numpy(array), "tokens as given")
    rows = [_token_array(row, 1, slice(length)) for row in tokens[:sequences]]
    for number, row in enumerate(rows, 1):
        if len(row) < 2:
            raise invalid("tokens", "have at least 2 per sequence", got=f"{len(row)} in sequence {number}")
    return _pad_rows(rows, "tokens as given")


def _is_ragged(tokens: Any) -> bool:
    """Whether these are lists of different lengths."""
    if not isinstance(tokens, list | tuple) or any(isinstance(row, str) for row in tokens):
        return False
    try:
        return len({len(row) for row in tokens}) > 1
    except TypeError:  # numbers have no length
        return False


def _token_array(tokens: Any, dimensions: int, *slices: slice) -> Int[np.ndarray, "*N"]:
    """Some of the token ids, with ``dimensions`` dimensions; they may have one fewer."""
    if isinstance(tokens, list | tuple):
        tokens = [row.cpu() if isinstance(row, Tensor) else row for row in tokens]
    try:
        array = np.asarray(tokens.cpu() if isinstance(tokens, Tensor) else tokens)
    except ValueError:
        raise InputError("tokens must be whole numbers, got lists of different lengths.") from None
    array = array[None] if array.ndim == dimensions - 1 else array
    if array.ndim != dimensions or (array.dtype.kind not in "iu" and array.size):
        raise invalid("tokens", "be whole numbers of shape [B, N]", got=f"{array.dtype} of shape {list(array.shape)}")
    array = array[slices]
    if array.size and int(array.max()) > _MAX_ID:
        raise invalid("tokens", f"be at most {_MAX_ID}", int(array.max()))
    return array.astype(np.int64)


def from_texts(tokenizer: Any, texts: Mapping[str, str], sequences: int, length: int) -> Sequences:
    """Tokens of one or several texts, cut into sequences of ``length`` with the tokenizer's special tokens around each.

    Every text contributes its first sequences, as equally many per text as possible. An incomplete last sequence is
    dropped, except for a text shorter than ``length``, which is one sequence of its own length.
    """
    used = list(texts)[:sequences]
    pieces = {name: _split_text(tokenizer, name if len(texts) > 1 else None, texts[name], length) for name in used}
    counts = split_evenly({name: len(parts) for name, parts in pieces.items()}, sequences)
    rows = [(name, piece) for name, parts in pieces.items() for piece in parts[: counts[name]]]
    names, ids = zip(*sorted(rows, key=lambda row: -len(row[1])), strict=True)
    words = tuple(str(word) for word in tokenizer.convert_ids_to_tokens(ids[0]))
    bos = getattr(tokenizer, "bos_token_id", None)
    unused = None if bos is None or bos in token_ids(tokenizer, "") else str(tokenizer.bos_token)
    result = _pad_rows(ids, _origin_text(counts, len(texts)), words, names if len(counts) > 1 else ())
    return replace(result, unused_bos=unused)


def split_evenly(available: Mapping[str, int], count: int) -> dict[str, int]:
    """Distribute ``count`` sequences as evenly as ``available`` allows; earlier texts get the remainder."""
    counts = dict.fromkeys(available, 0)
    for _ in range(min(count, sum(available.values()))):
        counts[min((name for name in available if counts[name] < available[name]), key=lambda name: counts[name])] += 1
    return counts


def _origin_text(counts: Mapping[str, int], texts: int) -> str:
    """Where the sequences came from, and how many texts contributed none."""
    if texts == 1:
        return next(iter(counts))
    missing = texts - len(counts)
    unused = f"; {missing} of {texts} texts not used (too few sequences)" if missing else ""
    if len(counts) <= _MAX_NAMED:
        return f"{join_list(f'{count} from {name}' for name, count in counts.items())}{unused}"
    number = " to ".join(map(str, sorted({min(counts.values()), max(counts.values())})))
    return f"{number} from each of {len(counts)} texts ({', '.join(list(counts)[:_MAX_NAMED])}, …){unused}"


def _pad_rows(rows: Sequence[Any], origin: str, words: tuple[str, ...] = (), texts: tuple[str, ...] = ()) -> Sequences:
    """Sequences as one tensor, the longest first."""
    rows = sorted(rows, key=lambda row: -len(row))
    lengths = tuple(map(len, rows)) if len(rows[-1]) < len(rows[0]) else ()
    tokens = pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True)
    return Sequences(tokens, origin, words, lengths, texts)


def _split_text(tokenizer: Any, name: str | None, text: str, length: int) -> list[list[int]]:
    """The sequences of a text, all of one length, with the tokenizer's special tokens."""
    num_special = len(token_ids(tokenizer, ""))
    if length <= num_special:
        raise invalid("max_tokens", f"be larger than the {num_special} tokens that this tokenizer adds", length)
    rows = token_ids(tokenizer, text, truncation=True, max_length=length, return_overflowing_tokens=True)
    if rows and isinstance(rows[0], int):  # tokenizers in Python only return the first piece
        bare, size = token_ids(tokenizer, text, add_special_tokens=False), length - num_special
        pieces = [bare[start : start + size] for start in range(0, len(bare), size)] or [bare]
        rows = list(map(tokenizer.build_inputs_with_special_tokens, pieces))
    sequences = [list(row) for row in rows if len(row) == length] or [list(max(rows, key=len, default=[]))]
    if len(sequences[0]) < 2:
        raise InputError(f"text: {name or 'it'} has fewer than 2 tokens.")
    if len(sequences[0]) == num_special:
        raise InputError(f"text must have at least one token, got none{f' in {name}' if name is not None else ''}.")
    return sequences


def read_tokens(path: Path) -> Any:
    """Token ids from a .npy file, or from a .json file with a list or a list of lists of any lengths."""
    _check_path(path, "tokens")
    try:
        if path.suffix == ".npy":
            return np.load(path, mmap_mode="r", allow_pickle=False)  # unused tokens are not read
        if path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8-sig"))
            rows = content if isinstance(content, list) else [content]
            if any(isinstance(value, bool) for row in rows for value in (row if isinstance(row, list) else [row])):
                raise InputError(f"tokens must be whole numbers, got true or false in {path}.")
            return content if _is_ragged(content) else np.asarray(content)
    except Exception as error:  # whatever NumPy makes of a header
        if isinstance(error, InputError):
            raise
        reason = "its lists are of different lengths" if "inhomogeneous" in str(error) else str(error).rstrip(".")
        if path.suffix == ".npy" and not isinstance(error, OSError):
            reason = "it is not a .npy file, is damaged, or contains objects"
        raise InputError(f"tokens: {path} could not be read ({reason}).") from None
    raise invalid("tokens", "be a .npy or a .json file", path)


def read_text(path: Path) -> str:
    """The text of a file or a pipe, in UTF-8; for ``.jsonl`` and ``.parquet`` the field ``text`` of all rows, joined
    with blank lines.
    """
    from toeplens.tasks.text import documents_in

    _check_path(path, "text")
    try:
        return b"\n\n".join(filter(None, documents_in(path, "text"))).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"text: {path} could not be read ({error}).") from None


def _check_path(path: Path, field: str) -> None:
    """Raise `InputError` if the path is neither a file nor a pipe."""
    try:
        path.stat()
    except (OSError, ValueError) as error:
        note = "" if isinstance(error, FileNotFoundError) else f" ({getattr(error, 'strerror', None) or error})".lower()
        raise InputError(f"{field}: file {path} does not exist{note}.") from None
    if not (path.is_file() or path.is_fifo()):
        raise InputError(f"{field} must be a file or a pipe, got {str(path)!r}.")
