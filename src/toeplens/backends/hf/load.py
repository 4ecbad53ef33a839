"""Load a Hugging Face model and its tokenizer by name, directory or GGUF file, without running their code."""

from __future__ import annotations

import copy
import errno
import importlib.util
import logging
import math
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from toeplens.backends.hf import model as hf
from toeplens.backends.hf.checkpoints import Checkpoint, QuantisedWeights, find_checkpoint
from toeplens.backends.hf.install import ENCODINGS, HOST, reinstall
from toeplens.backends.hf.offload import PASS_TOKENS, Report, WeightPlan, convert_gguf, stored_numbers, working_memory
from toeplens.utils import EnvironmentFailure, InputError, choose, invalid, repr_of
from toeplens.utils.files import environment_failure
from toeplens.utils.machine import fmt_bytes, free_memory, is_out_of_memory, memory, parse_bytes, return_freed_memory

Dtype = Literal["auto", "float64", "float32", "bfloat16", "float16"]
_POSITION_TABLE = re.compile(r"^wpe$|^(?!.*rel).*(pos.*emb|emb.*pos)")
_LAYERS = re.compile("^(?!max_).*(layers?|blocks)$")  # fields with a number of layers
_COUNTS = {"num_hidden_layers", "n_layer", "num_attention_heads", "num_key_value_heads", "n_head"}  # must be positive
_MAX_LAYERS = 1000  # as for the toeplens decoder
_IMPLEMENTATIONS = (None, "eager", "sdpa", "batched_mm", "grouped_mm")
_INTEGER = re.compile(r"[IU]\d|BOOL")  # dtypes of safetensors
_MISSING_WEIGHTS = "are missing from the checkpoint and would be random"
_ATTENTION = re.compile("(Attention|Attn|MLA)$")  # an attention class, not a layer around it
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, in evaluation mode, and facts about it."""

    model: Any  # a `transformers.PreTrainedModel`
    name: str | None = None  # as requested; None for a model passed as an object
    missing: tuple[str, ...] = ()  # weights of the model that the checkpoint lacks, so that they are random
    unused: tuple[str, ...] = ()  # tensors of the checkpoint that the model does not use
    quantised: QuantisedWeights | None = None  # how the weights of a GGUF file were stored; None for others
    plan: WeightPlan | None = None  # which weights are read from disk when they are used; None if all are in memory

    @property
    def _source(self) -> str:
        return self.name or getattr(self.model.config, "name_or_path", "")

    @property
    def display_name(self) -> str:
        """The name used in records (`display_name_of`); the model's class if it has no name."""
        return display_name_of(self._source or type(self.model).__name__)

    @property
    def device(self) -> torch.device:
        """The device of the model's inputs."""
        return hf.device_of(self.model)

    @cached_property
    def attention(self) -> tuple[str, ...]:
        """The names of the modules whose class is an attention."""
        return tuple(hf.attention_modules(self.model).values())

    @cached_property
    def vocabulary(self) -> int | None:
        """How many tokens the model has embeddings for; None if not known."""
        weight = getattr(hf.input_embedding(self.model), "weight", None)
        vocab_size = getattr(self.model.config, "vocab_size", None) if weight is None else weight.shape[0]
        return vocab_size if isinstance(vocab_size, int) else None

    @cached_property
    def position_vectors(self) -> int | None:
        """How many tokens the model has position vectors for; None if it has no table of positions.

        For models with several towers only tables next to a token embedding count, not those of images or sounds: the
        model's input embedding, one with as many tokens, or, if the model does not say which that is, any.
        """
        tables, tokens = dict[nn.Embedding, bool](), hf.input_embedding(self.model)
        for name, module in self.model.named_modules():
            parent, _, last = name.rpartition(".")
            if isinstance(module, nn.Embedding) and _POSITION_TABLE.search(last):
                others = [x for x in self.model.get_submodule(parent).modules() if isinstance(x, nn.Embedding)]
                others = [other for other in others if other is not module]
                if isinstance(tokens, nn.Embedding):
                    size = tokens.num_embeddings
                    others = [x for x in others if x.weight is tokens.weight or x.num_embeddings == size]
                tables[module] = bool(others)
        if not isinstance(tokens, nn.Embedding) and not any(tables.values()):  # only images or sounds
            tables = dict.fromkeys(tables, True)
        lengths = []
        for table in (table for table, counts in tables.items() if counts):
            skipped = 0 if table.padding_idx is None else table.padding_idx + 1
            lengths.append(table.num_embeddings - max(skipped, int(getattr(table, "offset", 0))))
        return min(lengths, default=None)

    @cached_property
    def _limits(self) -> list[tuple[int, str]]:
        declared = _declared_length(self.model.config)
        limits = (self.position_vectors, "the positions"), (declared, "the max_position_embeddings")
        return sorted((limit, f"{source} of the model") for limit, source in limits if limit is not None)

    @property
    def max_length(self) -> int | None:
        """How many tokens the model supports; None if neither a table nor its configuration says so.

        That is the length of a table of positions, or ``max_position_embeddings`` of the configuration, beyond which
        the angles of rotations are untrained. Scaled rotations extend it by their factor; ALiBi has no limit.
        """
        return self._limits[0][0] if self._limits else None

    def check_length(self, field: str, tokens: int) -> None:
        """Refuse sequences of more tokens than the model supports; ``field`` is the name of the argument."""
        for limit, source in self._limits:
            if tokens > limit:
                raise invalid(field, f"be at most {limit}, {source}", tokens)

    def check_decoder(self, feature: str) -> None:
        """Refuse a model with an encoder if ``feature`` needs one that predicts the next token."""
        if self.model.config.is_encoder_decoder:
            but = f"{type(self.model).__name__} has an encoder"
            raise InputError(f"model: {feature} needs a decoder-only model, but {but}.")

    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises `InputError` if there is none, or if the model has no name."""
        if not self._source:
            raise InputError("tokenizer must be set for a text, as the model has no name to load it by.")
        return load_tokenizer(self._source)

    def check_finite(self) -> None:
        """Refuse weights and rotation frequencies that are not finite; offloaded weights are not checked."""
        for name, module in self.model.named_modules():
            weights, others = dict(module.named_parameters(recurse=False)), dict(module.named_buffers(recurse=False))
            meta, prefix = [key for key, x in (weights | others).items() if x.is_meta], f"{name}." if name else ""
            if meta and not hasattr(module, "_hf_hook"):
                raise InputError(f"model: {prefix}{meta[0]} is on the device meta. Move the model to another device.")
            for key, x in (weights | {key: x for key, x in others.items() if key.endswith("inv_freq")}).items():
                if not x.is_meta and not _is_finite(x):
                    raise InputError(f"model: {prefix}{key} must be finite.")

    def check_complete(self) -> None:
        """Refuse a model if its checkpoint lacks any weights, as these would be random."""
        if self.missing:
            raise InputError(f"model: weights {_MISSING_WEIGHTS}: {hf.format_names(self.missing)}.")

    def check_attention(self, module: str) -> None:
        """Refuse missing or unused weights in this attention, which was run, or in an attention around it, including
        unused ones of a layer that the model does not have. Its class may follow its name."""
        inner = module.split(" (")[0]
        modules = dict(self.model.named_modules())
        wrapped = [name for name in self.attention if name and _ATTENTION.search(type(modules[name]).__name__)]
        starts = [f"{name}." for name in (inner, *(name for name in wrapped if inner.startswith(f"{name}.")))]
        problem, prefix = _MISSING_WEIGHTS, _prefix(self.model)
        keys = [key for key in self.missing if key.startswith(tuple(starts))]
        if not keys:
            problem = "in the checkpoint do not belong to its configuration"
            patterns = [re.sub(r"(^|\.)\d+(?=\.)", r"\1*", x.removeprefix(prefix)) for x in (*starts, *self.unused)]
            pairs = zip(self.unused, patterns[len(starts) :], strict=True)
            keys = [key for key, name in pairs if name.startswith(tuple(patterns[: len(starts)]))]
        if keys:
            raise InputError(f"model: weights of the attention {problem}: {hf.format_names(keys)}.")


def _prefix(model: Any) -> str:
    return f"{getattr(model, 'base_model_prefix', '') or '?'}."


def _declared_length(config: Any) -> int | None:
    """``max_position_embeddings`` of the configuration of a model or its decoder, or what scaling of its rotations
    extends it to; None if not given."""
    try:
        text_config = config.get_text_config()
    except ValueError:  # several parts
        text_config = config.get_text_config(decoder=True)
    limit = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1 or getattr(text_config, "alibi", False):
        return None
    limits = [limit]
    for rope in hf.rope_settings(text_config):
        # dynamic scaling starts beyond the configuration's limit
        base = limit if rope.get("rope_type") == "dynamic" else rope.get("original_max_position_embeddings")
        factor = rope.get("factor")
        if isinstance(base, int) and isinstance(factor, int | float):
            limits.append(int(base * factor))
    return max(limits)


def display_name_of(name: str) -> str:
    """The model's name in records: a name on the hub as is, for a directory or a file the last two parts."""
    return "/".join(Path(name).resolve().parts[-2:]) if Path(name).exists() else name


