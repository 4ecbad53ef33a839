"""What each machine of a cluster is asked before it is given work: has it this package, does it see what is shown."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toeplens.engine.store import Store
from toeplens.ground import EnvironmentFailure, InputError
from toeplens.ground.errors import first_line

_SECONDS = 120.0  # for a machine to start a process that imports this package


@dataclass(frozen=True)
class Token:
    """An object that all machines must see.

    field   of what was given: ``store``, or ``out`` where there is none
    place   a URL or a directory, in which it lies
    """

    field: str
    place: str
    name: str


@contextmanager
def on_show(store: str | None, out: Path) -> Iterator[Token]:
    """A token in the store; without one, beside ``out``, which then has to bring a run from one machine to another."""
    field, place = ("out", str(out.absolute().parent)) if store is None else ("store", store)
    token = Token(field, place, f".{secrets.token_hex(8)}.seen")
    shown = Store(place)
    shown.write(token.name, b"toeplens")
    try:
        yield token
    finally:
        with suppress(EnvironmentFailure):
            shown.remove([token.name])


def must_be_alike(machines: Mapping[str, str], token: Token | None, packages: Sequence[str]) -> None:
    """Raise unless each machine has this package's source and these packages' versions, and sees the token.

    ``machines`` are Ray's names of them, by what people call them. A version's local part (``+cu128``) may differ, and
    a package that is not installed here is not asked for.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probe, seen = _probe(), None if token is None else (token.place, token.name)
    own = probe(None, packages)
    remote: Any = ray.remote(probe)
    asked = {}
    for name, node in machines.items():
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        asked[name] = remote.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(seen, packages)
    for name, answer in asked.items():
        try:
            found: Any = ray.get(answer, timeout=_SECONDS)
        except Exception as error:
            reason = first_line(error)
            raise EnvironmentFailure(f"the cluster's machine {name} does not answer: {reason}.") from None
        _must_be(name, found, own, token)


def _must_be(name: str, found: dict[str, Any], own: dict[str, Any], token: Token | None) -> None:
    """Raise unless a machine's answer is this one's."""
    machine = f"the cluster's machine {name}"
    if "missing" in found:
        raise InputError(f"address: {machine} cannot load toeplens ({found['missing']}).")
    for package, version in own["versions"].items():
        theirs = found["versions"].get(package)
        if version is not None and theirs != version:
            what = f"no {package}" if theirs is None else f"{package} {theirs}"
            raise InputError(f"address: {machine} has {what}; this one has {version}.")
    if found["source"] != own["source"]:
        raise InputError(
            f"address: {machine} has toeplens {own['versions']['toeplens']} of another source; install the same on "
            f"both."
        )
    if token is not None and found["sees"] is not True:
        why = f" ({found['sees']})" if found["sees"] else ""
        give = "a directory that all share, or a store" if token.field == "out" else "one that all machines see"
        raise InputError(f"{token.field}: {machine} does not see what lies in {token.place}{why}; give {give}.")


def _probe() -> Callable[..., dict[str, Any]]:
    """What each machine is asked; made inside a function, so that it travels whole: the package may not be there."""

    def probe(seen: tuple[str, str] | None, packages: Sequence[str]) -> dict[str, Any]:
        import hashlib
        import importlib
        from importlib import metadata
        from pathlib import Path

        try:
            package = Path(str(importlib.import_module("toeplens").__file__)).parent
            versions = {"toeplens": importlib.import_module("toeplens.version").__version__}
        except Exception as error:
            return {"missing": f"{type(error).__name__}: {error}"}
        for name in packages:
            try:
                versions[name] = metadata.version(name).partition("+")[0]
            except metadata.PackageNotFoundError:
                versions[name] = None
        digest = hashlib.sha256()
        for path in sorted(package.rglob("*.py")):
            digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
        sees: bool | str = True
        if seen is not None:
            try:
                store = importlib.import_module("toeplens.engine.store").Store(seen[0])
                sees = store.read(seen[1]) is not None
            except Exception as error:
                sees = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
        return {"versions": versions, "source": digest.hexdigest(), "sees": sees}

    return probe
