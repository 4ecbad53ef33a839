"""Audit Llama-shaped models with random weights that are larger than memory: time, peak memory, agreement.

    python benchmarks/large_audit.py [--shape 8b] [--memory 5G] [--tokens 1024] [--record FILE.json]
    python benchmarks/large_audit.py --cases gpu --device cuda --record FILE.json     # 15 minutes on one GPU
    python benchmarks/large_audit.py --cases gpu --device cpu --shape small           # a dry run of it without one

Models are made in --folder, bfloat16, a layer at a time (8b: 16 GB). Each audit is a process of its own. Its peak
memory is that of anonymous pages: Python, tensors and converted weights, without files in the page cache.
The first form audits one model by --memory, and a small one both by a bound and in memory, which must be equal bit for
bit. With --cases gpu, audits and exact effects in float32 and bfloat16, with the model whole on the device and with a
part of it elsewhere, are compared with the CPU in float32 (exact effects of 1b: with the device in float32). Results
are written after every audit.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from toeplens.backends.hf import load_model
from toeplens.backends.hf.offload import PASS_TOKENS, working_memory
from toeplens.studies import audit
from toeplens.training import environment
from toeplens.utils import write_json
from toeplens.utils.machine import fmt_bytes

SHAPES: dict[str, dict[str, Any]] = {  # of Llama configurations
    "small": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "vocab_size": 512, "tie_word_embeddings": True},
    "smollm2": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    | {"num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False},
}
HALF = "half"  # a bound by which about half of the weights stay elsewhere
COLUMNS = ("positional", "symbolic", "toeplitz", "previous", "induction", "centre", "effect")  # compared
SAMPLE_SECONDS = 0.02  # between two readings of the memory


@dataclass(frozen=True)
class Case:
    """One audit: of a model's shape, on a device, within a memory bound (None: as much as is free; or `HALF`)."""

    shape: str
    device: str = "cpu"
    dtype: str = "float32"
    memory: str | None = None
    effects: str = "none"
    tokens: int = 1024

    @property
    def reference(self) -> Case:
        """What it is compared with: float32 on a CPU without a bound."""
        return replace(self, device="cpu", dtype="float32", memory=None)

    @property
    def title(self) -> str:
        """All of it in a line."""
        bound = {None: "no bound", HALF: "half elsewhere"}.get(self.memory, f"at most {self.memory}")
        return f"{self.shape}, {self.tokens} tokens, {self.device}, {self.dtype}, {bound}, effects {self.effects}"


def make_model(folder: Path, shape: str) -> Path:
    """A model with random weights in bfloat16, written a layer at a time."""
    target = folder / shape
    if (target / "config.json").is_file():
        return target
    target.mkdir(parents=True, exist_ok=True)
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(**SHAPES[shape], max_position_embeddings=131_072, rope_parameters=rope)
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    files: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        layer = re.search(r"layers\.(\d+)", name)
        files.setdefault(f"model-{layer[1] if layer else 'ends'}.safetensors", []).append(name)
    for file, names in files.items():
        tensors = {}
        for name in names:
            weight = torch.empty(model.get_parameter(name).shape, dtype=torch.bfloat16)
            std = 1.0 if "embed" in name else weight.shape[-1] ** -0.5  # so that states and logits keep their size
            tensors[name] = weight.fill_(1.0) if weight.ndim == 1 else weight.normal_(0, std, generator=generator)
        save_file(tensors, target / file, metadata={"format": "pt"})
    weight_map = {name: file for file, names in files.items() for name in names}
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config.save_pretrained(target)  # last, so that a model with it is complete
    return target


