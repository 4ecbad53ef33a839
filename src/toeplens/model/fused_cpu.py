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

from toeplens.encodings.kit import FULL_PRECISION, is_in_transform
from toeplens.encodings.shapes import Keys, Queries

RotationFactors = Complex[Tensor, "*_B _N 1 #H n"]  # the factor of each pair of dimensions, at each position


def can_fuse(x: Tensor) -> bool:
    """Whether fused functions can be used for this input."""
    return (
        x.device.type == "cpu"
        and x.dtype in FULL_PRECISION
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not is_in_transform()
        and not _has_any_global_hook()
    )


def project_qkv(
    x: Float[Tensor, "B N d_model"],
    query_inputs: Float[Tensor, "B Nq d_model"],
    qkv: nn.Linear,
    heads: int,
    rotations: tuple[RotationFactors, RotationFactors] | None = None,
) -> tuple[Queries, Keys, Keys]:
    """Queries of ``query_inputs``, keys and values of ``x``; queries and keys rotated if ``rotations`` are given.

    Arguments
        qkv        projection to concatenated queries, keys and values, head by head
        rotations  rotation factors of the queries and keys, for adjacent pairs; modules are called as usual if the
                   factors need gradients, as for learned frequencies
    """
    q_factors, k_factors = rotations or (None, None)
    needs_grad = any(factors.requires_grad for factors in rotations or ())
    if can_fuse(x) and _is_standard(qkv) and not needs_grad:
        queries = None if query_inputs is x else query_inputs
        fused_qkv: Any = _ProjectRotate.apply(x, queries, qkv.weight, qkv.bias, heads, q_factors, k_factors)
        return fused_qkv
    if query_inputs is x:
        q, k, v = split_qkv(qkv(x), heads)
    else:
        q, k, v = _project_separately(x, query_inputs, qkv.weight, qkv.bias, heads)
    return (q, k, v) if rotations is None else (_rotate(q, q_factors), _rotate(k, k_factors), v)


def split_qkv(x: Float[Tensor, "B N width"], heads: int) -> tuple[Queries, Keys, Keys]:
    """Split the last dimension of ``x`` into queries, keys and values, head by head.

    The backward pass of torch's `split` copies the three gradients three times; that of `unbind` stacks them once.
    """
    q, k, v = x.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def norm_and_read(
    x: Float[Tensor, "B N d_model"], norm: nn.LayerNorm, read_positions: Int[Tensor, "B"]
) -> tuple[Float[Tensor, "B N d_model"], Float[Tensor, "B 1 d_model"], Float[Tensor, "B 1 d_model"]]:
    """``norm(x)``, and the rows of it and of ``x`` at one position of each sequence."""
    if can_fuse(x) and _is_standard(norm):
        fused_rows: Any = _ReadRows.apply(x, norm.weight, norm.bias, read_positions, norm.eps)
        return fused_rows
    normed = norm(x)
    return normed, select_rows(normed, read_positions), select_rows(x, read_positions)


def select_rows(x: Shaped[Tensor, "B N *_"], read_positions: Int[Tensor, "B"]) -> Shaped[Tensor, "B 1 *_"]:
    """One position of each sequence."""
    return x[torch.arange(len(read_positions), device=read_positions.device), read_positions].unsqueeze(1)