def load(path: str | Path, *, dtype: Dtype | None = None, device: str = "cpu") -> Any:
    """Load a model with an installed encoding from a directory written by its ``save_pretrained``.

    `load_model` also takes such a directory. No code in the directory is run, and weights are read only from
    safetensors.

    Arguments
        dtype   of the weights (default: as saved). ``auto``: float32 on a CPU
        device  ``cpu``, ``cuda``, ``cuda:N`` or ``auto``

    Raises `InputError` for a directory of another kind and for a damaged one.
    """
    if not isinstance(path, str | Path) or not Path(path).is_dir():
        value = path if isinstance(path, str | Path) else repr_of(path)
        raise invalid("path", "be a directory that save_pretrained wrote", value)
    if dtype is not None:
        choose("dtype", dtype, get_args(Dtype))
    model = _load(str(path), dtype, device, False).model
    if HOST not in vars(model):
        raise InputError(f"path: the model in {path} has no toeplens encoding. Open it with from_pretrained.")
    return model


def load_model(
    name: str,
    *,
    dtype: Dtype = "auto",
    device: str = "auto",
    pickled: bool = False,
    memory: str | None = None,
    tokens: int = PASS_TOKENS,
    on_progress: Report = lambda what, done, total: None,
) -> LoadedModel:
    """Load a transformers model from a directory, or from the hub or its cache.

    The class is the one named in the configuration, so a language model keeps its head. Code in the repository is never
    run.

    Arguments
        name     a directory with a config.json or a GGUF file, a GGUF file, or a name on the hub
        dtype    ``auto``: float32 on a CPU, otherwise the checkpoint's own
        device   ``auto``: CUDA if there is a GPU, spread over GPUs and memory if accelerate is installed; ``cpu``,
                 ``cuda`` or ``cuda:N``
        pickled  allow pickle checkpoints; loading a pickle can execute code
        memory   bound on the memory, such as ``8G``, of the CPU or of each GPU (default: what is free). Weights that do
                 not fit are read from disk when they are used, on a GPU from the CPU's memory; numbers stay the same. A
                 GGUF file is first converted to float32 in ``~/.cache/toeplens/gguf``
        tokens   tokens of a pass, for which memory is reserved
        on_progress  called with a description of the current work, the finished amount and the total

    Missing or unused attention weights are only detected when the attention runs (`LoadedModel.check_attention`).

    Raises `InputError` for a model that does not exist, is not a text model of transformers, has more than 1000 layers,
    or cannot be read as its configuration says; `EnvironmentFailure` if transformers or memory is missing.
    """
    choose("dtype", dtype, get_args(Dtype))
    return _load(name, dtype, device, pickled, memory, tokens, on_progress)


