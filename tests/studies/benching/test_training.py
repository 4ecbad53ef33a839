"""Training contests: models of equal size, the products that each computes, and what takes part on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from toeplens.model import Decoder
from toeplens.studies import audit
from toeplens.studies.benching import bench, race, training
from toeplens.studies.benching.training import EveryPosition, products, programs_of
from toeplens.training import RunSpec, run_spec
from toeplens.training.environment import Execution
from toeplens.training.presets import DISTANCE, starting_spec

ON_CPU = Execution(torch.device("cpu"), bf16=False, compiled=False, why="a test")
PEERS = ["torch.nn.TransformerEncoder", "transformers Llama", "x-transformers"]


def spec_of(scale: str) -> RunSpec:
    return run_spec(**starting_spec(scale, "paper", DISTANCE, "rope", 0))


def weights(spec: RunSpec) -> tuple[int, int]:
    """Weights of a layer that make keys and values, and those of its queries, output and feed-forward network."""
    width, hidden = spec.model.d_model, spec.model.d_ff
    return 2 * width**2, 2 * width**2 + 2 * width * hidden


def in_layers(model: nn.Module) -> int:
    """Weights of the layers' matrices."""
    layers = next(each for each in model.modules() if isinstance(each, nn.ModuleList))
    return sum(weight.numel() for weight in layers.parameters() if weight.ndim == 2)


def test_models_of_a_contest_are_of_equal_size():
    spec = spec_of("laptop")
    programs, missing = programs_of(spec, ON_CPU)
    assert missing == []
    assert list(programs) == ["toeplens", "toeplens, every position", *PEERS]
    tokens = torch.randint(1, 64, (2, 24))
    for name, each in programs.items():
        assert in_layers(each.model) == pytest.approx(spec.model.num_layers * sum(weights(spec)), rel=0.02), name
        assert each.run(tokens).shape == (2, spec.model.num_classes), name
    assert type(programs["toeplens"].model) is Decoder
    assert programs["toeplens"].run is programs["toeplens"].model


def test_language_models_are_read_at_each_position_by_all():
    spec = training.spec_of(training.LANGUAGE)
    assert (spec.model.readout, spec.task_options["length"]) == ("each", spec.model.max_len)
    programs, _ = programs_of(spec, ON_CPU)
    assert list(programs) == ["toeplens", *PEERS]  # there is no shortcut to leave out
    tokens = torch.randint(1, 256, (2, 24))
    for name, each in programs.items():
        assert in_layers(each.model) == pytest.approx(spec.model.num_layers * sum(weights(spec)), rel=0.02), name
        assert each.run(tokens).shape == (2, 24, 256), name
    readout = spec.model.d_model * spec.model.num_classes
    every = (spec.model.num_layers * sum(weights(spec)) + readout) * spec.model.max_len
    for name, each in programs.items():
        assert products(spec, each.model, ON_CPU) == pytest.approx(6 * every, rel=0.02), name


@pytest.mark.parametrize("scale", ["laptop", "desk"])
def test_products_are_those_that_each_program_computes(scale: str):
    spec = spec_of(scale)
    length, layers, shape = spec.task_options["length"], spec.model.num_layers, spec.model
    keys, rest = weights(spec)
    readout = shape.d_model * shape.num_classes
    every = layers * (keys + rest) * length + readout
    programs, _ = programs_of(spec, ON_CPU)
    counted = {name: products(spec, each.model, ON_CPU) for name, each in programs.items()}
    # two operations a weight forward, and as many for the gradients of inputs and of weights
    assert counted["toeplens"] == 6 * (every - rest * (length - 1))  # of the last layer, one position
    assert counted["toeplens, every position"] == 6 * every
    assert counted["torch.nn.TransformerEncoder"] == 6 * every
    assert counted["x-transformers"] == 6 * every
    assert counted["transformers Llama"] == pytest.approx(6 * every, rel=0.01)


