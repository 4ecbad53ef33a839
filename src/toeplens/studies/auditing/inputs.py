"""The input of an audit: sequences of given tokens, of one or several texts, or of random repeated tokens."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from toeplens.ground import InputError, invalid, shown
from toeplens.ground.words import listed
from toeplens.sources.huggingface import Change
from toeplens.sources.huggingface.load import Loaded
from toeplens.sources.huggingface.model import token_ids
from toeplens.studies.auditing.record import Kept
from toeplens.studies.kit.options import AuditOptions

SEQUENCES, TOKENS = 16, 256  # defaults
_LARGEST = int(np.iinfo(np.int64).max)
_TOLD = 4  # up to this many texts are listed by name
Progress = Callable[[str, int, int], None]  # takes a description of the current work, the finished amount, the total


@dataclass(frozen=True)
class Sequences:
    """Sequences, the longest first, with padding on the right."""

    tokens: Int[Tensor, "B N"]  # 0 in the padding
    origin: str  # where they came from
    words: tuple[str, ...] = ()  # tokens of the first sequence; empty without a tokenizer
    lengths: tuple[int, ...] = ()  # without padding; empty if all have the same length
    texts: tuple[str, ...] = ()  # name of each sequence's text; empty if there are not several
    unused_bos: str | None = None  # beginning-of-sequence token that the tokenizer has but does not add

    @property
    def there(self) -> Bool[Tensor, "B N"] | None:
        """Mask of the tokens that are not padding; None without padding."""
        return torch.arange(self.tokens.shape[1]) < torch.tensor(self.lengths).unsqueeze(1) if self.lengths else None


@dataclass(frozen=True)
class Work:
    """An audit of a transformers model that is being made."""

    loaded: Loaded
    options: AuditOptions
    sequences: Sequences
    inputs: Mapping[str, Tensor]  # arguments of ``forward``
    mask_token: int | None  # its id; None if the tokenizer has none
    changes: Sequence[Change]
    kept: Kept
    report: Progress


def sequences_of(loaded: Loaded, data: Any, tokenizer: Any, options: AuditOptions) -> tuple[Sequences, Any]:
    """The sequences that the model reads, and the tokenizer, if there is one.

    Raises `InputError` for tokens outside the vocabulary and for sequences that are too long for the model.
    """
    vocabulary, texts, count = loaded.vocabulary, texts_of(data), options.sequences or SEQUENCES
    length = options.max_tokens or min(TOKENS, loaded.longest or TOKENS)
    if data is None:
        if vocabulary is None:
            raise InputError("tokens must be set: the vocabulary of this model is unknown.")
        loaded.check_length("max_tokens", length)
        named = (each for key, each in vars(loaded.model.config).items() if key.endswith("token_id"))
        special = [each for each in named if isinstance(each, int) and 0 <= each < vocabulary]
        read = repeated(vocabulary, special, count, length, options.seed)
    elif texts is None:
        read = given(data, count, options.max_tokens)
    else:
        tokenizer = loaded.tokenizer() if tokenizer is None else tokenizer
        read = from_texts(tokenizer, texts, count, length)
    least, most = int(read.tokens.min()), int(read.tokens.max())
    if vocabulary is not None and not 0 <= least <= most < vocabulary:
        raise invalid("tokens", f"be from 0 to {vocabulary - 1}, the model's vocabulary", got=f"{least} to {most}")
    loaded.check_length("max_tokens", read.tokens.shape[1])
    return read, tokenizer


def texts_of(data: Any) -> dict[str, str] | None:
    """Texts by name, if data is one or several texts; None for other data."""
    if isinstance(data, str):
        return {"given text": data}
    if isinstance(data, list | tuple) and all(isinstance(text, str) for text in data):
        data = {f"text {number}" if len(data) > 1 else "given text": text for number, text in enumerate(data, 1)}
    if not isinstance(data, Mapping) or not data or not all(isinstance(text, str) for text in data.values()):
        return None
    return {str(name): text for name, text in data.items()}


def inputs_of(model: Any, read: Sequences) -> dict[str, Tensor]:
    """The arguments of ``forward``; the decoder of an encoder-decoder reads the encoder's tokens shifted by one.

    Raises `InputError` for padding if the model takes no attention mask.
    """
    tokens, there = read.tokens, read.there
    pad, words = (getattr(model.config, name, None) for name in ("pad_token_id", "vocab_size"))
    if there is not None and isinstance(pad, int) and isinstance(words, int) and 0 <= pad < words:
        tokens = tokens.masked_fill(~there, pad)
    found, sides = {"input_ids": tokens.to(model.device)}, [""]
    if model.config.is_encoder_decoder:
        names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
        given = ((name, id) for name in names if (id := getattr(model.config, name, None)) is not None)
        name, start = next(given, ("", 0))
        if not isinstance(start, int) or not 0 <= start <= _LARGEST:
            raise InputError(f"model: {name} must be a token of its vocabulary, got {shown(start)}.")
        ids = found["input_ids"]
        found["decoder_input_ids"] = torch.cat((torch.full_like(ids[:, :1], start), ids[:, :-1]), dim=1)
        sides.append("decoder_")
    if there is not None:
        names = [f"{side}attention_mask" for side in sides]
        found |= dict.fromkeys(names, there.to(device=model.device, dtype=torch.long))
        unknown = [name for name in names if name not in inspect.signature(model.forward).parameters]
        if unknown:
            raise InputError(f"tokens must be sequences of one length: {type(model).__name__} takes no {unknown[0]}.")
    return found


def repeated(vocabulary: int, special: Sequence[int], sequences: int, tokens: int, seed: int) -> Sequences:
    """Random tokens, none ``special``, whose second half repeats the first: reveals induction (Elhage et al. 2021)."""
    plain = np.setdiff1d(np.arange(vocabulary), np.asarray(list(special), dtype=np.int64))
    random = np.random.Generator(np.random.Philox(seed))
    half = random.choice(plain if len(plain) else np.arange(vocabulary), (sequences, (tokens + 1) // 2))
    drawn = np.concatenate((half, half), axis=1)[:, :tokens]
    return Sequences(torch.from_numpy(drawn), f"random tokens, second half repeats the first (seed {seed})")


def given(tokens: Any, sequences: int, length: int | None) -> Sequences:
    """Token ids as a tensor, an array or lists: [B, N], or [N] for one sequence; cut to ``sequences`` and ``length``.

    Lists may hold sequences of different lengths.
    """
    if not _uneven(tokens):
        array = _ids(tokens, 2, slice(sequences), slice(length))
        if array.shape[0] < 1 or array.shape[1] < 2:
            raise invalid("tokens", "have at least one sequence of 2 tokens", got=f"shape {list(array.shape)}")
        return Sequences(torch.from_numpy(array), "tokens as given")
    rows = [_ids(row, 1, slice(length)) for row in tokens[:sequences]]
    for number, row in enumerate(rows, 1):
        if len(row) < 2:
            raise invalid("tokens", "have at least 2 per sequence", got=f"{len(row)} in sequence {number}")
    return _together(rows, "tokens as given")


def _uneven(tokens: Any) -> bool:
    """Whether these are lists of different lengths."""
    if not isinstance(tokens, list | tuple) or any(isinstance(row, str) for row in tokens):
        return False
    try:
        return len({len(row) for row in tokens}) > 1
    except TypeError:  # numbers have no length
        return False


def _ids(tokens: Any, dimensions: int, *some: slice) -> Int[np.ndarray, "*N"]:
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
    array = array[some]
    if array.size and int(array.max()) > _LARGEST:
        raise invalid("tokens", f"be at most {_LARGEST}", int(array.max()))
    return array.astype(np.int64)


def from_texts(tokenizer: Any, texts: Mapping[str, str], sequences: int, length: int) -> Sequences:
    """Tokens of one or several texts, cut into sequences of ``length`` with the tokenizer's special tokens around each.

    Every text contributes its first sequences, as equally many per text as possible. An incomplete last sequence is
    dropped, except for a text shorter than ``length``, which is one sequence of its own length.
    """
    read = list(texts)[:sequences]
    pieces = {name: _pieces(tokenizer, name if len(texts) > 1 else None, texts[name], length) for name in read}
    counts = shared({name: len(own) for name, own in pieces.items()}, sequences)
    rows = [(name, piece) for name, own in pieces.items() for piece in own[: counts[name]]]
    names, ids = zip(*sorted(rows, key=lambda row: -len(row[1])), strict=True)
    words = tuple(str(word) for word in tokenizer.convert_ids_to_tokens(ids[0]))
    bos = getattr(tokenizer, "bos_token_id", None)
    unused = None if bos is None or bos in ids[0] else str(tokenizer.bos_token)
    made = _together(ids, _origin(counts, len(texts)), words, names if len(counts) > 1 else ())
    return replace(made, unused_bos=unused)


def shared(room: Mapping[str, int], count: int) -> dict[str, int]:
    """Distribute ``count`` sequences as evenly as ``room`` allows; earlier texts get the remainder."""
    found = dict.fromkeys(room, 0)
    for _ in range(min(count, sum(room.values()))):
        found[min((name for name in room if found[name] < room[name]), key=lambda name: found[name])] += 1
    return found


def _origin(counts: Mapping[str, int], texts: int) -> str:
    """Where the sequences came from, and how many texts contributed none."""
    if texts == 1:
        return next(iter(counts))
    missing = texts - len(counts)
    left = f"; {missing} of {texts} texts not used (too few sequences)" if missing else ""
    if len(counts) <= _TOLD:
        return f"{listed(f'{count} from {name}' for name, count in counts.items())}{left}"
    each = " to ".join(map(str, sorted({min(counts.values()), max(counts.values())})))
    return f"{each} from each of {len(counts)} texts ({', '.join(list(counts)[:_TOLD])}, …){left}"


def _together(rows: Sequence[Any], origin: str, words: tuple[str, ...] = (), texts: tuple[str, ...] = ()) -> Sequences:
    """Sequences as one tensor, the longest first."""
    rows = sorted(rows, key=lambda row: -len(row))
    lengths = tuple(map(len, rows)) if len(rows[-1]) < len(rows[0]) else ()
    tokens = pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True)
    return Sequences(tokens, origin, words, lengths, texts)


def _pieces(tokenizer: Any, name: str | None, text: str, length: int) -> list[list[int]]:
    """The sequences of a text, all of one length, with the tokenizer's special tokens."""
    added = len(token_ids(tokenizer, ""))
    if length <= added:
        raise invalid("max_tokens", f"be larger than the {added} tokens that this tokenizer adds", length)
    made = token_ids(tokenizer, text, truncation=True, max_length=length, return_overflowing_tokens=True)
    if made and isinstance(made[0], int):  # slow tokenizers only return the first piece
        bare = token_ids(tokenizer, text, add_special_tokens=False)
        made = [made] if added else [bare[start : start + length] for start in range(0, len(bare), length)]
    found = [list(each) for each in made if len(each) == length] or [list(max(made, key=len, default=[]))]
    if len(found[0]) < 2:
        raise InputError(f"text: {name or 'it'} has fewer than 2 tokens.")
    if len(found[0]) == added:
        raise InputError(f"text must have at least one token, got none{f' in {name}' if name is not None else ''}.")
    return found