def audit_here(case: Case, folder: Path) -> dict[str, Any]:
    """The audit in this process: its time, its peak memory, and the compared numbers of all heads."""
    peak = [0]
    threading.Thread(target=watch_memory, args=(peak,), daemon=True).start()
    generator = torch.Generator().manual_seed(1)
    half = torch.randint(SHAPES[case.shape]["vocab_size"], (1, case.tokens // 2), generator=generator)
    started, timing = time.monotonic(), {}

    def on_progress(what: str, done: int, total: int) -> None:
        timing.setdefault(f"until {what}", round(time.monotonic() - started, 1))

    tokens = case.tokens if case.effects == "none" else max(case.tokens, PASS_TOKENS)
    memory = half_of(folder / case.shape, case.dtype, tokens) if case.memory == HALF else case.memory
    options: dict[str, Any] = {"device": case.device, "dtype": case.dtype, "memory": memory, "tokens": tokens}
    loaded = load_model(str(folder / case.shape), **options)
    elsewhere = sum(x.numel() * x.element_size() for x in loaded.model.parameters() if x.is_meta)
    result = audit(loaded, torch.cat((half, half), 1), effects=case.effects, on_progress=on_progress)
    seconds = time.monotonic() - started
    time.sleep(2 * SAMPLE_SECONDS)
    heads = [{name: getattr(head, name) for name in COLUMNS} for head in result.heads]
    gpu = torch.cuda.max_memory_allocated() if case.device != "cpu" else None
    return {
        "seconds": round(seconds, 1),
        **timing,
        "peak_bytes": peak[0],
        "peak_gpu_bytes": gpu,
        "bytes_elsewhere": elsewhere,
        "parameters": result.about["parameters"],
        "no_effects": result.about.get("no_effects"),
        "proof": result.max_difference,
        "heads": heads,
    }


def half_of(folder: Path, dtype: str, tokens: int) -> str:
    """A bound that leaves memory for half of a model's weights, besides the largest."""
    config = transformers.LlamaConfig.from_pretrained(folder)
    with torch.device("meta"):
        weights = [weight.numel() for weight in transformers.LlamaForCausalLM(config).parameters()]
    half = sum(weights) // 2 + max(weights)
    return str(working_memory(config, tokens) + half * getattr(torch, dtype).itemsize)


def watch_memory(peak: list[int]) -> None:
    """Keep the largest number of bytes in anonymous and shared pages of this process."""
    while True:
        fields = re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
        peak[0] = max(peak[0], 1024 * sum(map(int, fields)))
        time.sleep(SAMPLE_SECONDS)


def run_case(case: Case, folder: Path, threads: int, limit: float) -> dict[str, Any]:
    """The audit in a process of its own, which is ended after ``limit`` seconds."""
    arguments = [sys.executable, __file__, "--folder", str(folder), "--threads", str(threads), "--audit"]
    try:
        process = subprocess.run([*arguments, json.dumps(vars(case))], capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"error": f"stopped after {limit:.0f} seconds"}
    if process.returncode:
        return {"error": process.stderr.strip().splitlines()[-1]}
    return json.loads(process.stdout.splitlines()[-1])


def differences(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> dict[str, float]:
    """The largest difference of each compared number over the heads; of those that both have."""
    result = {}
    for name in COLUMNS:
        pairs = [(a[name], b[name]) for a, b in zip(actual, expected, strict=True)]
        values = [abs(a - b) for a, b in pairs if a is not None and b is not None]
        if any((a is None) != (b is None) for a, b in pairs):
            values.append(math.inf)
        result |= {name: max(values)} if values else {}
    return result


def cases_of(kind: str, shape: str, device: str, memory: str | None, tokens: int) -> Iterator[Case]:
    """The audits, each after the one that it is compared with."""
    if kind == "cpu":
        small = Case("small", tokens=256, effects="exact")
        yield small
        yield replace(small, memory=HALF)
        yield Case(shape, memory=memory, tokens=tokens)
        return
    for name in ("smollm2", "1b") if shape == "8b" else (shape,):
        for effects in ("none", "exact"):
            reference = Case(name, effects=effects, tokens=256)
            if name != "1b" or effects == "none":  # exact effects of the larger one would take too long on a CPU
                yield reference
            for dtype in ("float32", "bfloat16"):
                for bound in (None, HALF):
                    yield replace(reference, device=device, dtype=dtype, memory=bound)


def main() -> None:
    """Make the models, run the audits, print a line for each, and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", choices=("cpu", "gpu"), default="cpu", help="which audits")
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="shape of the large model")
    parser.add_argument("--device", default="cuda", help="device of --cases gpu")
    parser.add_argument("--memory", default="5G", help="bound on the memory of the large model's audit")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the large model's audit")
    parser.add_argument("--folder", type=Path, default=Path("runs/large"), help="folder of the models")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads on a CPU")
    parser.add_argument("--seconds", type=float, default=3600, help="time limit for all audits")
    parser.add_argument("--record", type=Path, help="file for the results, JSON")
    parser.add_argument("--audit", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.audit is not None:
        print(json.dumps(audit_here(Case(**given.audit), given.folder)))
        return
    deadline = time.monotonic() + given.seconds
    results: dict[Case, dict[str, Any]] = {}
    for case in cases_of(given.cases, given.shape, given.device, given.memory, given.tokens):
        make_model(given.folder, case.shape)
        result = results[case] = run_case(case, given.folder, given.threads, deadline - time.monotonic())
        on_device = replace(case, dtype="float32", memory=None)
        reference = case.reference if case.reference in results else on_device
        expected = results.get(reference, {}).get("heads")
        if case != reference and expected is not None and "heads" in result:
            result["differences"] = differences(result["heads"], expected)
        line = result.get("error") or f"{result['seconds']} s, {fmt_bytes(result['peak_bytes'])}"
        if case.memory is not None and not result.get("bytes_elsewhere"):
            raise SystemExit(f"{case.title}: all weights are in memory. {line}")
        line += "".join(f", {name} {value:.1e}" for name, value in result.get("differences", {}).items())
        print(f"{case.title}: {line}", flush=True)
        if given.record is not None:
            rows = [vars(each) | {key: x for key, x in row.items() if key != "heads"} for each, row in results.items()]
            write_json(given.record, {"environment": environment(), "threads": given.threads, "audits": rows})


if __name__ == "__main__":
    main()
