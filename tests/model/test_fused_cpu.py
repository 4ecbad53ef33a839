"""A layer's parts as single steps: what the modules do, with the same gradients; or the modules if heard."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.builders import REPRESENTATIVES
from torch import Tensor, nn

from toeplens.encodings.rotary import BandControl, controlled
from toeplens.model import Decoder, decoder, decoder_config, fused_cpu
from toeplens.model.decoder import Block

SIZES = {"vocab_size": 11, "d_model": 8, "num_layers": 2, "num_heads": 2, "d_ff": 12, "max_len": 6, "dropout": 0.0}


def modules(d_model: int = 6, inner: int = 10, *, dropout: float = 0.0, bias: bool = True) -> tuple[nn.Module, ...]:
    """out, drop, norm and ffn, with weights that are nowhere 0 or 1."""
    torch.manual_seed(0)
    ffn = nn.Sequential(
        nn.Linear(d_model, inner), nn.ReLU(), nn.Dropout(dropout), nn.Linear(inner, d_model), nn.Dropout(dropout)
    )
    found = (nn.Linear(4, d_model, bias=bias), nn.Dropout(dropout), nn.LayerNorm(d_model), ffn)
    for module in found:
        module.double()
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    return found


def by_modules(x: Tensor, z: Tensor, out: nn.Module, drop: nn.Module, norm: nn.Module, ffn: nn.Module) -> Tensor:
    x = x + drop(out(z))
    return x + ffn(norm(x))


def given(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the steps that are taken as one."""
    names: list[str] = []
    for step in (fused_cpu._Projected, fused_cpu._Read, fused_cpu._Finished):

        def apply(*given: object, step: type = step, own: Callable[..., object] = step.apply) -> object:
            names.append(step.__name__)
            return own(*given)

        monkeypatch.setattr(step, "apply", apply)
    return names


@pytest.mark.parametrize("bias", [True, False])
def test_the_end_of_a_layer_is_that_of_its_modules(bias: bool, taken: list[str]):
    parts = modules(bias=bias)
    x, z = given(2, 3, 6), given(2, 3, 4)
    leaves = [x, z, *(parameter for part in parts for parameter in part.parameters())]
    weighed = torch.randn(2, 3, 6, dtype=torch.float64)
    one, many = fused_cpu.finished(x, z, *parts), by_modules(x, z, *parts)
    assert taken == ["_Finished"]
    torch.testing.assert_close(one, many, rtol=1e-12, atol=1e-12)
    for own, wanted in zip(*(torch.autograd.grad((y * weighed).sum(), leaves) for y in (one, many)), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-10, atol=1e-12)


def test_its_gradients_are_those_of_differences():
    parts = modules()
    x, z = given(2, 2, 6), given(2, 2, 4)
    assert torch.autograd.gradcheck(lambda x, z: fused_cpu.finished(x, z, *parts), (x, z))


