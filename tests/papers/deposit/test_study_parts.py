"""The parts of the study name every cell once, and a switch is one difference between the protocols and no other."""

from __future__ import annotations

from typing import Any

import pytest

from toeplens.model import Protocol, decoder_config
from toeplens.papers.deposit import PARTS, SCALES, grid, title
from toeplens.papers.deposit.spec import (
    PARTIAL,
    SWITCH_BASES,
    SWITCHES,
    TITLES,
    EncodingLabel,
    labels_by_part,
    model_fields,
    other_protocol,
    switches_of,
    variant_title,
)
from toeplens.training.presets import COUNT, DISTANCE, PROTOCOLS

SIZES = {"d_model": 32, "d_ff": 16, "num_layers": 2, "num_heads": 4, "max_len": 12, "vocab_size": 16}
every_base = pytest.mark.parametrize("base", SWITCH_BASES)
both_protocols = pytest.mark.parametrize("protocol", PROTOCOLS)


def model(protocol: Protocol, label: str, seed: int = 0) -> dict[str, Any]:
    return decoder_config(**model_fields(protocol, label, SIZES, seed)).model_dump()


@every_base
@both_protocols
def test_a_switch_sets_its_fields_to_the_other_protocols_values(base: str, protocol: Protocol) -> None:
    config, other = model(protocol, base), model(other_protocol(protocol), base)
    for switch in switches_of(base):
        changed = model(protocol, f"{base}/{switch}")
        assert {name for name in config if config[name] != changed[name]} <= set(SWITCHES[switch])
        assert all(changed[name] == other[name] for name in SWITCHES[switch])
        assert (changed != config) == bool(SWITCHES[switch])


@every_base
def test_all_switches_together_give_the_other_protocol(base: str) -> None:
    config, other = model("released", base), model("paper", base)
    for switch in switches_of(base):
        config |= {name: model("released", f"{base}/{switch}")[name] for name in SWITCHES[switch]}
    # dropout is 0 at the scales where this is studied, so where it would act is no difference
    assert {name for name in config if config[name] != other[name]} <= {"protocol", "dropout_on"}


def test_the_data_switch_changes_only_the_data() -> None:
    cells = {c.key: c.job.spec for c in grid("laptop", ["released"], 1, ["core", "factors"])}
    for task in (DISTANCE, COUNT):
        places = {key.label: spec for key, spec in cells.items() if key.task == task}
        base_run, changed = places["nope"], places["nope/data"]
        assert changed.model == base_run.model
        assert changed.task_options["form"] == "paper"
        differing = {name for name in base_run.model_dump() if getattr(base_run, name) != getattr(changed, name)}
        assert differing <= {"task_options", "ignore_label"}


@pytest.mark.parametrize("scale", SCALES)
@both_protocols
def test_parts_name_every_cell_once(scale: str, protocol: Protocol) -> None:
    parts = labels_by_part(SCALES[scale], protocol, ["all"])
    places = [place for part in parts.values() for place in part]
    assert len(places) == len(set(places))
    assert list(parts) == list(PARTS)
    for part, expected in PARTS.items():
        assert set(expected.task_labels(SCALES[scale], protocol)) <= set(places), part


@pytest.mark.parametrize("scale", ["smoke", "laptop"])
def test_every_cell_of_every_part_has_a_run_name(scale: str) -> None:
    cells = grid(scale, PROTOCOLS, 1, ["all"])
    assert len({cell.key for cell in cells}) == len(cells)
    names = {title(cell.key.label, cell.key.protocol): cell.key.label for cell in cells}
    assert all(name and not name.startswith("/") for name in names)
    by_protocol = {(c.key.protocol, c.key.task, title(c.key.label, c.key.protocol)) for c in cells}
    assert len(by_protocol) == len(cells)
    for cell in cells:
        parsed = EncodingLabel.parse(cell.key.label)
        assert str(parsed) == cell.key.label
        assert parsed.is_plain or parsed.variant in ("", "random") or parsed.layer or variant_title(parsed.variant)
        assert parsed.base in TITLES or (parsed.base == PARTIAL and parsed.heads)
