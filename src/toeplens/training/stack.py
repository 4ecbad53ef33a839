"""Batched training of models of equal shape: their weights are in one block, and each product covers all models."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from toeplens.ground import InputError
from toeplens.model import Decoder
from toeplens.training.batches import IGNORED, correct, loss_of, precise, texts_at_once
from toeplens.training.run import initial_model
from toeplens.training.spec import RunSpec

_FULL = 2**17  # tokens per step that fill a GPU
_LAUNCHES = 16  # if a GPU holds at least this many models, a step of one is mostly launches
_WEIGHTS = 2**31  # maximum number of attention weights that a stack's layers keep explicitly
_ALIGNED = 64  # parameters begin at multiples of this number of elements
_WARM_UP = 3  # passes before the capture of a CUDA graph, as torch recommends

Session = Any  # `toeplens.training.loop.Session`, whose module imports this one

_ANY_MODULES = set(vars(nn.Module()))  # attributes

# spec fields that are per-model numbers, or only affect the evaluation schedule
_OWN = ("model", "lr", "weight_decay", "betas", "warmup", "schedule", "seed", "data_seed")
_OWN_TOO = ("epochs", "evaluations", "plateau", "test_examples")


def shape_of(spec: RunSpec) -> tuple[Any, ...]:
    """What runs must share to be trained as one, as far as their specs tell."""
    told = spec.model_dump(mode="json", exclude={*_OWN, *_OWN_TOO})
    model = spec.model.model_dump(mode="json", exclude={"encoding_options", "input_encoding_options"})
    return repr(sorted(told.items())), repr(sorted(model.items()))


def must_stack(specs: Sequence[RunSpec]) -> None:
    """Raise an `InputError` with the reason unless the models of these specs can be trained as one.

    Specs may differ only in seeds, in the optimiser's numbers, in the evaluation schedule, and in what an
    encoding stores as tensors (RoPE's base, ALiBi's slopes). Training must not draw random numbers (dropout), which
    would differ from those of a separate run.
    """
    first = specs[0]
    for spec in specs[1:]:
        if shape_of(spec) != shape_of(first):
            raise InputError(f"stack: runs {first.name} and {spec.name} must differ only in seeds and rates.")
    if first.model.dropout and first.model.dropout_on:
        raise InputError(
            f"stack: models with dropout ({first.model.dropout:g}) cannot be stacked, as they would draw other random "
            "numbers."
        )
    with torch.random.fork_rng(devices=[]):
        models = [initial_model(spec) for spec in {spec.model.model_dump_json(): spec for spec in specs}.values()]
        if any(_structure(model) != _structure(models[0]) for model in models[1:]):
            raise InputError(
                f"stack: encoding {first.model.encoding!r} must be the same in all models, except for its tensors."
            )
        _try_out(first, models[0])


def that_fill_a_gpu(spec: RunSpec) -> int:
    """How many models of this shape fill a GPU and fit in its memory with their attention weights."""
    length, model = spec.build_task().length, spec.model
    weights = spec.batch_size * model.num_heads * model.num_layers * length**2
    return min(_FULL // (spec.batch_size * length), _WEIGHTS // weights)


def pays_alone(spec: RunSpec, device: torch.device) -> bool:
    """Whether one model is best trained as a stack of one: on a GPU that it leaves mostly idle."""
    if device.type != "cuda" or that_fill_a_gpu(spec) < _LAUNCHES:
        return False
    try:
        must_stack([spec])
    except InputError:
        return False
    return True


def _structure(model: Decoder) -> list[Any]:
    """All that two models must share: everything but the values of parameters and buffers."""
    found = []
    for name, module in model.named_modules():
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        shapes = [(own, tensor.shape, tensor.dtype, tensor.requires_grad) for own, tensor in tensors]
        others = {
            key: value.tolist() if isinstance(value, (Tensor, np.ndarray)) else value
            for key, value in vars(module).items()
            if key not in _ANY_MODULES and key != "config"
        }
        found.append((name, type(module), shapes, repr(sorted(others.items()))))
    return found


def _try_out(spec: RunSpec, model: Decoder) -> None:
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
    theirs = _state(other)
    state = {name: torch.stack((tensor, theirs[name])).detach() for name, tensor in _state(model).items()}
    trained = [state[name].requires_grad_() for name, _ in model.named_parameters()]
    try:
        found = vmap(lambda own: _call(model, own, tokens, lengths))(state)
        grads = torch.autograd.grad(found.sum(), trained, allow_unused=True)
    except Exception as error:
        raise InputError(
            f"stack: models with encoding {spec.model.encoding!r} cannot be stacked "
            f"({str(error).splitlines()[0][:120]})."
        ) from None
    if any(grad is None for grad in grads):
        raise InputError("stack: models with unused parameters cannot be stacked.")
    with torch.no_grad():
        alone = torch.stack([each(tokens, lengths) for each in (model, other)])
    if not torch.allclose(found, alone, rtol=1e-3, atol=1e-4):
        raise InputError(f"stack: models with encoding {spec.model.encoding!r} give other outputs in a stack.")


def _call(model: nn.Module, state: dict[str, Tensor], tokens: Tensor, lengths: Tensor | None) -> Tensor:
    found: Tensor = functional_call(model, state, (tokens, lengths), tie_weights=False)  # shared tensors have one name
    return found


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class Stack:
    """Sessions at the same step with parameters, EMAs and AdamW moments in shared blocks.

    A session's model remains a separate model; its parameters are rows of the stack's blocks.
    """

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.sessions = list(sessions)
        first = self.first = sessions[0]
        self.device = first.execution.device
        self.template = first.model
        named = dict(first.model.named_parameters())
        self.places: dict[str, slice] = {}
        width = 0
        for name, parameter in named.items():
            self.places[name] = slice(width, width + parameter.numel())
            width += -(-parameter.numel() // _ALIGNED) * _ALIGNED
        many, dtype = len(sessions), next(iter(named.values())).dtype
        self.flat = torch.zeros(many, width, dtype=dtype, device=self.device)
        self.grads, self.mean, self.square = (torch.zeros_like(self.flat) for _ in range(3))
        self.averages = torch.zeros_like(self.flat) if first.average is not None else None
        self.sums = torch.stack([session.sums for session in sessions])
        self.steps = [torch.tensor(float(first.step), device=self.device) for _ in sessions]
        for row, session in enumerate(sessions):
            self._take_in(row, session)
        self.params = {name: self._whole(self.flat, place, named[name]) for name, place in self.places.items()}
        self.own_grads = [self._whole(self.grads, place, named[name]).detach() for name, place in self.places.items()]
        each = [dict(session.model.named_buffers()) for session in sessions]
        same = {name for name, own in each[0].items() if all(torch.equal(own, other[name]) for other in each[1:])}
        self.shared = {name: each[0][name] for name in same}
        self.buffers = {name: torch.stack([other[name] for other in each]) for name in each[0].keys() - same}
        self.optimizer = self._optimizer()
        self.size = texts_at_once(first.spec, first.train.tokens.shape[1], self.device)
        self.tokens = torch.stack([session.train.tokens for session in sessions])
        self.labels = torch.stack([session.train.labels for session in sessions])
        lengths = [session.train.lengths for session in sessions]
        full = self.tokens.shape[-1]
        self.lengths = None
        if any(each is not None for each in lengths):
            self.lengths = torch.stack(
                [self.tokens.new_full(self.tokens.shape[1:2], full) if each is None else each for each in lengths]
            )
        self.rows = torch.zeros(many, first.spec.batch_size, dtype=torch.long, device=self.device)
        self.each = torch.arange(many, device=self.device).unsqueeze(1)
        self.share = torch.zeros(many, 1, dtype=self.flat.dtype, device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.captures = self.device.type == "cuda"

    def _take_in(self, row: int, session: Session) -> None:
        """Make the session's tensors rows of the stack's blocks."""
        session.sums = self.sums[row]
        had = session.optimizer.state
        with torch.no_grad():
            for name, parameter in session.model.named_parameters():
                place, shape = self.places[name], parameter.shape
                state = had.get(parameter, {})
                rows = {"exp_avg": self.mean[row, place], "exp_avg_sq": self.square[row, place]}
                for key, own in rows.items():
                    if key in state:
                        own.copy_(state[key].flatten())
                had[parameter] = {"step": self.steps[row], **{key: own.view(shape) for key, own in rows.items()}}
                self.flat[row, place] = parameter.flatten()
                parameter.data = self.flat[row, place].view(shape)
                parameter.grad = None
            if self.averages is not None:
                assert session.average is not None
                for name, parameter in session.average.model.named_parameters():
                    self.averages[row, self.places[name]] = parameter.flatten()
                    parameter.data = self.averages[row, self.places[name]].view(parameter.shape)

    def _whole(self, flat: Tensor, place: slice, parameter: Tensor) -> nn.Parameter:
        return nn.Parameter(flat[:, place].view(len(flat), *parameter.shape), requires_grad=parameter.requires_grad)

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
            own = nn.Parameter(self.flat[row])
            own.grad = self.grads[row]
            group["params"].append(own)
            state[own] = {"step": self.steps[row], "exp_avg": self.mean[row], "exp_avg_sq": self.square[row]}
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
        if self.averages is not None:
            shares = {session.average.share(step + 1) for session in self.sessions if session.average is not None}
            assert len(shares) == 1
            self.share.fill_(shares.pop())
        graph = self._graph_of(rows)
        if graph is not None:
            graph.replay()
        else:
            self._learn(rows)
            self._update()
        for session in self.sessions:
            session.step += 1

    def _graph_of(self, rows: Tensor) -> torch.cuda.CUDAGraph | None:
        """A function that performs a whole step on these rows, as a CUDA graph if possible."""
        if not self.captures or rows.shape != self.rows.shape:
            return None
        self.rows.copy_(rows)
        if self.graph is None:
            try:
                self.graph = self._captured()
            except RuntimeError:  # an encoding must synchronise with the GPU
                torch.cuda.synchronize(self.device)
                self.captures = False
        return self.graph

    def _captured(self) -> torch.cuda.CUDAGraph:
        """The step as a CUDA graph, because a small model's step is mostly launches."""
        sums = self.sums.clone()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(aside):
                for _ in range(_WARM_UP):
                    self._learn(self.rows)
        finally:
            torch.cuda.current_stream().wait_stream(aside)
            self.sums.copy_(sums)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._learn(self.rows)
            self._update()
        return graph

    def _learn(self, rows: Tensor) -> None:
        """The gradients for each model's examples."""
        self.template.train()
        wanted = list(self.params.values())
        tokens, labels = self.tokens[self.each, rows], self.labels[self.each, rows]
        lengths = None if self.lengths is None else self.lengths[self.each, rows]
        counted = (labels != IGNORED).flatten(1).sum(1)
        for start in range(0, rows.shape[1], self.size):  # gradients add up to those of the whole batch
            part = slice(start, start + self.size)
            given = tokens[:, part], labels[:, part], None if lengths is None else lengths[:, part]
            loss, right = vmap(self._loss, in_dims=(0, 0, 0, 0, None if lengths is None else 0))(
                self.params, self.buffers, *given
            )
            grads = torch.autograd.grad((loss / counted.clamp(min=1)).sum(), wanted)
            for own, grad in zip(self.own_grads, grads, strict=True):
                if start:
                    own += grad
                else:
                    own.copy_(grad)
            self.sums[:, 0] += loss.detach().double()
            self.sums[:, 1] += right.double()
        self.sums[:, 2] += counted

    @torch.no_grad()
    def _update(self) -> None:
        self.optimizer.step()
        if self.averages is not None:
            self.averages.lerp_(self.flat, self.share)

    def _loss(
        self,
        params: dict[str, nn.Parameter],
        buffers: dict[str, Tensor],
        tokens: Tensor,
        labels: Tensor,
        lengths: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        with self.first.amp():
            logits = _call(self.template, {**self.shared, **params, **buffers}, tokens, lengths)
        logits = precise(logits)
        return loss_of(logits, labels), correct(logits.detach(), labels).sum()