@pytest.mark.parametrize("asks", ["all", "some", "others"])
@pytest.mark.parametrize("turns", [True, False])
def test_queries_keys_and_values_are_those_of_the_modules_and_turned(asks: str, turns: bool, taken: list[str]):
    torch.manual_seed(1)
    qkv = nn.Linear(3, 3 * 8).double()
    x = given(2, 3, 3)
    asking = {"all": x, "some": given(2, 1, 3), "others": given(2, 3, 3)}[asks]
    angles = [torch.rand(n, 1, 1, 2, dtype=torch.float64) for n in (asking.shape[1], 3)]
    angles[0] = angles[1] if asking.shape[1] == 3 else angles[0]
    of_each = tuple(torch.polar(1 + angle, angle) for angle in angles) if turns else None

    def plain(x: Tensor, asking: Tensor) -> list[Tensor]:
        made = (asking @ qkv.weight[:8].T + qkv.bias[:8], *(x @ qkv.weight[8:].T + qkv.bias[8:]).chunk(2, -1))
        found = [part.unflatten(-1, (2, 4)).transpose(1, 2) for part in made]
        for place, angle in enumerate(angles if turns else ()):
            a, b = found[place].unflatten(-1, (2, 2)).unbind(-1)
            cos, sin = ((1 + angle) * f(angle) for f in (torch.cos, torch.sin))
            cos, sin = cos.squeeze(2).transpose(0, 1), sin.squeeze(2).transpose(0, 1)
            found[place] = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        return found

    one = fused_cpu.projected(x, asking, qkv, 2, of_each)
    assert taken == ["_Projected"]
    many = plain(x, asking)
    weighed = [torch.randn_like(part) for part in many]
    leaves = [x, qkv.weight, qkv.bias] + ([asking] if asks != "all" else [])
    sums = [sum((part * w).sum() for part, w in zip(parts, weighed, strict=True)) for parts in (one, many)]
    for own, wanted in zip(one, many, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-12)
    for own, wanted in zip(*(torch.autograd.grad(y, leaves) for y in sums), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-10, atol=1e-12)

    def step(x: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        return fused_cpu.projected(x, x if asks == "all" else other, qkv, 2, of_each)

    assert torch.autograd.gradcheck(step, (x, asking if asks != "all" else given(1)))


def read_by_modules(x: Tensor, norm: nn.LayerNorm, read: Tensor) -> tuple[Tensor, ...]:
    normed, rows = norm(x), read.view(-1, 1, 1).expand(-1, 1, x.shape[-1])
    return normed, normed.gather(1, rows), x.gather(1, rows)


@pytest.mark.parametrize("frozen", ["nothing", "x", "weight", "bias"])
def test_what_is_read_at_one_position_is_that_of_the_modules(frozen: str, taken: list[str]):
    norm = modules()[2]
    assert isinstance(norm, nn.LayerNorm)
    x, read = given(3, 4, 6), torch.tensor([3, 0, 2])
    leaves = {"x": x, "weight": norm.weight, "bias": norm.bias}
    if frozen != "nothing":
        leaves.pop(frozen).requires_grad_(False)
    weighed = [torch.randn(3, n, 6, dtype=torch.float64) for n in (4, 1, 1)]
    one, many = fused_cpu.read_at(x, norm, read), read_by_modules(x, norm, read)
    assert taken == ["_Read"]
    for own, wanted in zip(one, many, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-12)
    sums = [sum((part * w).sum() for part, w in zip(parts, weighed, strict=True)) for parts in (one, many)]
    for own, wanted in zip(*(torch.autograd.grad(y, leaves.values()) for y in sums), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-10, atol=1e-12)


def test_each_of_it_has_its_gradients_alone():
    norm, read = modules()[2], torch.tensor([1, 0])
    x = given(2, 2, 6)
    for part in range(3):
        assert torch.autograd.gradcheck(lambda x, part=part: fused_cpu.read_at(x, norm, read)[part], (x,))


def test_what_is_frozen_gets_no_gradient_and_the_rest_what_it_had():
    for frozen in (*range(10), slice(0, 8)):  # one, and all but the last layer
        parts = modules()
        x, z = given(2, 3, 6), given(2, 3, 4)
        leaves = [x, z, *(parameter for part in parts for parameter in part.parameters())]
        for leaf in leaves[frozen] if isinstance(frozen, slice) else [leaves[frozen]]:
            leaf.requires_grad_(False)
        rest = [leaf for leaf in leaves if leaf.requires_grad]
        one, many = (torch.autograd.grad(f(x, z, *parts).sum(), rest) for f in (fused_cpu.finished, by_modules))
        for own, wanted in zip(one, many, strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-10, atol=1e-12)


def model(**changes: object) -> Decoder:
    torch.manual_seed(0)
    return Decoder(decoder_config(encoding="rope", **SIZES | changes))


TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])


def test_a_layer_takes_two_steps(taken: list[str]):
    model()(TOKENS)
    assert taken == ["_Projected", "_Finished", "_Read", "_Projected", "_Finished"], "one place is read in the last"


def test_dropout_at_work_is_the_modules_own(taken: list[str]):
    dropping = model(dropout=0.5)
    dropping(TOKENS)
    assert "_Finished" not in taken
    dropping.eval()(TOKENS)
    assert taken.count("_Finished") == 2


@pytest.mark.parametrize(
    ("layer", "place"),  # where one position is read, queries and keys are of different rows: products with the weights
    [
        *((0, place) for place in ("ffn", "ffn.0", "ffn.1", "ffn.3", "norm_ffn", "attention.out", "attention.qkv")),
        *((1, place) for place in ("ffn.3", "norm_attention")),
    ],
)
def test_who_listens_to_a_module_hears_it(layer: int, place: str):
    heard, listened = [], model()
    listened.block(layer).get_submodule(place).register_forward_hook(lambda *_: heard.append(place))
    torch.testing.assert_close(listened(TOKENS), model()(TOKENS))
    assert heard == [place]


