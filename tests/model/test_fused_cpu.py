"""A layer's parts as single steps: what the modules do, with the same gradients; or the modules if heard."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from tests.builders import REPRESENTATIVES
from torch import Tensor, nn

from toeplens.encodings.rotary import FrequencyMask, with_frequency_mask
from toeplens.model import Decoder, decoder, decoder_config, fused_cpu
from toeplens.model.decoder import Block

SIZES = {"vocab_size": 11, "d_model": 8, "num_layers": 2, "num_heads": 2, "d_ff": 12, "max_len": 6, "dropout": 0.0}


def modules(d_model: int = 6, inner: int = 10, *, dropout: float = 0.0, bias: bool = True) -> tuple[nn.Module, ...]:
    """out, drop, norm and ffn, with weights that are nowhere 0 or 1."""
    torch.manual_seed(0)
    ffn = nn.Sequential(
        nn.Linear(d_model, inner), nn.ReLU(), nn.Dropout(dropout), nn.Linear(inner, d_model), nn.Dropout(dropout)
    )
    result = (nn.Linear(4, d_model, bias=bias), nn.Dropout(dropout), nn.LayerNorm(d_model), ffn)
    for module in result:
        module.double()
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    return result


def by_modules(x: Tensor, z: Tensor, out: nn.Module, drop: nn.Module, norm: nn.Module, ffn: nn.Module) -> Tensor:
    x = x + drop(out(z))
    return x + ffn(norm(x))


def random_input(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def assert_agree(fused: Sequence[Tensor], unfused: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """The same values, and the same gradients of a weighted sum of them."""
    torch.testing.assert_close([*fused], [*unfused], rtol=1e-12, atol=1e-12)
    weights = [torch.randn_like(part) for part in unfused]
    sums = (sum((x * w).sum() for x, w in zip(parts, weights, strict=True)) for parts in (fused, unfused))
    actual, expected = (torch.autograd.grad(y, leaves) for y in sums)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.fixture
def fused_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the steps that are taken as one."""
    names: list[str] = []
    for step in (fused_cpu._ProjectRotate, fused_cpu._ReadRows, fused_cpu._FinishLayer):

        def apply(*args: object, step: type = step, own: Callable[..., object] = step.apply) -> object:
            names.append(step.__name__)
            return own(*args)

        monkeypatch.setattr(step, "apply", apply)
    return names


@pytest.mark.parametrize("bias", [True, False])
def test_finished_matches_the_modules(bias: bool, fused_steps: list[str]):
    parts = modules(bias=bias)
    x, z = random_input(2, 3, 6), random_input(2, 3, 4)
    leaves = [x, z, *(parameter for part in parts for parameter in part.parameters())]
    fused = fused_cpu.finish_layer(x, z, *parts)
    assert fused_steps == ["_FinishLayer"]
    assert_agree([fused], [by_modules(x, z, *parts)], leaves)


@pytest.mark.parametrize("asks", ["all", "some", "others"])
@pytest.mark.parametrize("turns", [True, False])
def test_projected_matches_the_modules_and_the_rotation(asks: str, turns: bool, fused_steps: list[str]):
    torch.manual_seed(1)
    qkv = nn.Linear(3, 3 * 8).double()
    x = random_input(2, 3, 3)
    asking = {"all": x, "some": random_input(2, 1, 3), "others": random_input(2, 3, 3)}[asks]
    angles = [torch.rand(n, 1, 1, 2, dtype=torch.float64) for n in (asking.shape[1], 3)]
    angles[0] = angles[1] if asking.shape[1] == 3 else angles[0]
    rotations = tuple(torch.polar(1 + angle, angle) for angle in angles) if turns else None

    def plain(x: Tensor, asking: Tensor) -> list[Tensor]:
        projections = (asking @ qkv.weight[:8].T + qkv.bias[:8], *(x @ qkv.weight[8:].T + qkv.bias[8:]).chunk(2, -1))
        results = [part.unflatten(-1, (2, 4)).transpose(1, 2) for part in projections]
        for place, angle in enumerate(angles if turns else ()):
            a, b = results[place].unflatten(-1, (2, 2)).unbind(-1)
            cos, sin = ((1 + angle) * f(angle) for f in (torch.cos, torch.sin))
            cos, sin = cos.squeeze(2).transpose(0, 1), sin.squeeze(2).transpose(0, 1)
            results[place] = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        return results

    fused = fused_cpu.project_qkv(x, asking, qkv, 2, rotations)
    assert fused_steps == ["_ProjectRotate"]
    assert_agree(fused, plain(x, asking), [x, qkv.weight, qkv.bias] + ([asking] if asks != "all" else []))


