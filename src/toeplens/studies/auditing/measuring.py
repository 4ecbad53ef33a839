"""The pass of an audit: every attention call proved, and measured unless that was done before."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from toeplens.sources.huggingface import AttentionCall, compared
from toeplens.sources.huggingface.loading import Loaded
from toeplens.studies.auditing.kept import Kept
from toeplens.studies.auditing.measured import MEANS, Measured, measure_call
from toeplens.studies.auditing.record import NoSuchLayer

Progress = Callable[[str, int, int], None]
Estimate = Callable[[str, float], None]
_PASS = "pass"
_TRIED = 256  # tokens of one sequence that tell how long all will take


def measure(
    loaded: Loaded,
    inputs: Mapping[str, Tensor],
    layers: frozenset[int] | None,
    kept: Kept,
    report: Progress,
    expect: Estimate,
) -> tuple[list[Measured], float]:
    """The measured calls in the order of the pass, and the distance of the captured pass from a plain one.

    A call whose numbers are kept is proved again and not measured again; where all of them and the pass are, nothing is
    run.

    Arguments
        layers   which are measured; all if None
        report   is told how many calls are done
        expect   is told, early in the first call, how many seconds all calls will take
    """
    done = kept.get(_PASS)
    if isinstance(done, dict):
        again = [kept.layer(number) for number in done["calls"]]
        whole = [each for each in again if each is not None]
        if len(whole) == len(again):
            return whole, float(done["whole"])
    seen: set[int] = set()
    numbers: list[int] = []
    measured: list[Measured] = []
    names = loaded.attention
    count, calls = sum(not any(other.startswith(f"{name}.") for other in names) for name in names), 0

    def look(call: AttentionCall) -> None:
        nonlocal calls
        loaded.check_attention(call.module)
        seen.add(call.layer)
        number, calls = calls, calls + 1
        if layers is None or call.layer in layers:
            found = kept.layer(number)
            tokens = inputs.get(f"{call.side}_input_ids", inputs["input_ids"])
            if found is None:
                if not measured:
                    expect("layers", _seconds(call, tokens) * (count if layers is None else len(layers)))
                found = measure_call(call, tokens)
                kept.put_layer(number, found)
            measured.append(found)
            numbers.append(number)
        report("layers", calls, max(calls, count))  # some modules are called again and again

    report("layers", 0, count)
    whole = compared(loaded.model, inputs, look)
    if layers is not None and not layers <= seen:
        raise NoSuchLayer(min(layers - seen), max(seen))
    kept.put(_PASS, {"calls": numbers, "whole": whole})
    return measured, whole


def _seconds(call: AttentionCall, tokens: Tensor) -> float:
    """How long a call will take, from the first tokens of its first sequences; work grows with the tokens' square."""
    count, length = call.q.shape[0], min(_TRIED, call.q.shape[2], call.k.shape[2])
    tried = 1 if call.rotation is not None or call.bias is not None else min(count, MEANS)
    part = (slice(0, tried), slice(None), slice(0, length))

    def cut(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[:tried, :, :length, :length]

    some = replace(
        call,
        q=call.q[part],
        k=call.k[part],
        v=call.v[part],
        bias=cut(call.bias),
        visible=cut(call.visible),
        weights=None,
        heads=call.heads[:tried, :length],
        unrotated=None if call.unrotated is None else (call.unrotated[0][part], call.unrotated[1][part]),
    )
    began = time.perf_counter()
    measure_call(some, tokens[:tried, :length])
    return (time.perf_counter() - began) * count / tried * (call.q.shape[2] / length) ** 2
