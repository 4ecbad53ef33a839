"""What the tests of all tasks share: examples that are drawn, and readers that find each label by its task's rules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from toeplens.tasks import PAD, Examples, Language, Split, Task, build
from toeplens.tasks.corpus import Corpus

P_VALUE = 1e-4  # every draw here is seeded, so a statistic passes always or never


def draw_examples(task: Task, count: int, seed: int = 0) -> Examples:
    return task.draw(np.random.Generator(np.random.Philox(seed)), count, seed)


def texts(examples: Examples) -> list[tuple[list[int], int]]:
    """Each text without its padding, and its label."""
    result = zip(examples.tokens.tolist(), examples.lengths.tolist(), examples.labels.tolist(), strict=True)
    return [(row[:length], label) for row, length, label in result]


def assert_even(counts: dict[Any, int], support: Iterable[Any]) -> None:
    """All of ``support`` occurs, nothing else, and as often by a chi-square test."""
    assert counts.keys() == set(support)
    assert stats.chisquare(list(counts.values())).pvalue > P_VALUE


def rows(tokens: np.ndarray) -> set[tuple[int, ...]]:
    return {tuple(row) for row in tokens.tolist()}


def same(a: Examples, b: Examples) -> bool:
    return all(np.array_equal(getattr(a, f), getattr(b, f)) for f in ("tokens", "labels", "lengths"))


def assert_well_formed(task: Task, examples: Examples) -> None:
    """Shapes, padding on the right and nowhere else, ids and labels that the task has; of each token the next one."""
    assert examples.tokens.shape == (len(examples), task.length)
    assert examples.lengths.shape == (len(examples),)
    assert {examples.tokens.dtype, examples.labels.dtype, examples.lengths.dtype} == {np.dtype(np.int64)}
    if task.per_token:
        assert examples.labels.shape == examples.tokens.shape
        assert (examples.labels[:, :-1] == examples.tokens[:, 1:]).all()
        assert (examples.lengths == task.length).all()
        assert (examples.tokens >= 0).all()
    else:
        assert examples.labels.shape == (len(examples),)
        inside = np.arange(task.length) < examples.lengths[:, None]
        assert (examples.tokens[~inside] == PAD).all()
        assert (examples.tokens[inside] > PAD).all()
    assert (examples.tokens < task.vocab_size).all()
    assert np.isin(examples.labels, list(task.labels)).all()


def language(*text: Path, **options: Any) -> Language:
    task = build("language", text=[str(path) for path in text], **options)
    assert isinstance(task, Language)
    return task


def write_folder(folder: Path, texts: list[bytes]) -> Path:
    """A folder with a file for each text."""
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:04}.txt").write_bytes(text)
    return folder


def documents_of(corpus: Corpus, split: Split) -> list[np.ndarray]:
    """The tokens of each document, without its separator."""
    stream, starts = corpus.stream(split), corpus.splits[split].starts
    return [np.asarray(stream[a : b - 1]) for a, b in itertools.pairwise(starts)]


# ---- readers, word by word; they check what else a sequence states --------------------------------------------------

SEED = 3  # of the data sets that are read


def read_distance(task: Any, text: list[int]) -> int | set[int]:
    if task.form == "released":
        return {between + 1 for _, between in released_readings(text, task)}
    triggers = task.marked_words(SEED)
    assert len(text) == task.length
    one, other = (place for place, word in enumerate(text) if word in triggers)
    assert text[one] != text[other]
    assert not task.ordered or list(triggers).index(text[one]) < list(triggers).index(text[other])
    return other - one


def released_readings(text: list[int], task: Any) -> list[tuple[int, int]]:
    """Every (left, between) that explains a sequence of the released form."""
    result, pair = [], tuple(task.marked_words(SEED))
    for left, second in itertools.combinations(range(len(text)), 2):
        between, right = second - left - 1, len(text) - second - 1
        if (text[left], text[second]) == pair and 1 <= left <= task.max_side and 1 <= between <= task.max_between:
            segments = (text[:left], text[left + 1 : second], text[second + 1 :])
            whole = right <= task.max_side and (right >= 1 or len(text) == task.cut)
            if whole and all(len(set(words)) == len(words) for words in segments):
                result.append((left, between))
    return result


@cache
def count_words(task: Task, seed: int) -> list[int]:
    """The trigger words of a counting data set: what never stands in a sequence that has none."""
    examples = draw_examples(task, 4000, seed)
    return sorted({*examples.tokens.flat} - {*examples.tokens[examples.labels == 0].flat} - {PAD})


def read_count(task: Any, text: list[int]) -> int:
    triggers = count_words(task, SEED)
    assert (len(text), len(triggers)) == (task.words, task.num_triggers)
    return sum(text.count(word) for word in triggers)


def read_index(task: Any, text: list[int]) -> int:
    *body, query = text
    stated = query - task.words - 1
    assert 0 <= stated < task.num_positions
    assert all(1 <= word <= task.words for word in body)
    return (body[::-1] if task.from_end else body)[stated]


def read_retrieval(task: Any, text: list[int]) -> int:
    *body, query = text
    last = task.keys * task.values
    pairs = [divmod(word - 1, task.values) for word in body if word <= last]
    assert all(last + task.keys < word <= last + task.keys + task.distractors for word in body if word > last)
    assert len(dict(pairs)) == len(pairs) == task.pairs
    assert task.distractors or len(text) == task.pairs + 1
    return dict(pairs)[query - last - 1]


def read_mix(task: Any, text: list[int]) -> int:
    offsets = [offset for offset in range(task.min_offset, task.max_offset + 1) if offset]
    *body, query, stated = [*text, None] if len(offsets) == 1 else text
    offset = offsets[0] if stated is None else offsets[stated - task.words - task.keys - 1]
    present = [word for word in body if word > task.words]
    assert len(present) == len(set(present)) == task.placed
    assert all(key <= task.words + task.keys for key in present)
    position = body.index(query) + offset
    assert 0 <= position < len(body)
    return body[position]


def read_hops(task: Any, text: list[int]) -> int:
    """Hop by hop, with the links as the task's docstring states them."""
    *body, start = text
    fewest, hops, count = task.hops if task.min_hops is None else task.min_hops, task.hops, task.links
    letters = task.name == "letter-hops"
    first_distractor = 1 + (count * (count + 1) if letters else count)
    if fewest < hops:
        *body, stated = body
        hops = fewest + stated - first_distractor - task.distractors
        assert fewest <= hops <= task.hops
    links = [word - 1 for word in body if word < first_distractor]
    assert all(word < first_distractor + task.distractors for word in body)
    assert len(links) == count
    if letters:
        following = dict(divmod(link, count) for link in links)
        at = start - 1 - count**2
    else:
        assert [word - 1 for word in body[-count:]] == links
        following, at = dict(enumerate(reversed(links))), start - 1
    cycle = [at]
    while len(cycle) < count:
        cycle.append(following[cycle[-1]])
    assert sorted(cycle) == list(range(count))
    return cycle[hops]