def finish_layer(
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
    can_apply = x.shape[:-1] == z.shape[:-1] and isinstance(activation, nn.ReLU)
    if not (can_apply and can_fuse(x) and all(map(_is_standard, (out, drop, norm, ffn, *ffn)))):
        x = x + drop(out(z))
        return x + ffn(norm(x))
    parameters = (norm.weight, norm.bias, first.weight, first.bias, last.weight, last.bias)
    fused_output: Tensor = _FinishLayer.apply(x, z, out.weight, out.bias, *parameters, norm.eps)  # type: ignore[assignment]
    return fused_output


def _is_standard(module: nn.Module) -> bool:
    """Whether a module is exactly of its class and has no hooks."""
    if type(module) is nn.Dropout:
        is_standard_class = not module.training or module.p == 0
    else:
        is_standard_class = type(module) in (nn.Linear, nn.LayerNorm, nn.ReLU, nn.Sequential)
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return is_standard_class and not hooks


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[rows, outputs]; the bias is added in place."""
    out = torch.mm(x, weight.t())
    return out if bias is None else out.add_(bias)


def _residual_linear(x: Tensor, inner: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.addmm(_rows(x), inner, weight.t()).view(x.shape)
    return _rows(x + bias).addmm_(inner, weight.t()).view(x.shape)


def _linear_grads(needs_grad: Sequence[bool], grad: Tensor, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a linear layer's weight and bias, both as products, which are faster than a sum over rows."""
    weight, bias = needs_grad
    return (
        torch.mm(grad.t(), x) if weight else None,
        torch.mm(grad.new_ones(1, len(grad)), grad).view(-1) if bias else None,
    )


def _rotate_in_place(x: Tensor, factors: Tensor) -> None:
    """Rotate vectors in the layout of a projection's output, [B, N, parts, H, d], in place."""
    torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)).mul_(factors)


def _rotate(x: Tensor, factors: Any) -> Tensor:
    pairs = torch.view_as_complex(x.transpose(1, 2).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * factors.squeeze(-3)).flatten(-2).transpose(1, 2)


def _project_separately(
    x: Tensor, query_inputs: Tensor, weight: Tensor, bias: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    width = len(weight) // 3
    q_bias, kv_bias = (None, None) if bias is None else (bias[:width], bias[width:])
    qkv = (F.linear(query_inputs, weight[:width], q_bias), *F.linear(x, weight[width:], kv_bias).split(width, dim=-1))
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv)
    return q, k, v


class _ProjectRotate(torch.autograd.Function):
    """Internally heads keep the layout of the projection's output, [B, N, parts, H, d], and are rotated in place."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        x, query_inputs, weight, bias, heads, q_factors, k_factors = inputs
        q_rows = 0 if query_inputs is None else len(weight) // 3  # rows of the weights for separate queries
        out = _linear(_rows(x), weight[q_rows:], None if bias is None else bias[q_rows:])
        out = out.view(*x.shape[:-1], -1, heads, weight.shape[0] // (3 * heads))
        if k_factors is not None:
            _rotate_in_place(out[:, :, :-1], k_factors)
        parts = out.permute(2, 0, 3, 1, 4).unbind(0)
        if query_inputs is not None:
            q_out = _linear(_rows(query_inputs), weight[:q_rows], None if bias is None else bias[:q_rows])
            q_out = q_out.view(*query_inputs.shape[:-1], 1, heads, -1)
            if q_factors is not None:
                _rotate_in_place(q_out, q_factors)
            parts = (q_out.squeeze(2).transpose(1, 2), *parts)
        ctx.save_for_backward(x, query_inputs, weight, q_factors, k_factors)
        ctx.heads = heads
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, query_inputs, weight, q_factors, k_factors = ctx.saved_tensors
        needs_x, needs_query, *needs_grad = ctx.needs_input_grad[:4]
        grad = _join_grads(grads if query_inputs is None else grads[1:], k_factors)
        if query_inputs is None:
            grad_x = torch.mm(grad, weight).view(x.shape) if needs_x else None
            return grad_x, None, *_linear_grads(needs_grad, grad, _rows(x)), None, None, None
        q_rows = len(weight) // 3
        grad_q = _join_grads(grads[:1], q_factors)
        grad_x = torch.mm(grad, weight[q_rows:]).view(x.shape) if needs_x else None
        grad_query = torch.mm(grad_q, weight[:q_rows]).view(query_inputs.shape) if needs_query else None
        query_grads = _linear_grads(needs_grad, grad_q, _rows(query_inputs))
        pairs = zip(query_grads, _linear_grads(needs_grad, grad, _rows(x)), strict=True)
        layer_grads = (None if a is None or b is None else torch.cat((a, b)) for a, b in pairs)
        return grad_x, grad_query, *layer_grads, None, None, None


class _ReadRows(torch.autograd.Function):
    """Gradients of the rows are added at their positions, without a zero tensor for each."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, scale, shift, read_positions, eps = inputs
        normed, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], scale, shift, eps)
        indices = torch.arange(0, x.shape[0] * x.shape[1], x.shape[1]).add_(read_positions)
        ctx.save_for_backward(x, scale, shift, mean, rstd, indices)
        ctx.eps = eps
        return normed, _rows(normed)[indices].unsqueeze(1), _rows(x)[indices].unsqueeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, scale, shift, mean, rstd, indices = ctx.saved_tensors
        grad, grad_normed, grad_rows = grads
        needs_grad, shape = [*ctx.needs_input_grad[:3]], x.shape[-1:]
        backward = torch.ops.aten.native_layer_norm_backward
        all_grads = backward(grad, x, shape, mean, rstd, scale, shift, needs_grad)
        x_rows, mean, rstd = (_rows(tensor)[indices].unsqueeze(1) for tensor in (x, mean, rstd))
        row_grads = backward(grad_normed, x_rows, shape, mean, rstd, scale, shift, needs_grad)
        if needs_grad[0]:
            _rows(all_grads[0]).index_add_(0, indices, _rows(row_grads[0].add_(grad_rows)))
        pairs = zip(all_grads[1:], row_grads[1:], needs_grad[1:], strict=True)
        norm_grads = (a + b if needs else None for a, b, needs in pairs)
        return all_grads[0] if needs_grad[0] else None, *norm_grads, None, None