def read_by_modules(x: Tensor, norm: nn.LayerNorm, read: Tensor) -> tuple[Tensor, ...]:
    normed, rows = norm(x), read.view(-1, 1, 1).expand(-1, 1, x.shape[-1])
    return normed, normed.gather(1, rows), x.gather(1, rows)


@pytest.mark.parametrize("frozen", ["nothing", "x", "weight", "bias"])
def test_read_at_matches_the_modules(frozen: str, fused_steps: list[str]):
    norm = modules()[2]
    assert isinstance(norm, nn.LayerNorm)
    x, read = random_input(3, 4, 6), torch.tensor([3, 0, 2])
    leaves = {"x": x, "weight": norm.weight, "bias": norm.bias}
    if frozen != "nothing":
        leaves.pop(frozen).requires_grad_(False)
    fused = fused_cpu.norm_and_read(x, norm, read)
    assert fused_steps == ["_ReadRows"]
    assert_agree(fused, read_by_modules(x, norm, read), list(leaves.values()))


def test_frozen_inputs_leave_other_gradients_unchanged():
    for frozen in (*range(10), slice(0, 8)):  # one, and all but the last layer
        parts = modules()
        x, z = random_input(2, 3, 6), random_input(2, 3, 4)
        leaves = [x, z, *(parameter for part in parts for parameter in part.parameters())]
        for leaf in leaves[frozen] if isinstance(frozen, slice) else [leaves[frozen]]:
            leaf.requires_grad_(False)
        trainable = [leaf for leaf in leaves if leaf.requires_grad]
        assert_agree([fused_cpu.finish_layer(x, z, *parts)], [by_modules(x, z, *parts)], trainable)


def model(**changes: object) -> Decoder:
    torch.manual_seed(0)
    return Decoder(decoder_config(encoding="rope", **SIZES | changes))


TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])


def test_a_layer_runs_two_fused_steps(fused_steps: list[str]):
    model()(TOKENS)
    assert fused_steps == ["_ProjectRotate", "_FinishLayer", "_ReadRows", "_ProjectRotate", "_FinishLayer"], (
        "one place is read in the last"
    )


def test_active_dropout_uses_the_modules(fused_steps: list[str]):
    dropping = model(dropout=0.5)
    dropping(TOKENS)
    assert "_FinishLayer" not in fused_steps
    dropping.eval()(TOKENS)
    assert fused_steps.count("_FinishLayer") == 2


@pytest.mark.parametrize(
    ("layer", "place"),  # where one position is read, queries and keys are of different rows: products with the weights
    [
        *((0, place) for place in ("ffn", "ffn.0", "ffn.1", "ffn.3", "norm_ffn", "attention.out", "attention.qkv")),
        *((1, place) for place in ("ffn.3", "norm_attention")),
    ],
)
def test_a_forward_hook_on_a_module_fires(layer: int, place: str):
    calls, hooked = [], model()
    hooked.block(layer).get_submodule(place).register_forward_hook(lambda *_: calls.append(place))
    torch.testing.assert_close(hooked(TOKENS), model()(TOKENS))
    assert calls == [place]


def test_a_global_forward_hook_fires():
    called_types: set[str] = set()
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: called_types.add(type(module).__name__))
    try:
        model()(TOKENS)
    finally:
        handle.remove()
    assert called_types >= {"Linear", "ReLU", "LayerNorm", "Sequential"}


def test_a_module_subclass_is_called(fused_steps: list[str]):
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    changed, other = model(), model()
    first = changed.block(0).ffn[0]
    doubled = Doubled(first.in_features, first.out_features)
    doubled.load_state_dict(first.state_dict())
    changed.block(0).ffn[0] = doubled
    with torch.no_grad():
        for parameter in other.block(0).ffn[0].parameters():
            parameter.mul_(2)
    torch.testing.assert_close(changed(TOKENS), other(TOKENS))
    assert fused_steps.count("_FinishLayer") == 3


def test_vmap_and_autocast_run_unfused(fused_steps: list[str]):
    original = model()
    expected = original(TOKENS)
    fused_steps.clear()
    actual = torch.func.vmap(lambda x: original(x.unsqueeze(0)).squeeze(0))(TOKENS)
    torch.testing.assert_close(actual, expected)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(original(TOKENS).float(), expected, rtol=0.1, atol=0.1)
    assert not fused_steps


