"""What the runs of a study were carried out on, over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from toeplens.training import Segment


def carried_out(histories: Iterable[Sequence[Segment]]) -> dict[str, Any]:
    """What the histories of a study's runs say of it: nothing where they are empty, as those of earlier versions are.

    Returns ``threads`` of the processes that trained (None where they differ) and, of runs on more than one set-up,
    ``setups``: a sentence that names them all, and how many runs each has carried out or had a part in.
    """
    known = [list(dict.fromkeys(segment.setup for segment in history)) for history in histories]
    known = [setups for setups in known if setups]
    if not known:
        return {}
    counted = Counter(str(setup) for setups in known for setup in setups)
    threads = {setup.threads for setups in known for setup in setups}
    found: dict[str, Any] = {"threads": threads.pop() if len(threads) == 1 else None}
    if len(counted) > 1:
        named = "; ".join(f"{words}: {count} run{'s' if count > 1 else ''}" for words, count in counted.most_common())
        moved = sum(len(setups) > 1 for setups in known)
        begun = f" ({moved} of them went from one to another)" if moved else ""
        found["setups"] = (
            f"The {len(known)} runs were carried out on {len(counted)} set-ups{begun}, so they are not all what a "
            f"single one would give to the bit: {named}."
        )
    return found
