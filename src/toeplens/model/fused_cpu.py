"""Fused CPU versions of parts of a layer, each as one autograd function.

On a CPU, memory traffic between matrix products costs as much as the products: biases copied to every token before an
addition, gradients concatenated, activations stored next to their inputs. These functions compute the same as the
modules they are given, with the same first derivatives, but without that traffic. The modules are called as usual on a
GPU, under a compiler, transform, autocast, hooks or dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Complex, Float, Int, Shaped
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from toeplens.encodings.kit import PRECISE, is_mapped
from toeplens.encodings.shapes import Keys, Queries

Turn = Complex[Tensor, "*_B _N 1 #H n"]  # the factor of each pair of dimensions, at each position


def takes_steps(x: Tensor) -> bool:
    """Whether fused functions can be used for this input."""
    return (
        x.device.type == "cpu"
        and x.dtype in PRECISE
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not is_mapped()
        and not _has_any_global_hook()
    )


def projected(
    x: Float[Tensor, "B N d_model"],
    asking: Float[Tensor, "B Nq d_model"],
    qkv: nn.Linear,
    heads: int,
    turns: tuple[Turn, Turn] | None = None,
) -> tuple[Queries, Keys, Keys]:
    """Queries of ``asking``, keys and values of ``x``; queries and keys rotated if ``turns`` are given.

    Arguments
        qkv    projection to concatenated queries, keys and values, head by head
        turns  rotation factors of the queries and keys, for adjacent pairs; modules are called as usual if the factors
               need gradients, as for learned frequencies
    """
    of_q, of_k = turns or (None, None)
    learned = any(turn.requires_grad for turn in turns or ())
    if takes_steps(x) and _is_untouched(qkv) and not learned:
        found: Any = _Projected.apply(x, None if asking is x else asking, qkv.weight, qkv.bias, heads, of_q, of_k)
        return found
    if asking is x:
        q, k, v = in_parts(qkv(x), heads)
    else:
        q, k, v = _apart(x, asking, qkv.weight, qkv.bias, heads)
    return (q, k, v) if turns is None else (_turned(q, of_q), _turned(k, of_k), v)


def in_parts(x: Float[Tensor, "B N width"], heads: int) -> tuple[Queries, Keys, Keys]:
    """Split the last dimension of ``x`` into queries, keys and values, head by head.

    The backward pass of torch's `split` copies the three gradients three times; that of `unbind` stacks them once.
    """
    q, k, v = x.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def read_at(
    x: Float[Tensor, "B N d_model"], norm: nn.LayerNorm, read: Int[Tensor, "B"]
) -> tuple[Float[Tensor, "B N d_model"], Float[Tensor, "B 1 d_model"], Float[Tensor, "B 1 d_model"]]:
    """``norm(x)``, and the rows of it and of ``x`` at one position of each sequence."""
    if takes_steps(x) and _is_untouched(norm):
        found: Any = _Read.apply(x, norm.weight, norm.bias, read, norm.eps)
        return found
    normed = norm(x)
    return normed, row_at(normed, read), row_at(x, read)


def row_at(x: Shaped[Tensor, "B N *_"], read: Int[Tensor, "B"]) -> Shaped[Tensor, "B 1 *_"]:
    """One position of each sequence."""
    return x[torch.arange(len(read), device=read.device), read].unsqueeze(1)


def finished(
    x: Float[Tensor, "*B d_model"],
    z: Float[Tensor, "*B inner"],
    out: nn.Linear,
    drop: nn.Dropout,
    norm: nn.LayerNorm,
    ffn: nn.Sequential,
) -> Float[Tensor, "*B d_model"]:
    """``y + ffn(norm(y))`` for ``y = x + drop(out(z))``.

    Fused if ``ffn`` is a linear layer, ReLU, dropout, a linear layer, dropout.
    """
    first, activation, *_, last, _ = ffn
    alike = x.shape[:-1] == z.shape[:-1] and isinstance(activation, nn.ReLU)
    if not (alike and takes_steps(x) and all(map(_is_untouched, (out, drop, norm, ffn, *ffn)))):
        x = x + drop(out(z))
        return x + ffn(norm(x))
    parts = (norm.weight, norm.bias, first.weight, first.bias, last.weight, last.bias)
    found: Tensor = _Finished.apply(x, z, out.weight, out.bias, *parts, norm.eps)  # type: ignore[assignment]
    return found


def _is_untouched(module: nn.Module) -> bool:
    """Whether a module is exactly of its class and has no hooks."""
    if type(module) is nn.Dropout:
        idle = not module.training or module.p == 0
    else:
        idle = type(module) in (nn.Linear, nn.LayerNorm, nn.ReLU, nn.Sequential)
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return idle and not hooks


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[rows, outputs]; the bias is added in place."""
    made = torch.mm(x, weight.t())
    return made if bias is None else made.add_(bias)


