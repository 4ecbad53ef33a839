"""Every encoding passes the conformance suite, and every check of the suite can fail."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.builders import REPRESENTATIVES
from torch import Tensor, nn

from toeplens import encodings
from toeplens.encodings import OffsetBias, PositionalEncoding, conformance, offsets_between
from toeplens.encodings.additive import T5, ALiBi
from toeplens.encodings.conformance import CHECKS, NonConformance, check
from toeplens.encodings.rotary import RoPE
from toeplens.utils import InputError

VARIANTS: dict[str, list[dict[str, Any]]] = {  # in the heavy suite
    "alibi": [{"slopes": "exponential"}],
    "axial-rope": [{"axes": 4}, {"grid": [4, 16]}, {"grid": [4, 5], "frequencies": "pixel"}],
    "bipe": [
        {"across": "alibi", "segment": 3, "places_max": 2},
        {"inside": "sinusoidal", "pairing": "half"},
        {"across": "alibi", "inside": "sinusoidal", "slope_factor": 1.0},
    ],
    "cable": [{"step": "softplus", "weighted": False}, {"kernelised": True}],
    "carope": [{"start": "printed"}],
    "comrope": [{"variant": "ap", "block": 2}, {"axes": 1}],
    "cope": [{"positions_max": 5, "scaled": True}, {"scaled": True}],
    "dape": [{"base": "rope"}],
    "dape-v2": [{"base": "none", "kernel_size": 5}, {"base": "kerple-log", "kernel_size": 5}, {"base": "none"}],
    "deberta": [
        {"position_buckets": 8},
        {"terms": ["p2c"], "p2c_index": "released", "max_distance": 40, "position_buckets": 16},
    ],
    "dynamic-bias": [{"log_distance": True, "norm": True}],
    "fire": [{"shared": True}, {"threshold": 20.0}],
    "fope": [{"learnable": True, "padding": "ones"}],
    "grape": [{"planes": "orthogonal", "per_head": True}, {"planes": "free", "count": 2, "per_head": True}],
    "grape-additive": [{"rate": "constant"}, {"rate": "key"}],
    "grape-path": [{"edges": "token"}],
    "harope": [{"map": "shared"}],
    "hope": [{"train_length": 10}],
    "kerple-power": [{"shared": True}],
    "learned": [{"init_std": 0.0}],
    "liere": [{"axes": 1, "block": 4}],
    "llama4-temperature": [{"floor_scale": 2.5, "attn_scale": 1.0}],
    "mla": [
        {"pairing": "half"},
        {"phase_table": "released"},
        {"rotary_dim": 8, "rotary_query": "shared", "latent_norm": False},
    ],
    "mrope": [{"interleaved_sections": True}],
    "p-rope": [{"p": 0.25}],
    "partial-rope": [
        {"rotary_pct": 0.25},
        {"rotary_pct": 0.5, "pairing": "half"},
        {"heads": [0, 2], "rotary_pct": 0.5},
    ],
    "path": [{"rank": 4, "conv_size": 1}, {"rank": None, "conv_size": 1, "activation": "none"}],
    "pope": [{"init": "uniform", "shared": True}],
    "random-fixed": [{"trainable": True}],
    "relative-projection": [{"basis": 4}],
    "relative-table": [{"shared": True}],
    "repo": [{"width": 5, "pairing": "interleaved"}],
    "rerope": [{"leak": 1.0}],
    "resonance-rope": [{"factor": 3.0, "pairing": "half"}],
    "rollpe": [{"speed": 0.3}],
    "rope": [{"base": 500000.0}, {"pairing": "half"}],
    "rope-absolute": [{"layout": "halves"}],
    "rope-bands": [
        {"gains": [1, 0.5, 0, 0.2]},
        {"gains": [[1, 0, 0, 0], [0, 1, 0.5, 0], [1, 1, 1, 1]], "pairing": "half"},
        {"keep": [0, 3]},
        {"ramp": [0.5, 1.5, 2], "off": "pair"},
    ],
    "rope-learned": [{"per_head": True, "shared": False}],
    "rope-plus-plus": [{"heads": "own", "pairing": "interleaved"}],
    "sandwich": [{"width": 6}],
    "scalable-softmax": [{"bias": True, "shared": True}],
    "selective-rope": [
        {"conv_size": None, "gate": False, "bias": True},
        {"conv_size": 1, "activation": "none", "pairing": "interleaved"},
    ],
    "self-extend": [{"group": 1}],
    "shaw": [
        {"shared_heads": False, "on_values": False, "max_distance": 4},
        {"shared_heads": False, "max_distance": 3},
    ],
    "sinusoidal": [{"layout": "halves"}],
    "stick-breaking": [{"own": True}, {"own": True, "remainder": "own"}, {"remainder": "own"}],
    "string": [{"form": "circulant", "axes": 1}, {"axes": 1}],
    "swin": [{"window": [3, 4], "grid": [4, 6]}],
    "swin-v2": [{"window": [3, 4], "hidden": 8, "cosine": True}, {"pretrained_window": [4, 4], "hidden": 16}],
    "syntactic": [{"branching": 3}, {"by": "depth"}],
    "syntactic-bias": [{"branching": 3}, {"branching": 3, "max_distance": 2}, {"by": "depth"}],
    "t5": [{"num_buckets": 8, "max_distance": 20}, {"bidirectional": True}],
    "tapa": [{"alpha": 0.7, "phase": "linear"}],
    "transformer-xl": [{"tied_biases": False}],
    "tupe": [{"relative": True, "untied_first": True}, {"relative": True}, {"untied_first": True}],
    "urpe": [{"base": "none"}],
}


@pytest.mark.parametrize("name", encodings.names())
def test_every_encoding_conforms(name: str) -> None:
    assert len(check(name, skip=["compile"]).results) == len(CHECKS) - 1


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "options"), [(name, each) for name, rows in VARIANTS.items() for each in rows])
def test_every_variant_conforms(name: str, options: dict[str, Any]) -> None:
    check(name, skip=["compile"], **options)


def test_every_encoding_can_be_pickled_and_reset() -> None:
    for name in encodings.names():
        encoding = encodings.build(name, **conformance.SIZES)
        copied = pickle.loads(pickle.dumps(encoding))
        pairs = zip(encoding.state_dict().values(), copied.state_dict().values(), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs), name
        copied.for_layer(1).reset_parameters()


def test_layers_have_separate_parameters_unless_shared() -> None:
    for name in encodings.names():
        encoding = encodings.build(name, **conformance.SIZES)
        layer_encoding = encoding.for_layer(1)
        assert (layer_encoding is encoding) == encoding.shared, name
        both = zip(encoding.state_dict().values(), layer_encoding.state_dict().values(), strict=True)
        assert encoding.shared or all(x.shape == y.shape and x is not y for x, y in both), name


COMPILED = """
import sys
from toeplens.encodings.conformance import CHECKS, check
from toeplens.encodings.rotary import RoPE

