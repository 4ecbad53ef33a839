"""A training step of our decoder against other programs' models of equal shape."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.model import Decoder
from toeplens.studies.benching.race import race
from toeplens.studies.benching.record import Contest, Timed
from toeplens.training import RunSpec, run_spec
from toeplens.training.presets import DISTANCE, starting_spec

Model = Callable[[Tensor], Tensor]
BATCH = {"cpu": {"laptop": 128, "desk": 128, "paper": 32}, "cuda": {"laptop": 4096, "desk": 2048, "paper": 512}}


def contests(
    device: torch.device, scales: tuple[str, ...], rounds: int, seconds: float
) -> Iterator[tuple[Contest, list[str]]]:
    """One contest a scale, and what is not installed: RoPE, the distance task's sizes, no dropout, AdamW."""
    for scale in scales:
        spec = run_spec(**starting_spec(scale, "paper", DISTANCE, "rope", 0))
        batch = BATCH[device.type][scale]
        models, missing = _models(spec, device)
        steps = {name: _step(spec, model, run, batch, device) for name, (model, run) in models.items()}
        times = race(steps, device, rounds=rounds, seconds=seconds)
        length = spec.task_options["length"]
        shape = spec.model
        yield (
            Contest(
                kind="training",
                work=f"{scale}: {shape.num_layers} layers of {shape.num_heads} heads, width {shape.d_model}, "
                f"{batch} texts of {length} tokens",
                unit="tokens",
                count=batch * length,
                flops=6.0 * _products(spec) * batch * length,
                timed=tuple(
                    Timed(name=name, ours=name.startswith("toeplens"), seconds=took) for name, took in times.items()
                ),
            ),
            missing,
        )


def _products(spec: RunSpec) -> int:
    """Weights that each token is multiplied with, of the layers that are done for all tokens."""
    shape = spec.model
    return shape.num_layers * (4 * shape.d_model**2 + 2 * shape.d_model * shape.d_ff)


def _models(spec: RunSpec, device: torch.device) -> tuple[dict[str, tuple[nn.Module, Model]], list[str]]:
    torch.manual_seed(0)
    ours = Decoder(spec.model.model_copy(update={"dropout": 0.0})).to(device)
    found: dict[str, tuple[nn.Module, Model]] = {"toeplens": (ours, ours)}
    if device.type == "cuda":
        found["toeplens, compiled"] = ours, torch.compile(ours, dynamic=False)
    found["torch.nn.TransformerEncoder"] = _plain(_Encoder(spec).to(device))
    missing = []
    peers = (("transformers Llama", "transformers", _Llama), ("x-transformers", "x_transformers", _X))
    for name, package, make in peers:
        if importlib.util.find_spec(package) is None:
            missing.append(name)
        else:
            found[name] = _plain(make(spec).to(device))
    return found, missing


def _plain(model: nn.Module) -> tuple[nn.Module, Model]:
    return model, model


def _step(spec: RunSpec, model: nn.Module, run: Model, batch: int, device: torch.device) -> Callable[[], None]:
    """One step: forward, backward, AdamW; bfloat16 products on a GPU, for all."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.lr, betas=spec.betas, fused=True)
    length = spec.task_options["length"]
    tokens = torch.randint(1, spec.model.vocab_size, (batch, length), device=device)
    labels = torch.randint(1, spec.model.num_classes, (batch,), device=device)

    def amp() -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()

    def step() -> None:
        optimizer.zero_grad()
        with amp():
            logits = run(tokens)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()

    return step


class _Encoder(nn.Module):
    """torch's own layers, causal; it has no rotation to do."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__()
        shape = spec.model
        layer = nn.TransformerEncoderLayer(
            shape.d_model, shape.num_heads, shape.d_ff, 0.0, batch_first=True, norm_first=True
        )
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        self.layers = nn.TransformerEncoder(layer, shape.num_layers, enable_nested_tensor=False)
        self.readout = nn.Linear(shape.d_model, shape.num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.readout(self.layers(self.embedding(tokens), mask=mask, is_causal=True)[:, -1])


class _Llama(nn.Module):
    """transformers' Llama; its gated network has as many weights as ours."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        shape = spec.model
        self.model = LlamaModel(
            LlamaConfig(
                vocab_size=shape.vocab_size,
                hidden_size=shape.d_model,
                intermediate_size=shape.d_ff * 2 // 3,
                num_hidden_layers=shape.num_layers,
                num_attention_heads=shape.num_heads,
                num_key_value_heads=shape.num_heads,
                max_position_embeddings=shape.max_len,
                use_cache=False,
            )
        )
        self.readout = nn.Linear(shape.d_model, shape.num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.readout(self.model(tokens).last_hidden_state[:, -1])


class _X(nn.Module):
    """x-transformers' decoder with rotation and its flash attention."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__()
        from x_transformers import Decoder as Layers
        from x_transformers import TransformerWrapper

        shape = spec.model
        layers = Layers(
            dim=shape.d_model,
            depth=shape.num_layers,
            heads=shape.num_heads,
            attn_dim_head=shape.d_model // shape.num_heads,
            rotary_pos_emb=True,
            ff_mult=shape.d_ff // shape.d_model,
            attn_flash=True,
        )
        self.model = TransformerWrapper(
            num_tokens=shape.vocab_size, max_seq_len=shape.max_len, use_abs_pos_emb=False, attn_layers=layers
        )
        self.readout = nn.Linear(shape.d_model, shape.num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.readout(self.model(tokens, return_embeddings=True)[:, -1])