def _onto(x: Tensor, inner: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.addmm(_rows(x), inner, weight.t()).view(x.shape)
    return _rows(x + bias).addmm_(inner, weight.t()).view(x.shape)


def _of_linear(wanted: Sequence[bool], grad: Tensor, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a linear layer's weight and bias, both as products, which are faster than a sum over rows."""
    weight, bias = wanted
    return (
        torch.mm(grad.t(), x) if weight else None,
        torch.mm(grad.new_ones(1, len(grad)), grad).view(-1) if bias else None,
    )


def _turn_in_place(made: Tensor, turn: Tensor) -> None:
    """Rotate vectors in the layout of a projection's output, [B, N, parts, H, d], in place."""
    torch.view_as_complex(made.view(*made.shape[:-1], -1, 2)).mul_(turn)


def _turned(x: Tensor, turn: Any) -> Tensor:
    pairs = torch.view_as_complex(x.transpose(1, 2).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn.squeeze(-3)).flatten(-2).transpose(1, 2)


def _apart(x: Tensor, asking: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    width = len(weight) // 3
    of_q, of_rest = (None, None) if bias is None else (bias[:width], bias[width:])
    made = (F.linear(asking, weight[:width], of_q), *F.linear(x, weight[width:], of_rest).split(width, dim=-1))
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in made)
    return q, k, v


class _Projected(torch.autograd.Function):
    """Internally heads keep the layout of the projection's output, [B, N, parts, H, d], and are rotated in place."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        x, asking, weight, bias, heads, of_q, of_k = inputs
        apart = 0 if asking is None else len(weight) // 3  # rows of the weights for separate queries
        made = _linear(_rows(x), weight[apart:], None if bias is None else bias[apart:])
        made = made.view(*x.shape[:-1], -1, heads, weight.shape[0] // (3 * heads))
        if of_k is not None:
            _turn_in_place(made[:, :, :-1], of_k)
        parts = made.permute(2, 0, 3, 1, 4).unbind(0)
        if asking is not None:
            own = _linear(_rows(asking), weight[:apart], None if bias is None else bias[:apart])
            own = own.view(*asking.shape[:-1], 1, heads, -1)
            if of_q is not None:
                _turn_in_place(own, of_q)
            parts = (own.squeeze(2).transpose(1, 2), *parts)
        ctx.save_for_backward(x, asking, weight, of_q, of_k)
        ctx.heads = heads
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, asking, weight, of_q, of_k = ctx.saved_tensors
        to_x, to_asking, *wanted = ctx.needs_input_grad[:4]
        whole = _side_by_side(grads if asking is None else grads[1:], of_k)
        if asking is None:
            of_x = torch.mm(whole, weight).view(x.shape) if to_x else None
            return of_x, None, *_of_linear(wanted, whole, _rows(x)), None, None, None
        apart = len(weight) // 3
        own = _side_by_side(grads[:1], of_q)
        of_x = torch.mm(whole, weight[apart:]).view(x.shape) if to_x else None
        of_asking = torch.mm(own, weight[:apart]).view(asking.shape) if to_asking else None
        each = zip(_of_linear(wanted, own, _rows(asking)), _of_linear(wanted, whole, _rows(x)), strict=True)
        of_layer = (None if a is None or b is None else torch.cat((a, b)) for a, b in each)
        return of_x, of_asking, *of_layer, None, None, None


class _Read(torch.autograd.Function):
    """Gradients of the rows are added at their positions, without a zero tensor for each."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, scale, shift, read, eps = inputs
        normed, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], scale, shift, eps)
        at = torch.arange(0, x.shape[0] * x.shape[1], x.shape[1]).add_(read)
        ctx.save_for_backward(x, scale, shift, mean, rstd, at)
        ctx.eps = eps
        return normed, _rows(normed)[at].unsqueeze(1), _rows(x)[at].unsqueeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, scale, shift, mean, rstd, at = ctx.saved_tensors
        whole, of_normed, of_rows = grads
        wanted, shape = [*ctx.needs_input_grad[:3]], x.shape[-1:]
        backward = torch.ops.aten.native_layer_norm_backward
        of_all = backward(whole, x, shape, mean, rstd, scale, shift, wanted)
        there, mean, rstd = (_rows(each)[at].unsqueeze(1) for each in (x, mean, rstd))
        of_few = backward(of_normed, there, shape, mean, rstd, scale, shift, wanted)
        if wanted[0]:
            _rows(of_all[0]).index_add_(0, at, _rows(of_few[0].add_(of_rows)))
        rest = (a + b if needs else None for a, b, needs in zip(of_all[1:], of_few[1:], wanted[1:], strict=True))
        return of_all[0] if wanted[0] else None, *rest, None, None


