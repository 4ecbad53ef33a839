"""What was written for version 0.2 works, with a warning that says the new name."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders import tiny
from torch import Tensor

import toeplens
from toeplens import encodings
from toeplens.encodings import PositionalEncoding, attend, conformance
from toeplens.tasks import Examples, Task
from toeplens.training import train
from toeplens.utils.renamed import MEMBERS, MODULES, NAMES

SIZES = {"d_model": 16, "num_heads": 2, "head_dim": 8, "max_len": 12}
deprecated = pytest.mark.filterwarnings("ignore:.* is now .* will be removed in 0.4:DeprecationWarning")


@pytest.mark.parametrize(("package", "old"), [(package, old) for package, names in NAMES.items() for old in names])
def test_old_names_are_the_new_ones(package: str, old: str):
    module, new = importlib.import_module(package), NAMES[package][old]
    vars(module).pop(old, None)  # set by an import of a module under its old name
    with pytest.warns(DeprecationWarning, match=rf"^{package}\.{old} is now {package}\.{new}\. ") as caught:
        value = getattr(module, old)
    assert value is getattr(module, new)
    assert caught[0].filename == __file__
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'absent'"):
        _ = module.absent


@pytest.mark.parametrize(("old", "new"), MODULES.items())
def test_old_modules_are_the_new_ones(old: str, new: str):
    code = (
        "import sys, warnings\n"
        f"with warnings.catch_warnings(record=True) as caught:\n    warnings.simplefilter('always')\n    import {old}\n"
        f"import {new}\nassert sys.modules['{old}'] is sys.modules['{new}'], 'another module'\n"
        f"assert {new}.__spec__.name == '{new}'\n"
        "print([str(one.message) for one in caught if one.filename == '<string>'])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert f"{old} is now {new}. The old name will be removed in 0.4." in printed


def test_there_is_no_old_name_of_a_thing_that_kept_its_name():
    for package, names in NAMES.items():
        assert not set(names) & set(importlib.import_module(package).__all__)
    for table in MEMBERS.values():
        assert not set(table) & set(table.values())


@pytest.fixture(name="plugin")
def plugin_class() -> type[PositionalEncoding]:
    """An encoding as one was written for 0.2: a feature of each token, which a bias compares."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        class Distance(PositionalEncoding):
            """A penalty on the difference of two features."""

            citation, coupling = "an example", "bias"
            data_dependent = True

            def __init__(self, **sizes: int) -> None:
                super().__init__(**sizes)
                self.weight = self.learned((self.num_heads, self.d_model), torch.nn.init.normal_)

            def note(self, x: Tensor, before: Tensor | None = None) -> Tensor:
                return torch.einsum("bnd,hd->bhn", x, self.weight).tanh().unsqueeze(-1)

            def bias(self, q_positions: Tensor, k_positions: Tensor, seen: Any) -> Tensor:
                return -(seen.own_notes() - seen.notes.mT).square()

            def factors_at(self, q_positions: Tensor, k_positions: Tensor) -> bool:
                return False

    old_names = {"Distance.note is now key_features", "Distance.factors_at is now has_low_rank_bias"}
    assert {str(one.message).partition(". The")[0] for one in caught} == old_names
    return Distance


@deprecated
def test_an_encoding_written_for_version_0_2_conforms_and_attends(plugin: type[PositionalEncoding]):
    conformance.check(plugin)
    torch.manual_seed(0)
    encoding, x = plugin(**SIZES), torch.randn(2, 7, 16)
    q = k = v = torch.randn(2, 2, 7, 8)
    notes = encoding.key_features(x)
    common: dict[str, Any] = {"encoding": encoding, "q_positions": torch.arange(7), "k_positions": torch.arange(7)}
    logits = q @ k.mT - (notes - notes.mT).square()
    expected = logits.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf).softmax(-1) @ v
    with pytest.warns(DeprecationWarning, match=r"^attend\(notes=\) is now key_features=\. "):
        torch.testing.assert_close(attend(q, k, v, **common, scale=1.0, notes=notes), expected)
    with pytest.warns(DeprecationWarning, match=r"^Distance\.note is now key_features\. "):
        assert torch.equal(encoding.note(x), notes)
    with pytest.warns(DeprecationWarning, match=r"^Distance\.turns_alike is now rotation_is_shared\. "):
        assert encoding.turns_alike


@deprecated
def test_an_encoding_written_for_version_0_2_works_in_a_composition(plugin: type[PositionalEncoding]):
    both = encodings.compose(encodings.build("rope", **SIZES), plugin(**SIZES))
    layer = toeplens.nn.Attention(16, 2, encoding=both)
    assert layer(torch.randn(2, 7, 16)).shape == (2, 7, 16)


def test_keywords_and_fields_of_version_0_2():
    q = torch.randn(1, 2, 3, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mask = encodings.BandControl(still=(0,), silent=(1,))
        assert (mask.still, mask.silent, mask.order) == ((0,), (1,), None)
        inputs = encodings.Seen.of(q, q, notes=q)
        assert inputs.notes is q
        assert inputs.past().tolist() == inputs.causal_mask().tolist()
    assert {"FrequencyMask(still=) is now freeze=", "FrequencyMask.still is now freeze"} <= {
        str(one.message).partition(". The")[0] for one in caught
    }


class OldProbe:
    """A probe as one was written for 0.2."""

    name = "old"
    moments = staticmethod(lambda total_steps: [0, total_steps])

    def look(self, model: torch.nn.Module, step: int) -> dict[str, Any]:
        return {"parameters": sum(p.numel() for p in model.parameters())}


@deprecated
def test_a_probe_written_for_version_0_2_watches_a_run(tmp_path: Path):
    run = train(tiny(), tmp_path, watcher=OldProbe())
    assert len(run.watched) == 2
    assert run.watched == run.probe_rows


@deprecated
def test_a_task_written_for_version_0_2():
    class Same(Task):
        name, answer, length = "same", "content", 4

        def sizes(self) -> tuple[int, range]:
            return 5, range(1, 3)

        def draw(self, rng: Any, count: int, seed: int) -> Examples:
            raise NotImplementedError

    assert Same().vocab_size == 5