def open_model(model: Any, **options: Any) -> LoadedModel:
    """Load a model by its name or directory (`load_model`). Model objects and `LoadedModel` are passed through.

    Raises `InputError` for a model object without the encoding that its configuration says is installed, and for
    options of loading (``dtype``, ``device``, ``memory``, ``pickled``) that differ from what it has.
    """
    if isinstance(model, str | Path):
        return load_model(str(model), **options)
    inner = model.model if isinstance(model, LoadedModel) else hf.require_pretrained(model)
    device = hf.device_of(inner)
    known = {"dtype": {"auto", str(inner.dtype).removeprefix("torch.")}, "device": {"auto", device.type, str(device)}}
    for name, allowed in (known | {"memory": {None}, "pickled": {False}}).items():
        if name in options and options[name] not in allowed:
            advice = " Use model.to(...)." if name in known else ""
            raise InputError(f"{name} must not be set for a model object, only for a name or a directory.{advice}")
    if isinstance(model, LoadedModel):
        return model
    entry = getattr(inner.config, ENCODINGS, None)
    if entry is not None and HOST not in vars(model):
        encoding = f"the encoding {repr_of(entry)} of its configuration"
        raise InputError(f"model: {encoding} is not installed. Open its directory with toeplens.hosts.load.")
    return LoadedModel(model)