def _side_by_side(grads: tuple[Tensor, ...], turn: Tensor | None) -> Tensor:
    """The gradients of a projection's output in its layout, [rows, outputs], with queries and keys rotated back."""
    batch, heads, length, width = grads[0].shape
    whole = grads[0].new_empty(batch, length, len(grads), heads, width)
    for place, grad in enumerate(grads):
        whole[:, :, place] = grad.transpose(1, 2)
    if turn is not None:
        _turn_in_place(whole[:, :, : max(1, len(grads) - 1)], turn.conj())
    return whole.view(batch * length, -1)


class _Finished(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, *parts: Any) -> Tensor:
        out, out_bias, scale, shift, first, first_bias, last, last_bias, ctx.eps = parts
        middle = _onto(x, _rows(z), out, out_bias)
        normed, mean, rstd = torch.native_layer_norm(middle, x.shape[-1:], scale, shift, ctx.eps)
        hidden = _linear(_rows(normed), first, first_bias).relu_()
        ctx.save_for_backward(z, out, scale, shift, first, last, middle, normed, mean, rstd, hidden)
        return _onto(middle, hidden, last, last_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        z, out, scale, shift, first, last, middle, normed, mean, rstd, hidden = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        grad = _rows(grads[0])
        of_last = _of_linear(wanted[8:10], grad, hidden)
        of_hidden = torch.mm(grad, last)
        torch.ops.aten.threshold_backward.grad_input(of_hidden, hidden, 0, grad_input=of_hidden)
        of_first = _of_linear(wanted[6:8], of_hidden, _rows(normed))
        if not any(wanted[:6]):
            return None, None, None, None, None, None, *of_first, *of_last, None
        of_normed = torch.mm(of_hidden, first).view(middle.shape)
        of_x, of_scale, of_shift = torch.ops.aten.native_layer_norm_backward(
            of_normed, middle, middle.shape[-1:], mean, rstd, scale, shift, [True, *wanted[4:6]]
        )
        rows = _rows(of_x.add_(grads[0]))
        of_z = torch.mm(rows, out).view(z.shape) if wanted[1] else None
        of_out = _of_linear(wanted[2:4], rows, _rows(z))
        return of_x if wanted[0] else None, of_z, *of_out, of_scale, of_shift, *of_first, *of_last, None