class ReadsNumbers(RoPE):
    "A Python branch on a tensor's value."

    def rotate(self, q, k, q_positions, k_positions):
        return super().rotate(q, k, q_positions, k_positions) if int(k_positions.max()) else (q, k)

skip = [name for name in CHECKS if name != "compile"]
for case in (*sys.argv[1:], ReadsNumbers):
    report = check(case, strict=False, skip=skip)
    if not report.passed:
        print(report)
"""


def compile_failures(names: tuple[str, ...]) -> list[str]:
    """Which of these do not compile; in a process of its own: what checks shapes in the tests cannot be compiled."""
    run = subprocess.run([sys.executable, "-c", COMPILED, *names], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return re.findall(r"^conformance of (\S+)", run.stdout, re.MULTILINE)


@pytest.mark.heavy
def test_encodings_compile_in_one_graph_and_a_branch_on_numbers_does_not() -> None:
    """One of each kind; with TOEPLENS_ALL_ENCODINGS=1 all, which takes minutes."""
    names = encodings.names() if os.environ.get("TOEPLENS_ALL_ENCODINGS") == "1" else REPRESENTATIVES
    together = ("rope+alibi", "fox+rope", "relative-projection+fox+carope", "rope+scalable-softmax+t5", "shaw+rope")
    assert compile_failures((*names, *together)) == ["ReadsNumbers"]


# ---- encodings that are wrong in one way each -----------------------------------------------------------------------


class CorrectEncoding(ALiBi):
    """Nothing wrong."""


class BoundedBias(OffsetBias):
    """A learned value per distance, for as many positions as its table has."""

    bounded, citation = True, "this test"

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.weight = self.new_parameter((self.max_len, self.num_heads), nn.init.normal_)

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        self.check_positions(q_positions)
        self.check_positions(k_positions)
        return super().bias(q_positions, k_positions)

    def kernel(self, offsets: Tensor) -> Tensor:
        return self.weight[offsets.abs()].T


def test_a_toeplitz_encoding_with_a_table_conforms() -> None:
    check(BoundedBias, skip=["compile"])


class MisshapenBias(PositionalEncoding):
    """A bias without its heads."""

    coupling, citation = "bias", "this test"

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        return -offsets_between(q_positions, k_positions).abs().double()


def variant_stating(
    name: str, about: str, base: type[PositionalEncoding] = ALiBi, **facts: Any
) -> type[PositionalEncoding]:
    return type(name, (base,), {"__doc__": about, **facts})


WrongCoupling = variant_stating("WrongCoupling", "A bias that calls itself something else.", coupling="logits")
WrongScale = variant_stating("WrongScale", "Another scale than the one that its class states.", scale=0.5)
Undocumented = type("Undocumented", (ALiBi,), {})
FalselyDependent = variant_stating(
    "FalselyDependent", "A fixed bias that says that it reads content.", data_dependent=True, toeplitz=False
)
FalselyNotToeplitz = variant_stating(
    "FalselyNotToeplitz", "A rotation that says it is not relative.", RoPE, toeplitz=False
)


class FalselyFixed(PositionalEncoding):
    """A content-dependent bias that says that it is not."""

    coupling, toeplitz, citation = "bias", False, "this test"

    def key_features(self, x: Tensor, cached: Tensor | None = None) -> Tensor:
        return x[:, None, :, :1].expand(-1, self.num_heads, -1, -1)

    def bias(self, q_positions: Tensor, k_positions: Tensor, *, inputs: Any) -> Tensor:
        return inputs.query_features() * inputs.key_features.transpose(-2, -1)


class FalselyNonlinear(PositionalEncoding):
    """Bends each logit by itself, position with content: no fixed set of functions of position."""

    coupling, toeplitz, citation = "logits", False, "this test"

    def transform_logits(self, logits: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        return torch.tanh(logits * (1 + 0.3 * offsets_between(q_positions, k_positions).abs()).to(logits.dtype))


class LosesBiases(PositionalEncoding):
    """Forms logits anew, and does not say so."""

    coupling, citation = "logits", "this test"

    def transform_logits(self, logits: Tensor, q_positions: Tensor, k_positions: Tensor, *, inputs: Any) -> Tensor:
        return (inputs.q @ inputs.k.mT * inputs.scale).to(logits.dtype) - offsets_between(
            q_positions, k_positions
        ).abs()


class FalselyToeplitz(PositionalEncoding):
    """Depends on the query's place, and says that it does not."""

    coupling, citation = "bias", "this test"

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        shares = offsets_between(q_positions, k_positions).double() / (1 + q_positions.unsqueeze(-1))
        return shares.unsqueeze(-3).expand(*shares.shape[:-2], self.num_heads, -1, -1)


