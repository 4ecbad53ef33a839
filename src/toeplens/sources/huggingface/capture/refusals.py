"""Why attention was not understood, in words: what stands in place of a softmax of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Shared(NamedTuple):
    """An operation that may share weight out among keys, and the shape of what it was given."""

    name: str
    shape: tuple[int, ...]

    def why(self, tokens: int) -> str:
        """Why it is no attention that was followed, in a module of so many tokens."""
        *_, rows, columns = (0, 0, *self.shape)
        if (rows == tokens and columns >= tokens) or not self.shape:
            return f"its {self.name!r} is no softmax of a product that was followed"
        return (
            f"its {self.name!r} is of numbers of shape {list(self.shape)}, bands or blocks of keys in place of one "
            f"product of all its {tokens} queries and their keys"
        )


def without_softmax(kind: str, passed: Mapping[str, bool]) -> str:
    """What to say of a model whose pass had no call of attention.

    Arguments
        kind    its class
        passed  classes of modules that are named after attention and were called, and whether they gave but 0
    """
    if not passed:
        return f"no attention was called in the pass of {kind}"
    zeros = [name for name, nothing in passed.items() if nothing]
    said = f"no attention of {kind} was understood: its {', '.join(passed)} took no softmax of queries and keys"
    more = ", as where it is left to a kernel that is not there" if zeros else ""
    return f"{said}{f', and {zeros[0]} gave nothing but 0{more}' if zeros else ''}"