def _join_grads(grads: tuple[Tensor, ...], factors: Tensor | None) -> Tensor:
    """The gradients of a projection's output in its layout, [rows, outputs], with queries and keys rotated back."""
    batch, heads, length, width = grads[0].shape
    joined = grads[0].new_empty(batch, length, len(grads), heads, width)
    for index, grad in enumerate(grads):
        joined[:, :, index] = grad.transpose(1, 2)
    if factors is not None:
        _rotate_in_place(joined[:, :, : max(1, len(grads) - 1)], factors.conj())
    return joined.view(batch * length, -1)


class _FinishLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, *parts: Any) -> Tensor:
        out, out_bias, scale, shift, first, first_bias, last, last_bias, ctx.eps = parts
        middle = _residual_linear(x, _rows(z), out, out_bias)
        normed, mean, rstd = torch.native_layer_norm(middle, x.shape[-1:], scale, shift, ctx.eps)
        hidden = _linear(_rows(normed), first, first_bias).relu_()
        ctx.save_for_backward(z, out, scale, shift, first, last, middle, normed, mean, rstd, hidden)
        return _residual_linear(middle, hidden, last, last_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        z, out, scale, shift, first, last, middle, normed, mean, rstd, hidden = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad
        grad = _rows(grads[0])
        grads_last = _linear_grads(needs_grad[8:10], grad, hidden)
        grad_hidden = torch.mm(grad, last)
        torch.ops.aten.threshold_backward.grad_input(grad_hidden, hidden, 0, grad_input=grad_hidden)
        grads_first = _linear_grads(needs_grad[6:8], grad_hidden, _rows(normed))
        if not any(needs_grad[:6]):
            return None, None, None, None, None, None, *grads_first, *grads_last, None
        grad_normed = torch.mm(grad_hidden, first).view(middle.shape)
        grad_x, grad_scale, grad_shift = torch.ops.aten.native_layer_norm_backward(
            grad_normed, middle, middle.shape[-1:], mean, rstd, scale, shift, [True, *needs_grad[4:6]]
        )
        rows = _rows(grad_x.add_(grads[0]))
        grad_z = torch.mm(rows, out).view(z.shape) if needs_grad[1] else None
        grads_out = _linear_grads(needs_grad[2:4], rows, _rows(z))
        grad_x = grad_x if needs_grad[0] else None
        return grad_x, grad_z, *grads_out, grad_scale, grad_shift, *grads_first, *grads_last, None