def test_who_listens_to_all_modules_hears_them():
    heard: set[str] = set()
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: heard.add(type(module).__name__))
    try:
        model()(TOKENS)
    finally:
        handle.remove()
    assert heard >= {"Linear", "ReLU", "LayerNorm", "Sequential"}


def test_a_module_of_another_kind_is_called(taken: list[str]):
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
    assert taken.count("_Finished") == 3


def test_transforms_and_autocast_see_operations_alone(taken: list[str]):
    own = model()
    wanted = own(TOKENS)
    taken.clear()
    found = torch.func.vmap(lambda x: own(x.unsqueeze(0)).squeeze(0))(TOKENS)
    torch.testing.assert_close(found, wanted)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(own(TOKENS).float(), wanted, rtol=0.1, atol=0.1)
    assert not taken


def test_a_rotation_under_control_is_the_encodings_own():
    """The factors that a pass has formed are one encoding's: a layer with another turns by that."""
    own = model()
    other = copy.deepcopy(own)
    block: Block = other.block(1)
    block.attention.encoding = controlled(block.attention.encoding, BandControl(silent=(0,)))
    assert (own(TOKENS) - other(TOKENS)).abs().max() > 1e-4
    torch.testing.assert_close(other(TOKENS), other(TOKENS, fused=False))


@pytest.mark.parametrize("encoding", REPRESENTATIVES)
@pytest.mark.parametrize("protocol", ["paper", pytest.param("released", marks=pytest.mark.heavy)])
def test_every_parameter_learns_as_it_does_by_the_modules(
    encoding: str, protocol: str, monkeypatch: pytest.MonkeyPatch
):
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

    one = gradients()
    for place in (fused_cpu, decoder):
        monkeypatch.setattr(place, "takes_steps", lambda x: False)
    for name, wanted in gradients().items():
        own = one[name]
        assert (own is None) == (wanted is None), name
        if own is not None and wanted is not None:
            torch.testing.assert_close(own, wanted, rtol=1e-9, atol=1e-9, msg=name)


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
def test_rotations_of_whole_heads_are_done_where_vectors_are_made(encoding: str) -> None:
    """As the encoding turns them, in float64 to 1e-12, also where each sequence has its own positions."""
    torch.manual_seed(0)
    sizes = SIZES | {"d_model": 16, "max_len": 16}
    for pairing, there in (("interleaved", True), ("half", False)):
        config = decoder_config(encoding=encoding, encoding_options={"pairing": pairing}, **sizes)
        assert (Decoder(config).begin(TOKENS)[1].turn is not None) == there
    model = Decoder(decoder_config(encoding=encoding, **sizes)).double().eval()
    tokens, lengths = torch.randint(11, (3, 8)), torch.tensor([8, 5, 7])
    for positions in (None, torch.arange(8) + torch.tensor([[0], [3], [6]])):
        x, context = model.begin(tokens, lengths, positions)
        found, wanted = (model.replay(0, x, each) for each in (context, replace(context, turn=None, turned_by=None)))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        for part in (slice(1, 3), slice(0, 1)):
            torch.testing.assert_close(model.replay(0, x[part], context.part(part)), found[part], rtol=0, atol=1e-12)


def by_split(x: Tensor, heads: int) -> list[Tensor]:
    return [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in x.chunk(3, dim=-1)]


def test_the_parts_of_a_projection_are_those_of_a_split() -> None:
    """Without memory of their own, with their gradients, and under transforms."""
    x = torch.randn(2, 3, 3 * 2 * 2, dtype=torch.float64, requires_grad=True)
    for part, other in zip(fused_cpu.in_parts(x, 2), by_split(x, 2), strict=True):
        assert torch.equal(part, other)
        assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.autograd.gradcheck(lambda x: fused_cpu.in_parts(x, 2), x)
    found, wanted = (  # none of the keys
        torch.autograd.grad((q**2).sum() + v.sum(), x)[0] for q, _, v in (fused_cpu.in_parts(x, 2), by_split(x, 2))
    )
    assert torch.equal(found, wanted)
    mapped = torch.func.vmap(lambda each: fused_cpu.in_parts(each[None], 2)[1][0])(x)
    assert torch.equal(mapped, by_split(x, 2)[1])
