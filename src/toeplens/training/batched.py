"""Batched training of models of equal shape: their weights are in one block, and each product covers all models."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

from toeplens.model import Decoder
from toeplens.training.batches import IGNORED, is_correct, loss_of, micro_batch_size, to_float32
from toeplens.training.run import initial_model
from toeplens.training.spec import RunSpec
from toeplens.utils import InputError

_GPU_TOKENS = 2**17  # tokens per step that fill a GPU
_MIN_GPU_MODELS = 16  # if a GPU holds at least this many models, a step of one is mostly launches
_MAX_WEIGHTS = 2**31  # maximum number of attention weights that a stack's layers keep explicitly
_ALIGNMENT = 64  # parameters begin at multiples of this number of elements
_DROPOUT_STREAM = 1  # keeps the random numbers of dropout apart from others of the same seed and step
_WARM_UP = 3  # passes before the capture of a CUDA graph, as torch recommends

Session = Any  # `toeplens.training.loop.Session`, whose module imports this one

_MODULE_ATTRIBUTES = set(vars(nn.Module()))  # attributes

# spec fields that are per-model numbers, or only affect the evaluation schedule
_MODEL_FIELDS = ("model", "lr", "weight_decay", "betas", "warmup", "schedule", "seed", "data_seed")
_SCHEDULE_FIELDS = ("epochs", "evaluations", "plateau", "test_examples")


def shape_of(spec: RunSpec) -> tuple[Any, ...]:
    """What runs must share to be trained as one, as far as their specs tell."""
    fields = spec.model_dump(mode="json", exclude={*_MODEL_FIELDS, *_SCHEDULE_FIELDS})
    model = spec.model.model_dump(mode="json", exclude={"encoding_options", "input_encoding_options"})
    return repr(sorted(fields.items())), repr(sorted(model.items()))


def check_batchable(specs: Sequence[RunSpec]) -> None:
    """Raise an `InputError` with the reason unless the models of these specs can be trained as one.

    Specs may differ only in seeds, in the optimiser's numbers, in the evaluation schedule, and in what an
    encoding stores as tensors (RoPE's base, ALiBi's slopes). Except for dropout, training must not draw random numbers.
    """
    first = specs[0]
    for spec in specs[1:]:
        if shape_of(spec) != shape_of(first):
            raise InputError(f"stack: runs {first.name} and {spec.name} must differ only in seeds and rates.")
    with torch.random.fork_rng(devices=[]):
        models = [initial_model(spec) for spec in {spec.model.model_dump_json(): spec for spec in specs}.values()]
        if any(_structure(model) != _structure(models[0]) for model in models[1:]):
            raise InputError(
                f"stack: encoding {first.model.encoding!r} must be the same in all models, except for its tensors."
            )
        _check_vmap(first, models[0])


def models_per_gpu(spec: RunSpec) -> int:
    """How many models of this shape fill a GPU and fit in its memory with their attention weights."""
    length, model = spec.build_task().length, spec.model
    weights = spec.batch_size * model.num_heads * model.num_layers * length**2
    return min(_GPU_TOKENS // (spec.batch_size * length), _MAX_WEIGHTS // weights)


def is_launch_bound(spec: RunSpec, device: torch.device) -> bool:
    """Whether one model is best trained as a stack of one: on a GPU that it leaves mostly idle."""
    if device.type != "cuda" or models_per_gpu(spec) < _MIN_GPU_MODELS:
        return False
    try:
        check_batchable([spec])
    except InputError:
        return False
    return True


def _structure(model: Decoder) -> list[Any]:
    """All that two models must share: everything but the values of parameters and buffers."""
    modules = []
    for name, module in model.named_modules():
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        shapes = [(tensor_name, tensor.shape, tensor.dtype, tensor.requires_grad) for tensor_name, tensor in tensors]
        others = {
            key: value.tolist() if isinstance(value, (Tensor, np.ndarray)) else value
            for key, value in vars(module).items()
            if key not in _MODULE_ATTRIBUTES and key != "config"
        }
        modules.append((name, type(module), shapes, repr(sorted(others.items()))))
    return modules


def _check_vmap(spec: RunSpec, model: Decoder) -> None:
    """Forward and backward pass of two copies on two sequences; raises unless it works and agrees with one model."""
    if not all(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("stack: models with frozen parameters cannot be stacked.")
    if len({parameter.dtype for parameter in model.parameters()}) > 1:
        raise InputError("stack: models with parameters of several dtypes cannot be stacked.")
    task = spec.build_task()
    examples = task.dataset("train", min(2, spec.train_examples), spec.data_seed)
    tokens, lengths = torch.from_numpy(examples.tokens), torch.from_numpy(examples.lengths)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    other_state = _tensors_of(other)
    state = {name: torch.stack((tensor, other_state[name])).detach() for name, tensor in _tensors_of(model).items()}
    trained = [state[name].requires_grad_() for name, _ in model.named_parameters()]
    try:
        with _Dropout():
            outputs = vmap(lambda tensors: _call(model, tensors, tokens, lengths))(state)
        grads = torch.autograd.grad(outputs.sum(), trained, allow_unused=True)
    except Exception as error:
        raise InputError(
            f"stack: models with encoding {spec.model.encoding!r} cannot be stacked "
            f"({str(error).splitlines()[0][:120]})."
        ) from None
    if any(grad is None for grad in grads):
        raise InputError("stack: models with unused parameters cannot be stacked.")
    with torch.no_grad(), _Dropout():
        expected = torch.stack([decoder(tokens, lengths, fused=False) for decoder in (model, other)])
    if not torch.allclose(outputs, expected, rtol=1e-3, atol=1e-4):
        raise InputError(f"stack: models with encoding {spec.model.encoding!r} give other outputs in a stack.")


def _call(model: nn.Module, state: dict[str, Tensor], tokens: Tensor, lengths: Tensor | None) -> Tensor:
    logits: Tensor = functional_call(model, state, (tokens, lengths), tie_weights=False)  # shared tensors have one name
    return logits


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class _Dropout(TorchFunctionMode):
    """Replaces dropout by masks that were drawn before the pass; without masks it records their shapes and rates."""

    def __init__(self, masks: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self.masks, self.draws = masks, list[tuple[torch.Size, float]]()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._drop(*args, **(kwargs or {})) if func is F.dropout else func(*args, **(kwargs or {}))

    def _drop(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not p:
            return x
        self.draws.append((x.shape, p))
        return x if self.masks is None else x * self.masks[len(self.draws) - 1] / (1 - p)


class BatchedSessions:
    """Sessions at the same step with parameters, EMAs and AdamW moments in shared blocks.

    A session's model remains a separate model; its parameters are rows of the stack's blocks.
    """

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.sessions = list(sessions)
        first = self.first = sessions[0]
        self.device = first.execution.device
        self.template = first.model
        named = dict(first.model.named_parameters())
        self.slices: dict[str, slice] = {}
        width = 0
        for name, parameter in named.items():
            self.slices[name] = slice(width, width + parameter.numel())
            width += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        count, dtype = len(sessions), next(iter(named.values())).dtype
        self.weights = torch.zeros(count, width, dtype=dtype, device=self.device)
        self.grads, self.mean, self.square = (torch.zeros_like(self.weights) for _ in range(3))
        self.ema_weights = torch.zeros_like(self.weights) if first.ema is not None else None
        self.sums = torch.stack([session.sums for session in sessions])
        self.steps = [torch.tensor(float(first.step), device=self.device) for _ in sessions]
        for row, session in enumerate(sessions):
            self._move_into_blocks(row, session)
        self.params = {name: self._view(self.weights, cols, named[name]) for name, cols in self.slices.items()}
        self.param_grads = [self._view(self.grads, cols, named[name]).detach() for name, cols in self.slices.items()]
        first_buffers, *others = buffers = [dict(session.model.named_buffers()) for session in sessions]
        same = {name for name, x in first_buffers.items() if all(torch.equal(x, other[name]) for other in others)}
        self.shared = {name: first_buffers[name] for name in same}
        self.buffers = {name: torch.stack([each[name] for each in buffers]) for name in first_buffers.keys() - same}
        self.optimizer = self._optimizer()
        self.micro_batch_size = micro_batch_size(first.spec, first.train.tokens.shape[1], self.device)
        self.tokens = torch.stack([session.train.tokens for session in sessions])
        self.labels = torch.stack([session.train.labels for session in sessions])
        lengths = [session.train.lengths for session in sessions]
        full = self.tokens.shape[-1]
        self.lengths = None
        if any(x is not None for x in lengths):
            self.lengths = torch.stack(
                [self.tokens.new_full(self.tokens.shape[1:2], full) if x is None else x for x in lengths]
            )
        self.rows = torch.zeros(count, first.spec.batch_size, dtype=torch.long, device=self.device)
        self.model_index = torch.arange(count, device=self.device).unsqueeze(1)
        self.ema_rate = torch.zeros(count, 1, dtype=self.weights.dtype, device=self.device)
        self.has_dropout = bool(first.spec.model.dropout and first.spec.model.dropout_on)
        self.masks: dict[int, list[list[Tensor]]] = {}  # by examples per step: masks of each micro-batch
        self.rates: list[float] = []  # of the masks
        self.graph: torch.cuda.CUDAGraph | None = None
        self.can_capture = self.device.type == "cuda"

    def _move_into_blocks(self, row: int, session: Session) -> None:
        """Make the session's tensors rows of the stack's blocks."""
        session.sums = self.sums[row]
        states = session.optimizer.state
        with torch.no_grad():
            for name, parameter in session.model.named_parameters():
                cols, shape = self.slices[name], parameter.shape
                state = states.get(parameter, {})
                rows = {"exp_avg": self.mean[row, cols], "exp_avg_sq": self.square[row, cols]}
                for key, block in rows.items():
                    if key in state:
                        block.copy_(state[key].flatten())
                states[parameter] = {"step": self.steps[row], **{key: block.view(shape) for key, block in rows.items()}}
                self.weights[row, cols] = parameter.flatten()
                parameter.data = self.weights[row, cols].view(shape)
                parameter.grad = None
            if self.ema_weights is not None:
                assert session.ema is not None
                for name, parameter in session.ema.model.named_parameters():
                    self.ema_weights[row, self.slices[name]] = parameter.flatten()
                    parameter.data = self.ema_weights[row, self.slices[name]].view(parameter.shape)

    def _view(self, block: Tensor, cols: slice, parameter: Tensor) -> nn.Parameter:
        return nn.Parameter(block[:, cols].view(len(block), *parameter.shape), requires_grad=parameter.requires_grad)

    def _optimizer(self) -> torch.optim.Optimizer:
        """AdamW on the rows, with one parameter group per setting."""
        groups: dict[Any, dict[str, Any]] = {}
        on_gpu = self.device.type == "cuda"
        state = {}
        for row, session in enumerate(self.sessions):
            spec = session.spec
            key = (spec.lr, spec.warmup, spec.schedule, spec.total_steps, spec.betas, spec.weight_decay)
            rate = torch.tensor(spec.lr, device=self.device) if on_gpu else spec.lr
            settings = {"lr": rate, "betas": spec.betas, "weight_decay": spec.weight_decay}
            group = groups.setdefault(key, {**settings, "rate": session.learning_rate, "params": []})
            block = nn.Parameter(self.weights[row])
            block.grad = self.grads[row]
            group["params"].append(block)
            state[block] = {"step": self.steps[row], "exp_avg": self.mean[row], "exp_avg_sq": self.square[row]}
        optimizer = torch.optim.AdamW(list(groups.values()), fused=True, capturable=on_gpu)
        optimizer.state.update(state)
        return optimizer

    def take_step(self) -> None:
        """One training step of all models."""
        step = self.first.step
        rows = torch.stack([session.rows_of_step() for session in self.sessions])
        for group in self.optimizer.param_groups:
            rate = group["rate"](step)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self.ema_weights is not None:
            rates = {session.ema.update_rate(step + 1) for session in self.sessions if session.ema is not None}
            assert len(rates) == 1
            self.ema_rate.fill_(rates.pop())
        if self.has_dropout:
            self._draw_masks(rows)
        graph = self._graph_for(rows)
        if graph is not None:
            graph.replay()
        else:
            self._backward(rows)
            self._update()
        for session in self.sessions:
            session.step += 1

    def _draw_masks(self, rows: Tensor) -> None:
        """Draw the masks of a step: those of a model depend on its seed and the step, not on the other models."""
        count = rows.shape[1]
        if count not in self.masks:
            self.masks[count] = []
            for batch in self._micro_batches(rows):
                with torch.no_grad(), _Dropout() as recorded:
                    self._losses(batch)
                blocks = [torch.empty(len(rows), *x, dtype=torch.bool, device=self.device) for x, _ in recorded.draws]
                self.masks[count].append(blocks)
                self.rates = [rate for _, rate in recorded.draws]
        for row, session in enumerate(self.sessions):
            seed = np.random.SeedSequence((session.spec.seed, _DROPOUT_STREAM, session.step)).generate_state(1)[0]
            generator = torch.Generator(self.device).manual_seed(int(seed))
            for blocks in self.masks[count]:
                for block, rate in zip(blocks, self.rates, strict=True):
                    block[row].bernoulli_(1 - rate, generator=generator)

    def _graph_for(self, rows: Tensor) -> torch.cuda.CUDAGraph | None:
        """A function that performs a whole step on these rows, as a CUDA graph if possible."""
        if not self.can_capture or rows.shape != self.rows.shape:
            return None
        self.rows.copy_(rows)
        if self.graph is None:
            try:
                self.graph = self._capture_step()
            except RuntimeError:  # an encoding must synchronise with the GPU
                torch.cuda.synchronize(self.device)
                self.can_capture = False
        return self.graph

    def _capture_step(self) -> torch.cuda.CUDAGraph:
        """The step as a CUDA graph, because a small model's step is mostly launches."""
        sums = self.sums.clone()
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side_stream):
                for _ in range(_WARM_UP):
                    self._backward(self.rows)
        finally:
            torch.cuda.current_stream().wait_stream(side_stream)
            self.sums.copy_(sums)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._backward(self.rows)
            self._update()
        return graph

    def _backward(self, rows: Tensor) -> None:
        """The gradients for each model's examples."""
        params = list(self.params.values())
        batches = self._micro_batches(rows)
        counted = torch.stack([(labels != IGNORED).flatten(1).sum(1) for _, labels, _ in batches]).sum(0)
        masks = self.masks[rows.shape[1]] if self.has_dropout else [[]] * len(batches)
        # gradients add up to those of the whole batch
        for index, (batch, drops) in enumerate(zip(batches, masks, strict=True)):
            loss, hits = self._losses(batch, drops)
            grads = torch.autograd.grad((loss / counted.clamp(min=1)).sum(), params)
            for total, grad in zip(self.param_grads, grads, strict=True):
                if index:
                    total += grad
                else:
                    total.copy_(grad)
            self.sums[:, 0] += loss.detach().double()
            self.sums[:, 1] += hits.double()
        self.sums[:, 2] += counted

    def _micro_batches(self, rows: Tensor) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Tokens, labels and lengths of each model's examples, in parts that are passed at once."""
        data = [None if x is None else x[self.model_index, rows] for x in (self.tokens, self.labels, self.lengths)]
        starts = range(0, rows.shape[1], self.micro_batch_size)
        chunks = (slice(start, start + self.micro_batch_size) for start in starts)
        return [tuple(None if x is None else x[:, chunk] for x in data) for chunk in chunks]  # type: ignore[misc]

    def _losses(
        self, batch: tuple[Tensor, Tensor, Tensor | None], masks: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor]:
        """Each model's summed loss, and how many of its predictions are correct."""
        self.template.train()
        in_dims = (0, 0, 0, 0, None if batch[2] is None else 0, 0)
        losses: tuple[Tensor, Tensor] = vmap(self._loss, in_dims=in_dims)(
            self.params, self.buffers, *batch, list(masks)
        )
        return losses

    @torch.no_grad()
    def _update(self) -> None:
        self.optimizer.step()
        if self.ema_weights is not None:
            self.ema_weights.lerp_(self.weights, self.ema_rate)

    def _loss(
        self,
        params: dict[str, nn.Parameter],
        buffers: dict[str, Tensor],
        tokens: Tensor,
        labels: Tensor,
        lengths: Tensor | None,
        masks: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        with self.first.amp(), _Dropout(masks) if masks else nullcontext():
            logits = _call(self.template, {**self.shared, **params, **buffers}, tokens, lengths)
        logits = to_float32(logits)
        return loss_of(logits, labels), is_correct(logits.detach(), labels).sum()