def parts_of_recall(text: list[int], keys: int, values: int) -> tuple[dict[int, int], list[int], int]:
    """The pairs, the keys that are asked for, and the number of tokens before them."""
    book: dict[int, int] = {}
    queries: list[int] = []
    told = at = 0
    while at < len(text):
        word = text[at]
        if word > keys + values:
            assert not queries  # distractors stand before the queries alone
            at += 1
            continue
        assert 1 <= word <= keys
        if word not in book:
            assert not queries
            assert keys < text[at + 1] <= keys + values
            book[word] = text[at + 1]
        else:
            told = told if queries else at
            queries.append(word)
            assert at + 1 == len(text) or text[at + 1] == book[word]
        at += 2
    return book, queries, told


def read_recall(task: Any, text: list[int]) -> int:
    book, queries, pairs = parts_of_recall(text, task.keys, task.values)
    assert len(book) == task.pairs
    assert 1 <= len(queries) == len(set(queries)) <= task.queries
    assert pairs == (task.length - 2 * task.queries + 1 if task.distractors else 2 * task.pairs)
    return book[queries[-1]]


def read_regions(task: Any, text: list[int]) -> tuple[list[list[bool]], int]:
    """For each region, which of its words are marks; and the region that is asked for."""
    opening = task.marks + task.words + 1
    result: list[list[bool]] = []
    *body, query = text
    inside = False
    for word in body:
        if word in (opening, opening + 1):
            assert inside == (word > opening)
            inside = not inside
            result += [[]] if inside else []
        else:
            assert 1 <= word < opening
            if inside:
                result[-1].append(word <= task.marks)
    assert not inside
    assert len(result) == task.regions
    return result, query - opening - 2