def _load(
    name: str,
    dtype: Dtype | None,
    device: str,
    pickled: bool,
    memory_limit: str | None = None,
    tokens: int = PASS_TOKENS,
    on_progress: Report = lambda what, done, total: None,
) -> LoadedModel:
    """A model from its files; None as dtype: as saved."""
    transformers, target = hf.import_transformers(), resolve_device(device)
    limit = None if memory_limit is None else parse_bytes("memory", memory_limit)
    with _quiet_logging(transformers):
        files = find_checkpoint(name)
        config = _load_config(transformers, files)
        cls = _model_class(transformers, config, name)
        weight_file, installed = getattr(config, "transformers_weights", None), getattr(config, ENCODINGS, None)
        files.check_weights(weight_file, pickled)
        torch_dtype: Any = torch.float32 if dtype == "auto" and target == "cpu" else "auto"
        if dtype not in (None, "auto"):
            torch_dtype = getattr(torch, dtype)
        options = {"dtype": torch_dtype, "use_safetensors": None if pickled else True, "ignore_mismatched_sizes": True}
        options |= {"config": config, "output_loading_info": True}
        options |= {"device_map": target} if target == "auto" else {}
        safetensors, location = files.safetensors(weight_file), files.location
        plan: WeightPlan | None = None
        folder: str | None = None  # of weights whose layout on disk is not that of the model
        too_large = EnvironmentFailure(f"model: {name} does not fit in the memory of {target}. Use a smaller dtype.")
        try:
            _check_dtypes(config, safetensors, name)
            may_stay = target == "cpu" and dtype is not None and not files.missing_files()
            empty = _empty_model(cls, config, files.quantised) if may_stay else None
            reserve = working_memory(config, tokens)
            if empty is not None:
                plan = _plan_weights(empty, torch_dtype, files, safetensors, limit, reserve)
            if plan is not None:
                return_freed_memory()
                folder = tempfile.mkdtemp(prefix="toeplens-weights-")
                options |= {"device_map": plan.device_map, "offload_folder": folder}
                if files.quantised is not None:
                    location = str(convert_gguf(files.gguf, empty, on_progress))
                    files = replace(files, options={})
            elif target != "cpu" and limit is not None:
                options |= {"device_map": "auto", "max_memory": _gpu_memory(target, limit - reserve)}
            model, info = cls.from_pretrained(location, **files.options, **options)
            if folder is not None:
                weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
            model = model if "device_map" in options else model.to(target)
        except Exception as error:  # transformers may raise anything for a bad file
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, InputError | EnvironmentFailure):
                raise
            if is_out_of_memory(error):
                raise too_large from None
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise environment_failure(error, folder or location) from None
            raise hf.load_error(name, _failure_reason(error, files, config, pickled)) from None
        if mismatched := sorted(info["mismatched_keys"]):
            key, shape, expected = mismatched[0]
            more = f" (and {len(mismatched) - 1} more)" if len(mismatched) > 1 else ""
            shapes = f"{list(shape)} in its weights but {list(expected)} in its configuration"
            raise hf.load_error(name, f"{key}{more} has shape {shapes}")
        buffers = {key for key, _ in model.named_buffers()}  # old checkpoints kept masks with the weights
        unused = tuple(sorted(key for key in info["unexpected_keys"] if key not in buffers))
        _check_dtypes(config, safetensors, name, model)
        if installed is not None:
            reinstall(model, installed, safetensors, name)
            unused = tuple(key for key in unused if not key.startswith(f"{ENCODINGS}."))
        return LoadedModel(model.eval(), name, tuple(sorted(info["missing_keys"])), unused, files.quantised, plan)


def _check_dtypes(config: Any, files: Sequence[Path], name: str, model: nn.Module | None = None) -> None:
    """Refuse complex tensors and, for a model's weights, integer ones, unless the configuration describes a
    quantisation."""
    if getattr(config, "quantization_config", None) is not None:
        return
    floats = {key for key, x in model.named_parameters() if x.is_floating_point()} if model is not None else set()
    prefix = _prefix(model)
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                dtype = str(opened.get_slice(key).get_dtype())
                is_weight = {key, f"{prefix}{key}", key.removeprefix(prefix)} & floats
                if dtype.startswith("C") or (_INTEGER.match(dtype) and is_weight):
                    raise hf.load_error(name, f"{key} must have a floating-point dtype, got {dtype}")