def test_with_every_position_computed_it_is_the_same_model():
    spec = spec_of("laptop")
    torch.manual_seed(0)
    ours, every = Decoder(spec.model).double(), EveryPosition(spec.model).double()
    every.load_state_dict(ours.state_dict())
    tokens = torch.randint(1, 64, (3, 24))
    torch.testing.assert_close(every(tokens), ours(tokens), rtol=1e-12, atol=1e-12)
    x, context = every.begin(tokens)
    assert every.layer_heads(spec.model.num_layers - 1, x, context)[1].shape[1] == 24
    assert ours.layer_heads(spec.model.num_layers - 1, x, context)[1].shape[1] == 1


def test_a_step_with_the_papers_dropout_takes_part_at_the_papers_shape():
    programs, _ = programs_of(spec_of("paper"), ON_CPU)
    (name,) = (name for name, each in programs.items() if each.work == "trained")
    model = programs[name].model
    assert name == "toeplens, dropout 0.1"
    assert model.training
    assert {each.p for each in model.modules() if isinstance(each, nn.Dropout)} >= {0.1}
    for other, each in programs.items():
        rates = {module.p for module in each.model.modules() if isinstance(module, nn.Dropout)}
        assert other == name or rates <= {0.0}, other


class Compiled:
    """In place of torch.compile: the model as it is, noted, with the dtype of what it gave."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.dtypes = model, set[torch.dtype]()

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        given = self.model(tokens)
        self.dtypes.add(given.dtype)
        return given


@pytest.mark.heavy
def test_on_a_gpu_ours_takes_part_compiled_and_table_1_is_trained_so(monkeypatch: pytest.MonkeyPatch):
    """A GPU's execution, carried out on the CPU: the paper's run with the laptop's sizes."""
    made: list[Compiled] = []
    sizes = {field: getattr(spec_of("laptop").model, field) for field in ("num_layers", "num_heads", "d_model", "d_ff")}
    paper = spec_of("paper")
    small = paper.model_copy(update={"model": paper.model.model_copy(update=sizes)})

    def compiled(model: nn.Module, **options: Any) -> Compiled:
        made.append(Compiled(model))
        return made[-1]

    execution = Execution(torch.device("cpu"), bf16=True, compiled=True, why="a test")
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(training, "spec_of", {"paper": small}.__getitem__)
    monkeypatch.setitem(training.BATCH["cpu"], "paper", 2)
    ((contest, _),) = training.contests(execution, ("paper",), 3, 0.0)
    assert [each.name for each in contest.timed] == [
        "toeplens",
        "toeplens, compiled",
        "toeplens, every position",
        "toeplens, dropout 0.1, compiled",
        *PEERS,
    ]
    assert [each.work for each in contest.timed[:4]] == ["asked", "asked", "equal", "trained"]
    assert contest.timed[0].flops == contest.timed[1].flops == contest.timed[3].flops
    assert [each.dtypes for each in made] == [{torch.bfloat16}] * 2


def test_a_gpu_is_used_as_training_uses_it(monkeypatch: pytest.MonkeyPatch):
    """What is planned where there is a GPU; nothing is run on it."""
    seen: list[Any] = []

    def contests(execution: Execution, scales: tuple[str, ...], rounds: int, seconds: float) -> list[Any]:
        seen.append(execution)
        assert all(training.BATCH[execution.device.type][scale] > 0 for scale in scales)
        return []

    def peak(device: torch.device, dtype: torch.dtype) -> float:
        seen.append((device.type, dtype, race._LARGE[device.type]))
        return 1e15

    monkeypatch.setitem(bench.__globals__, "matrix_peak", peak)
    monkeypatch.setattr(training, "contests", contests)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    record = bench(audit, device="cuda", contests=["training"])
    (place, dtype, size), execution = seen
    assert (place, dtype, size) == ("cuda", torch.bfloat16, 8192)
    assert execution.bf16
    assert execution.compiled
    assert record.device == "cuda"
    assert record.environment["gpu"] == "a GPU"


def test_a_gpu_is_waited_for_before_and_after_each_program(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("wait"))
    race.timed(lambda: order.append("run"), torch.device("cuda"))
    assert order == ["wait", "run", "wait"]