def read_contextual_count(task: Any, text: list[int]) -> int:
    result, asked = read_regions(task, text)
    assert all(len(region) >= task.max_count >= sum(region) for region in result)
    return sum(result[asked])


def read_parity(task: Any, text: list[int]) -> int:
    assert all(1 <= word <= task.marks + task.words for word in text)
    return sum(word <= task.marks for word in text) % 2


def depths(text: list[int], kinds: int) -> list[int] | None:
    """How many brackets are open after each one; None if one closes what is not open."""
    stack: list[int] = []
    result = []
    for bracket in text:
        assert 1 <= bracket <= 2 * kinds
        if bracket <= kinds:
            stack.append(bracket)
        elif not stack or stack.pop() != bracket - kinds:
            return None
        result.append(len(stack))
    return result


def balanced(text: list[int], kinds: int, max_depth: int = 10**6) -> bool:
    result = depths(text, kinds)
    return result is not None and result[-1] == 0 and max(result) <= max_depth


def read_dyck(task: Any, text: list[int]) -> int:
    if task.ask == "depth":
        result = depths(text, task.kinds)
        assert result is not None
        assert max(result) <= task.max_depth
        return result[-1]
    if balanced(text, task.kinds):
        assert balanced(text, task.kinds, task.max_depth)
        return 1
    assert all(text.count(kind) == text.count(kind + task.kinds) for kind in range(1, task.kinds + 1))
    for one, other in itertools.combinations(range(len(text)), 2):  # a near miss
        tried = list(text)
        tried[one], tried[other] = tried[other], tried[one]
        if balanced(tried, task.kinds, task.max_depth):
            return 0
    raise AssertionError("no exchange of two brackets balances it")


def read_rewriting(task: Any, text: list[int]) -> int:
    at = text.index(task.words + 1)
    items, result_digits = text[:at], text[at + 1 :]
    assert all(1 <= word <= task.words for word in (*items, *result_digits))
    assert task.min_items <= len(items) <= task.length // 2
    assert task.repeats or len(set(items)) == len(items)
    answer = {"copy": items, "reverse": items[::-1], "sort": sorted(items)}[task.name]
    assert answer[: len(result_digits)] == result_digits
    return answer[len(result_digits)]


def spelt(number: int, base: int, order: str, width: int) -> list[int]:
    """The tokens of a number, with zeros up to ``width`` digits."""
    digits = []
    while number or not digits:
        digits.append(number % base)
        number //= base
    digits += [0] * (width - len(digits))
    return [digit + 1 for digit in (digits if order == "least-first" else digits[::-1])]


def read_addition(task: Any, text: list[int]) -> int:
    plus, equals = text.index(task.base + 2), text.index(task.base + 3)
    numbers, digits = [], (task.length - (2 if task.padded else 3)) // 3
    for part in (text[:plus], text[plus + 1 : equals]):
        number = 0
        for token in part[::-1] if task.order == "least-first" else part:
            number = number * task.base + token - 1
        assert part == spelt(number, task.base, task.order, digits if task.padded else 1)  # without leading zeros
        assert task.min_digits == 1 or task.base ** (task.min_digits - 1) <= number < task.base**digits
        numbers.append(number)
    answer = spelt(sum(numbers), task.base, task.order, digits + 1 if task.padded else 1)
    answer += [] if task.padded else [task.base + 1]
    shown = text[equals + 1 :]
    assert answer[: len(shown)] == shown
    return answer[len(shown)]


READERS: dict[str, Callable[[Any, list[int]], int | set[int]]] = {
    "trigger-distance": read_distance,
    "trigger-count": read_count,
    "index": read_index,
    "retrieval": read_retrieval,
    "mix": read_mix,
    "recall": read_recall,
    "number-hops": read_hops,
    "letter-hops": read_hops,
    "contextual-count": read_contextual_count,
    "parity": read_parity,
    "dyck": read_dyck,
    "copy": read_rewriting,
    "reverse": read_rewriting,
    "sort": read_rewriting,
    "addition": read_addition,
}
