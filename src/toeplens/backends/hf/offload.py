"""Weights that do not fit in memory: they stay on disk and are read when their module runs."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from toeplens.backends.hf.checkpoints import INDEX
from toeplens.backends.hf.model import import_transformers
from toeplens.utils import EnvironmentFailure
from toeplens.utils.files import cache_directory, environment_failure, make_directory
from toeplens.utils.machine import fmt_bytes

_PROGRAM = 6 * 10**8  # bytes for Python, torch, transformers and the analysis of a layer
PASS_TOKENS = 4096  # tokens of a pass, unless said otherwise
Report = Callable[[str, int, int], None]  # takes a description of the current work, the finished amount, the total


@dataclass(frozen=True)
class WeightPlan:
    """Which weights are kept in memory, and which are read from disk whenever their module runs."""

    device_map: dict[str, str]  # ``cpu`` or ``disk`` for each module that has weights of its own
    in_memory: int  # bytes of the weights that are kept
    on_disk: int  # bytes of the others, as numbers of the pass's dtype
    largest: int  # bytes of the largest module that is read from disk

    @property
    def peak(self) -> int:
        """Bytes of memory that the weights take at most."""
        return self.in_memory + self.largest

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype, limit: int) -> WeightPlan:
        """The plan for a model on the meta device whose weights may take ``limit`` bytes of memory.

        Modules are kept in the order of the model while they fit. Embeddings are not, as a pass uses few of their rows.
        """
        sizes = {name: _numbers(module) * dtype.itemsize for name, module in model.named_modules()}
        sizes = {name: size for name, size in sizes.items() if size}
        embeddings = model.get_input_embeddings(), model.get_output_embeddings()
        largest = max(sizes.values(), default=0)
        free, device_map = limit - largest, dict.fromkeys(sizes, "disk")
        for name, size in sizes.items():
            if size <= free and model.get_submodule(name) not in embeddings:
                free, device_map[name] = free - size, "cpu"
        on_disk = sum(sizes[name] for name, device in device_map.items() if device == "disk")
        return cls(device_map, sum(sizes.values()) - on_disk, on_disk, largest)


def working_memory(config: Any, tokens: int) -> int:
    """Bytes that a pass of this many tokens needs besides the weights, about: some states and products of a layer."""
    text_config = config.get_text_config(decoder=True)
    hidden = getattr(text_config, "hidden_size", 1024)
    inner = getattr(text_config, "intermediate_size", None)
    return _PROGRAM + 4 * tokens * (8 * hidden + 4 * (inner if isinstance(inner, int) else 4 * hidden))


def _numbers(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters(recurse=False))


def stored_numbers(files: Sequence[Path]) -> int:
    """How many numbers safetensors files hold."""
    total = 0
    for file in files:
        with safe_open(file, framework="pt") as opened:
            total += sum(math.prod(opened.get_slice(key).get_shape()) for key in opened.keys())  # noqa: SIM118
    return total


def convert_gguf(path: Path, model: Any, report: Report) -> Path:
    """A directory with a GGUF file's weights as float32 safetensors, as transformers dequantises them, one file per
    layer. It is made once, in ``toeplens/gguf`` of the cache directory.

    Arguments
        model   the model on the meta device
        report  called with the finished tensors

    Raises `EnvironmentFailure` if the disk is too full.
    """
    from gguf import GGUFReader, dequantize

    gguf: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    stat, version = path.stat(), import_transformers().__version__
    key = json.dumps([str(path.resolve()), stat.st_size, stat.st_mtime_ns, version])
    parent = make_directory(cache_directory("gguf"))
    target = parent / hashlib.sha256(key.encode()).hexdigest()[:16]
    if (target / INDEX).is_file():
        return target
    needed, free = 4 * sum(weight.numel() for weight in model.parameters()), shutil.disk_usage(parent).free
    if needed > free:
        shortage = f"needs {fmt_bytes(needed)} in {parent}, but only {fmt_bytes(free)} are free"
        where = "Free some space, or set TOEPLENS_CACHE to a directory on another disk"
        raise EnvironmentFailure(f"model: {path} is converted to float32 once, which {shortage}. {where}.")
    parsed = gguf.load_gguf_checkpoint(str(path), return_tensors=False)
    reader = GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    processor = gguf.TENSOR_PROCESSORS.get(architecture, gguf.TensorProcessor)(config=parsed["config"])
    names = gguf.get_gguf_hf_weights_map(model, processor)
    folder = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=parent))
    files: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    parsed["tensors"] = tensors  # where processors put parts of tensors

    def save() -> None:
        if tensors:
            file = f"model-{len(set(files.values())):05d}.safetensors"
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
            files.update(dict.fromkeys(tensors, file))
            tensors.clear()

    try:
        block = ""
        for number, tensor in enumerate(reader.tensors):
            report("conversion", number, len(reader.tensors))
            if (name_block := ".".join(tensor.name.split(".")[:2])) != block:
                save()
                block = name_block
            weights = dequantize(tensor.data, tensor.tensor_type)
            result = processor.process(
                weights=weights, name=tensor.name, tensor_key_mapping=names, parsed_parameters=parsed
            )
            if result.name in names:
                tensors[names[result.name]] = torch.from_numpy(result.weights.copy())
        save()
        model.config.save_pretrained(folder)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}), encoding="utf-8")
        os.replace(folder, target)
    except (OSError, SafetensorError) as error:
        if (target / INDEX).is_file():  # another process was faster
            return target
        code = re.search(r"os error (\d+)", str(error))  # of safetensors
        failure = error if isinstance(error, OSError) else OSError(int(code[1]) if code else 0, str(error))
        raise environment_failure(failure, target) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report("conversion", len(reader.tensors), len(reader.tensors))
    return target


def stored_weight(module: nn.Linear) -> Tensor | None:
    """A module's weight; one that stays on disk is mapped to memory, and not converted. None if it is elsewhere."""
    if not module.weight.is_meta:
        return module.weight
    hook: Any = vars(module).get("_hf_hook")
    if hook is None or module.bias is not None:
        return None
    weight = hook.weights_map["weight"]
    return weight if weight.device == torch.device(hook.execution_device) else None


@contextmanager
def reread_for_gradients(model: nn.Module) -> Iterator[None]:
    """What is run inside keeps no weights from disk for its backward pass, but reads them again."""
    hooks: dict[nn.Module, Any] = {module: vars(module).get("_hf_hook") for module in model.modules()}
    hooks = {module: hook for module, hook in hooks.items() if getattr(hook, "offload", False)}
    if not hooks:
        yield
        return

    def pack(tensor: Tensor) -> Any:
        pointer = tensor.untyped_storage().data_ptr()
        for module, hook in hooks.items():
            for name, weight in module.named_parameters(recurse=False):
                if not weight.is_meta and weight.untyped_storage().data_ptr() == pointer:
                    view = tensor.shape, tensor.stride(), tensor.storage_offset() - weight.storage_offset()
                    return hook.weights_map, name, weight.dtype, hook.execution_device, view
        return tensor

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        weights, name, dtype, device, (shape, stride, offset) = packed
        weight = weights[name].to(device=device, dtype=dtype).contiguous()
        return weight.as_strided(shape, stride, weight.storage_offset() + offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