class WrongKernel(ALiBi):
    """A bias with another one's kernel."""

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        return super().bias(q_positions, k_positions) * 2


class FirstRowOnly(ALiBi):
    """Reads the first sequence's positions for all."""

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        first = [p[0] if p.ndim == 2 else p for p in (q_positions, k_positions)]
        return super().bias(*first)


class SeesFutureTokens(PositionalEncoding):
    """A bias from the mean of all tokens, later ones too."""

    coupling, data_dependent, toeplitz, citation = "bias", True, False, "this test"

    def key_features(self, x: Tensor, cached: Tensor | None = None) -> Tensor:
        return x.mean(1, keepdim=True)[:, None, :, :1].expand(-1, self.num_heads, x.shape[1], -1)

    def bias(self, q_positions: Tensor, k_positions: Tensor, *, inputs: Any) -> Tensor:
        places = torch.arange(inputs.k.shape[2]) % 3
        return inputs.query_features() * places


class ChunkReader(PositionalEncoding):
    """What a query gets depends on which other queries are asked with it."""

    coupling, data_dependent, toeplitz, citation = "logits", True, False, "this test"

    def transform_logits(self, logits: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        return logits - logits.mean(-2, keepdim=True)


class ForgetsCache(PositionalEncoding):
    """A running sum that starts again at every call."""

    coupling, data_dependent, toeplitz, citation = "bias", True, False, "this test"

    def key_features(self, x: Tensor, cached: Tensor | None = None) -> Tensor:
        return x[:, None, :, :1].cumsum(2).expand(-1, self.num_heads, -1, -1)

    def bias(self, q_positions: Tensor, k_positions: Tensor, *, inputs: Any) -> Tensor:
        return inputs.query_features() - inputs.key_features.transpose(-2, -1)


class IgnoresMask(ALiBi):
    """Adds to every head's output, whatever it sees."""

    coupling = "weights"

    def add_values(self, weights: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        return torch.ones_like(weights[..., :1]).expand(-1, -1, -1, self.head_dim)


class DividesByZero(ALiBi):
    """Divides by a sum that is 0 where no key is seen."""

    def transform_weights(self, weights: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        return weights / weights.sum(-1, keepdim=True)


class RoughPhases(RoPE):
    """Phases formed in float32."""

    def phases(self, positions: Tensor, frequencies: Tensor) -> Tensor:
        return super().phases(positions.float(), frequencies).float() * 1.0 + 0.0 * positions.float()[:, None]

    def tables(self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        phases = positions.to(dtype)[..., None, :, None] * frequencies.to(dtype).unsqueeze(-2)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return phases.cos().to(wide), phases.sin().to(wide)


class CastSlopes(OffsetBias):
    """Slopes in a buffer that a cast of the model rounds."""

    citation = "this test"

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.register_buffer("slopes", torch.tensor([0.1, 0.3, 0.7]), persistent=False)

    def kernel(self, offsets: Tensor) -> Tensor:
        return -self.slopes[:, None] * offsets.abs()


class UnusedParameter(ALiBi):
    """A parameter that nothing reads."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.idle = nn.Parameter(torch.ones(1))


class InfiniteGradient(T5):
    """A gradient that is infinite where a value is zero."""

    def kernel(self, offsets: Tensor) -> Tensor:
        return super().kernel(offsets) * (self.weight[0, 0] * 0).sqrt()


class UnsavedState(OffsetBias):
    """Random values that the state dict does not hold."""

    citation = "this test"

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.register_exact("slopes", torch.rand(self.num_heads, dtype=torch.float64))

    def kernel(self, offsets: Tensor) -> Tensor:
        return (-self.slopes[:, None] * offsets.abs()).float()


class QuadraticRotation(RoPE):
    """A rotation that looks at all pairs of positions."""

    def rotate(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> tuple[Tensor, Tensor]:
        nearest = offsets_between(q_positions, k_positions).abs().amin() * 0
        return super().rotate(q + nearest, k, q_positions, k_positions)


@pytest.mark.parametrize(
    ("broken", "failing"),
    [
        (MisshapenBias, "shapes"),
        (WrongCoupling, "facts"),
        (WrongScale, "facts"),
        (Undocumented, "facts"),
        (FalselyDependent, "facts"),
        (FalselyFixed, "facts"),
        (FalselyNonlinear, "facts"),
        (LosesBiases, "facts"),
        (FalselyToeplitz, "facts"),
        (FalselyNotToeplitz, "facts"),
        (WrongKernel, "kernel"),
        (FirstRowOnly, "positions"),
        (SeesFutureTokens, "causal"),
        (ChunkReader, "paths"),
        (ForgetsCache, "decoding"),
        (IgnoresMask, "padding"),
        (DividesByZero, "padding"),
        (FalselyToeplitz, "shift"),
        (RoughPhases, "precision"),
        (CastSlopes, "casts"),
        (UnusedParameter, "gradients"),
        (InfiniteGradient, "gradients"),
        (UnsavedState, "state"),
        (QuadraticRotation, "memory"),
    ],
    ids=lambda case: case if isinstance(case, str) else case.__name__,
)
def test_a_wrong_encoding_is_detected(broken: type[PositionalEncoding], failing: str) -> None:
    others = [name for name in CHECKS if name != failing]
    report = check(broken, strict=False, skip=others)
    assert [finding.check for finding in report.results] == [failing]
    assert not report.passed, report
    with pytest.raises(NonConformance, match=f"FAIL {failing}") as caught:
        check(broken, skip=others)
    assert caught.value.report == report


def test_a_report_is_a_table_of_check_results() -> None:
    report = check(CorrectEncoding, slopes="exponential", skip=["compile"])
    lines = str(report).splitlines()
    assert lines[0] == "conformance of CorrectEncoding (slopes='exponential')"
    assert [line.split()[:2] for line in lines[1:]] == [["ok", name] for name in CHECKS if name != "compile"]


def test_the_suite_leaves_the_random_state_unchanged() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check("t5", skip=["compile"])
    assert torch.equal(torch.rand(3), expected)


def test_invalid_calls_are_refused_in_one_sentence() -> None:
    with pytest.raises(InputError, match=r"^skip must be .*, got 'shape'; did you mean 'shapes'"):
        check("rope", skip=["shape"])
    with pytest.raises(InputError, match=r"^sizes must be .*, got 'heads'"):
        check("rope", sizes={"heads": 4})
    with pytest.raises(InputError, match=r"^encoding must be a name or a subclass of PositionalEncoding, got .*Linear"):
        check(nn.Linear)  # type: ignore[arg-type]
