"""Memory and cores of this machine, and out-of-memory detection."""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

from toeplens.utils.errors import InputError, invalid

MAX_SEEDS = 100
NUMBER = r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*"  # a positive decimal number
_MMAP_THRESHOLD, _LARGE_BLOCK = -3, 4 << 20  # an option of mallopt, and its value in bytes
_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_OUT_OF_MEMORY = re.compile("not enough memory|can't allocate memory|out of memory", re.IGNORECASE)  # torch's messages
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # container limits


@cache
def memory() -> int:
    """Bytes of memory available to this process: the machine's, or its container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in map(Path, _CGROUP_LIMITS):
        try:
            limit = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if limit.isdecimal():
            total = min(total, int(limit))
    return total


def free_memory() -> int:
    """Bytes of memory that are free or reclaimable, on Linux; elsewhere `memory`."""
    try:
        fields = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return memory()
    match = re.search(r"^MemAvailable:\s+(\d+) kB", fields, re.MULTILINE)
    return memory() if match is None else min(memory(), 1024 * int(match[1]))


def return_freed_memory() -> None:
    """Return large blocks of this process to the system when they are freed, on Linux with glibc; by default it keeps
    those of up to 32 MB, of which a long pass leaves gigabytes."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE_BLOCK)


def num_cores() -> int:
    """Number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fmt_bytes(count: int) -> str:
    """A readable number of bytes: ``310 MB``, ``1.2 GB``."""
    for unit, name in ((10**12, "TB"), (10**9, "GB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}" if count < 100 * unit else f"{count // unit} {name}"
    return f"{max(1, count // 10**6)} MB"


def parse_bytes(field: str, text: str) -> int:
    """``500M``, ``4G`` or plain bytes."""
    match = re.fullmatch(rf"{NUMBER}([KMGT]?)B?\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise invalid(field, "be a positive size such as 500M or 4G", text)
    return int(float(match[1]) * _BYTES[match[2].upper()])


def check_memory(text: str, min_bytes: int) -> None:
    """Raise an `InputError`, which begins with ``text``, unless ``min_bytes`` fit in memory."""
    if min_bytes > memory():
        raise InputError(f"{text} at least {fmt_bytes(min_bytes)} of memory. This machine has {fmt_bytes(memory())}.")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory, in Python or torch (without importing torch)."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