def _empty_model(cls: Any, config: Any, quantised: QuantisedWeights | None) -> nn.Module | None:
    """The model on the meta device; None if that fails, or if its weights are stored in other shapes."""
    if getattr(config, "quantization_config", None) is not None and quantised is None:
        return None
    try:
        with torch.device("meta"):
            return cls(copy.deepcopy(config))
    except Exception as error:  # reported when the model is loaded
        if is_out_of_memory(error):
            raise
        return None


def _plan_weights(
    model: nn.Module,
    dtype: torch.dtype,
    files: Checkpoint,
    safetensors: Sequence[Path],
    limit: int | None,
    reserve: int,
) -> WeightPlan | None:
    """Which weights of a model on the meta device stay on disk, with a reserve for the tensors of a pass; None if all
    fit in memory.

    Raises `EnvironmentFailure` if that is impossible, before anything is allocated.
    """
    available = min(memory(), free_memory()) if limit is None else limit
    needed = sum(weight.numel() for weight in model.parameters()) * dtype.itemsize
    if needed + (0 if limit is None else reserve) <= available:
        return None
    on_disk = needed  # unknown before a download
    if files.quantised is None and Path(files.location).is_dir():
        on_disk = stored_numbers(safetensors) * dtype.itemsize
    plan = WeightPlan.of(model, dtype, available - reserve)
    least = max(needed - on_disk, plan.largest) + reserve
    if available < least and limit is None:
        shortage = f"needs at least {fmt_bytes(least)} of memory, but only {fmt_bytes(available)} are free"
        raise EnvironmentFailure(f"model: {files.name} {shortage}. Use a smaller dtype (bfloat16 halves it).")
    if available < least:
        parts = f"{fmt_bytes(least - reserve)} for the largest layer of {files.name}, {fmt_bytes(reserve)} for a pass"
        raise invalid("memory", f"be at least {fmt_bytes(least)} ({parts})", got=fmt_bytes(available))
    return plan


def _gpu_memory(target: str, limit: int) -> dict[int | str, int]:
    """The memory limits of weights by device, for a model that is spread over one GPU or, for ``auto``, all of them."""
    first = int(target.partition(":")[2] or 0)
    gpus = range(torch.cuda.device_count()) if target == "auto" else [first]
    return {**dict.fromkeys(gpus, max(1, limit)), "cpu": free_memory()}


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model. Raises `InputError` if there is none."""
    try:
        with _quiet_logging(transformers := hf.import_transformers()):
            files = find_checkpoint(name)
            auto_class = transformers.AutoTokenizer
            tokenizer = auto_class.from_pretrained(files.location, trust_remote_code=False, **files.options)
            # without any files transformers creates a tokenizer with only special tokens and a mark for blanks
            empty = len(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)) < 2
        reason = "it has no vocabulary"
    except Exception as error:  # its files may be invalid in any way
        tokenizer, empty, reason = None, True, hf.error_summary(error)
    if empty:
        raise InputError(f"model: {name} has no readable tokenizer ({reason}), which text needs. Give tokens.")
    return tokenizer


@contextmanager
def _quiet_logging(transformers: Any) -> Iterator[None]:
    """Without the progress bars and warnings of transformers and the hub; errors are still raised."""
    gguf: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")  # it has its own progress bar
    logs, others = transformers.utils.logging, [logging.getLogger(x) for x in ("huggingface_hub", "accelerate")]
    level, bars, before = logs.get_verbosity(), logs.is_progress_bar_enabled(), [logger.level for logger in others]
    logs.set_verbosity(logs.CRITICAL)
    logs.disable_progress_bar()
    bar, gguf.tqdm = gguf.tqdm, lambda items, **_: items
    for logger in others:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        gguf.tqdm = bar
        logs.set_verbosity(level)
        for logger, old_level in zip(others, before, strict=True):
            logger.setLevel(old_level)
        if bars:
            logs.enable_progress_bar()


def resolve_device(device: str) -> str:
    """``auto`` to spread the model, otherwise a torch device; `EnvironmentFailure` for one that is not available."""
    if device == "auto":
        if not torch.cuda.is_available():
            return "cpu"
        return "cuda" if importlib.util.find_spec("accelerate") is None else "auto"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise invalid("device", "be auto, cpu, cuda or cuda:N", device)
    if device != "cpu" and not torch.cuda.is_available():
        raise EnvironmentFailure(f"device: this machine has no CUDA GPU, got {device!r}.")
    return device


def _load_config(transformers: Any, files: Checkpoint) -> Any:
    if (content := files.read_config()) is not None:
        _check_fields(files.name, content)
    try:
        config = transformers.AutoConfig.from_pretrained(files.location, trust_remote_code=False, **files.options)
    except Exception as error:  # its values may fail in any way in the model's class
        own_code = "trust_remote_code" in str(error)
        reason = "it needs its own code, which is never run" if own_code else hf.error_summary(error)
        raise hf.load_error(files.name, reason) from None
    _check_fields(files.name, config.to_dict())
    _remove_custom_kernels(config)
    return config


def _remove_custom_kernels(config: Any) -> None:
    """Remove implementations of attention and experts from a configuration unless they are torch's own: kernels would
    be downloaded and run."""
    for field in ("_attn_implementation_internal", "_experts_implementation_internal"):
        if vars(config).get(field) not in _IMPLEMENTATIONS:
            vars(config)[field] = None
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None and not isinstance(inner, dict):
            _remove_custom_kernels(inner)


def _check_fields(name: str, content: dict[str, Any]) -> None:
    """Refuse impossible numbers of layers, which would be built one by one, and rotation bases that are not numbers."""
    for field, value in _config_fields(content):
        number, must = isinstance(value, int | float), ""
        if number and _LAYERS.match(field) and value > _MAX_LAYERS:
            must = f"be at most {_MAX_LAYERS}"
        elif number and field in _COUNTS and value < 1:
            must = "be at least 1"
        elif field == "rope_theta" and value is not None and not (number and value > 0):
            must = "be a number above 0"
        if must:
            raise invalid(f"model: {field} in the configuration of {name}", must, value)


def _config_fields(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a configuration and of those nested in it, except nested configurations themselves."""
    pending = [content]
    while pending:
        for field, value in pending.pop().items():
            if isinstance(value, dict):
                pending.append(value)
            else:
                yield str(field), value