def read_tokens(path: Path) -> Any:
    """Token ids from a .npy file, or from a .json file with a list or a list of lists of any lengths."""
    _there(path, "tokens")
    try:
        if path.suffix == ".npy":
            return np.load(path, mmap_mode="r", allow_pickle=False)  # unused tokens are not read
        if path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8-sig"))
            rows = content if isinstance(content, list) else [content]
            if any(isinstance(each, bool) for row in rows for each in (row if isinstance(row, list) else [row])):
                raise InputError(f"tokens must be whole numbers, got true or false in {path}.")
            return content if _uneven(content) else np.asarray(content)
    except Exception as error:  # whatever NumPy makes of a header
        if isinstance(error, InputError):
            raise
        why = "its lists are of different lengths" if "inhomogeneous" in str(error) else str(error).rstrip(".")
        if path.suffix == ".npy" and not isinstance(error, OSError):
            why = "it is not a .npy file, is damaged, or contains objects"
        raise InputError(f"tokens: {path} could not be read ({why}).") from None
    raise invalid("tokens", "be a .npy or a .json file", path)


def read_text(path: Path) -> str:
    """The text of a file or a pipe, in UTF-8; for ``.jsonl`` and ``.parquet`` the field ``text`` of all rows, joined
    with blank lines.
    """
    from toeplens.tasks.text import documents_in

    _there(path, "text")
    try:
        return b"\n\n".join(filter(None, documents_in(path, "text"))).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"text: {path} could not be read ({error}).") from None


def _there(path: Path, field: str) -> None:
    """Raise `InputError` if the path is neither a file nor a pipe."""
    try:
        path.stat()
    except (OSError, ValueError) as error:
        why = "" if isinstance(error, FileNotFoundError) else f" ({getattr(error, 'strerror', None) or error})".lower()
        raise InputError(f"{field}: file {path} does not exist{why}.") from None
    if not (path.is_file() or path.is_fifo()):
        raise InputError(f"{field} must be a file or a pipe, got {str(path)!r}.")