def test_a_layer_with_a_frequency_mask_uses_its_own_rotation():
    """The factors that a pass has formed are one encoding's: a layer with another turns by that."""
    original = model()
    masked = copy.deepcopy(original)
    block: Block = masked.block(1)
    block.attention.encoding = with_frequency_mask(block.attention.encoding, FrequencyMask(drop=(0,)))
    assert (original(TOKENS) - masked(TOKENS)).abs().max() > 1e-4
    torch.testing.assert_close(masked(TOKENS), masked(TOKENS, fused=False))


@pytest.mark.parametrize("encoding", REPRESENTATIVES)
@pytest.mark.parametrize("protocol", ["paper", pytest.param("released", marks=pytest.mark.heavy)])
def test_parameter_gradients_match_the_modules(encoding: str, protocol: str, monkeypatch: pytest.MonkeyPatch):
    """Of encodings whose own parameters are away from where they begin; float64, to 1e-9."""
    torch.manual_seed(0)
    sizes = SIZES | {"d_model": 16, "d_ff": 12, "max_len": 8}
    model = Decoder(decoder_config(encoding=encoding, protocol=protocol, **sizes)).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    tokens = torch.randint(11, (3, 6))

    def gradients() -> dict[str, Tensor | None]:
        torch.manual_seed(1)  # what some draw in training
        found = torch.autograd.grad(model(tokens).square().sum(), list(model.parameters()), allow_unused=True)
        return dict(zip(dict(model.named_parameters()), found, strict=True))

    fused = gradients()
    for module in (fused_cpu, decoder):
        monkeypatch.setattr(module, "can_fuse", lambda x: False)
    for name, expected in gradients().items():
        actual = fused[name]
        assert (actual is None) == (expected is None), name
        if actual is not None and expected is not None:
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=name)


def test_a_second_derivative_is_refused_by_torch_except_under_its_transforms():
    model, tokens = Decoder(decoder_config(encoding="rope", **SIZES | {"num_layers": 1})), torch.randint(11, (3, 5))
    weights = dict(model.named_parameters())
    (first,) = torch.autograd.grad(model(tokens).square().sum(), [weights["embedding.weight"]], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (tokens,), {"fused": False}).square().sum()

    def slope(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.grad(loss)(weights)["embedding.weight"].square().sum()

    assert torch.func.grad(slope)(weights)["embedding.weight"].abs().sum() > 0


@pytest.mark.parametrize("encoding", ["rope", "partial-rope", "rope-absolute", "rope-dynamic", "rope-yarn"])
def test_full_head_rotations_are_fused_into_the_projection(encoding: str) -> None:
    """As the encoding turns them, in float64 to 1e-12, also where each sequence has its own positions."""
    torch.manual_seed(0)
    sizes = SIZES | {"d_model": 16, "max_len": 16}
    for pairing, is_fused in (("interleaved", True), ("half", False)):
        config = decoder_config(encoding=encoding, encoding_options={"pairing": pairing}, **sizes)
        assert (Decoder(config).start_pass(TOKENS)[1].rotation_factors is not None) == is_fused
    model = Decoder(decoder_config(encoding=encoding, **sizes)).double().eval()
    tokens, lengths = torch.randint(11, (3, 8)), torch.tensor([8, 5, 7])
    for positions in (None, torch.arange(8) + torch.tensor([[0], [3], [6]])):
        x, context = model.start_pass(tokens, lengths, positions)
        actual, expected = (
            model.run_from_layer(0, x, each)
            for each in (context, replace(context, rotation_factors=None, rotary_encoding=None))
        )
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        for part in (slice(1, 3), slice(0, 1)):
            torch.testing.assert_close(
                model.run_from_layer(0, x[part], context.select(part)), actual[part], rtol=0, atol=1e-12
            )


def by_split(x: Tensor, heads: int) -> list[Tensor]:
    return [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in x.chunk(3, dim=-1)]


def test_in_parts_matches_chunk_without_copying() -> None:
    """Without memory of their own, with their gradients, and under transforms."""
    x = torch.randn(2, 3, 3 * 2 * 2, dtype=torch.float64, requires_grad=True)
    for part, other in zip(fused_cpu.split_qkv(x, 2), by_split(x, 2), strict=True):
        assert torch.equal(part, other)
        assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.autograd.gradcheck(lambda x: fused_cpu.split_qkv(x, 2), x)
    actual, expected = (  # none of the keys
        torch.autograd.grad((q**2).sum() + v.sum(), x)[0] for q, _, v in (fused_cpu.split_qkv(x, 2), by_split(x, 2))
    )
    assert torch.equal(actual, expected)
    mapped = torch.func.vmap(lambda each: fused_cpu.split_qkv(each[None], 2)[1][0])(x)
    assert torch.equal(mapped, by_split(x, 2)[1])