def _model_class(transformers: Any, config: Any, name: str) -> Any:
    """The class that the configuration names, or that of its type in transformers."""
    names = getattr(config, "architectures", None) or []
    if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
        raise InputError(f"model: architectures in the configuration of {name} must be a list of names, got {names!r}.")
    base = transformers.PreTrainedModel
    for architecture in names:
        cls = getattr(transformers, architecture, None)
        if isinstance(cls, type) and issubclass(cls, base) and cls is not base:
            if cls.config_class is not None and not isinstance(config, cls.config_class):
                raise InputError(f"model: {name} has the architecture {architecture} but the type {config.model_type}.")
            return cls
    if names:
        version = f"transformers {transformers.__version__}"
        raise InputError(f"model: {name} has the architecture {names[0]}, which {version} does not have.")
    for auto_class in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM, transformers.AutoModel):
        if type(config) in auto_class._model_mapping:
            return auto_class._model_mapping[type(config)]
    raise InputError(f"model: {name} has the type {config.model_type}, which transformers does not know.")


def _failure_reason(error: Exception, files: Checkpoint, config: Any, pickled: bool) -> str:
    if missing := files.missing_files():
        return f"its file {missing[0]} is missing{f' (and {len(missing) - 1} more)' if len(missing) > 1 else ''}"
    if isinstance(error, SafetensorError):
        return f"its weights are damaged ({hf.error_summary(error)})"
    if not pickled and "safetensors" in str(error) and isinstance(error, OSError):
        return "it has no safetensors weights. Set --pickled to allow pickle checkpoints"
    if isinstance(error, KeyError):  # of a table of what transformers has by that name
        values = _config_fields(config.to_dict())
        fields = [field for field, value in values if isinstance(value, str) and value in error.args]
        if fields:
            return f"its {fields[0]} is {error.args[0]!r}, which transformers does not know"
    return hf.error_summary(error)


def _is_finite(x: Tensor) -> bool:
    """Whether all values are finite, by their extremes, without another tensor of their size."""
    is_checked = type(x) in (Tensor, nn.Parameter) and x.dtype in _FLOATS and x.numel() > 0
    return not is_checked or all(map(math.isfinite, torch.stack(x.detach().aminmax()).tolist()))
