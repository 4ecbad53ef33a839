"""Where runs are kept for more than one machine: objects on any file system of fsspec, each whole or not there."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from toeplens.ground import EnvironmentFailure, InputError, write_bytes
from toeplens.ground.errors import first_line
from toeplens.ground.files import environment_failure, is_leftover, make_directory

# the modules of file systems where of several who make an object at once one alone is told that it did; what fsspec
# does for others (sftp, smb, webdav, ...) is to look whether it is there, and then to write it
_BY_ONE_ALONE = ("fsspec.implementations.local.", "fsspec.implementations.memory.", "s3fs.", "gcsfs.", "adlfs.")
_OF_THIS_MACHINE = (None, "file", "local")
_ROOTED = (*_OF_THIS_MACHINE, "memory")  # of others a URL names a host or a bucket first


def located(url: str) -> str:
    """The URL as it is understood wherever it is read: a path of this machine begins at its root.

    Raises `InputError` for an empty one, and for one of a file system that names no place there (``s3://``).
    """
    protocol, place = fsspec.core.split_protocol(url)
    scheme = re.match(r"([a-z0-9]+):", url)
    if not place.strip() or (protocol not in _ROOTED and place.startswith("/")):
        raise InputError(f"store: {url!r} was given, which names no place; it must be as /path or s3://bucket/path.")
    if protocol is None and scheme and scheme[1] in fsspec.available_protocols():
        raise InputError(f"store: {url!r} was given; a URL begins with {scheme[1]}://, a path with / or ./.")
    if protocol not in _OF_THIS_MACHINE:
        return url.rstrip("/")
    return os.path.normpath(LocalFileSystem._strip_protocol(url))


class Store:
    """Named objects under a URL: ``/path``, ``s3://bucket/path``, ``gs://``, ``abfs://``, ``memory://path``.

    An object is written in one piece: object stores do so by themselves, and on a disk it is put in place when it is
    whole. Nothing is remembered of what was seen there before. What a file system needs to know beside its URL
    (credentials, an endpoint) it takes from its own environment variables, as `AWS_ENDPOINT_URL`.

    Raises
        InputError          the URL names no file system that is installed, one where two could make the same object,
                            or a place that cannot be written to
        EnvironmentFailure  the file system does not answer, or refuses
    """

    def __init__(self, url: str) -> None:
        self.url = located(url)
        try:
            kind = fsspec.get_filesystem_class(fsspec.core.split_protocol(self.url)[0] or "file")
            if not f"{kind.__module__}.".startswith(_BY_ONE_ALONE):
                raise InputError(
                    f"store: {url} was given, on which two workers could take the same run; it must be a path, s3://, "
                    f"gs:// or abfs://."
                )
            self._fs, root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            raise InputError(f"store: {url} was given; its file system is not installed ({error}).") from None
        except InputError:
            raise
        except ValueError as error:
            raise InputError(f"store: {url} was given, which is no URL of a file system ({error}).") from None
        self._root = str(root).rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)

    def read(self, name: str) -> bytes | None:
        """The object of this name, or None."""
        with suppress(FileNotFoundError):
            return self._asked("read", name, self._fs.cat_file)
        return None

    def write(self, name: str, content: bytes) -> None:
        """Write an object, in place of one that may be there."""
        if self._local:
            make_directory(Path(self._path(name)).parent)
            write_bytes(Path(self._path(name)), content)
        else:
            self._asked("write", name, self._fs.pipe_file, content)

    def create(self, name: str, content: bytes) -> bool:
        """Write an object if there is none of this name; of all who try at once, one is told True."""
        try:
            if self._local:
                _create(Path(self._path(name)), content)
            else:
                self._asked("write", name, self._fs.pipe_file, content, mode="create")
        except FileExistsError:
            return False
        return True

    def names(self, under: str) -> list[str]:
        """Names of all objects under a name, sorted, the last parts of them."""
        with suppress(FileNotFoundError, NotADirectoryError):
            found = self._asked("list", under, self._fs.ls, detail=False)
            names = {str(path).rstrip("/").rsplit("/", 1)[-1] for path in found}
            return sorted(name for name in names if not is_leftover(Path(name)))
        return []

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, and all that is under them; those that are not there are gone already."""
        for name in names:
            with suppress(FileNotFoundError):
                self._asked("remove", name, self._fs.rm, recursive=True)

    def must_take(self) -> None:
        """Raise unless objects can be written here and read back."""
        name = f".{secrets.token_hex(8)}"
        try:
            taken = self.create(name, b"toeplens")
            if not taken or self.read(name) != b"toeplens" or self.create(name, b""):
                raise InputError(f"store: {self.url} does not keep what is written there; give another place.")
        except EnvironmentFailure as error:
            raise InputError(f"store: {self.url} was given, but {_small(error)}") from None
        finally:
            with suppress(EnvironmentFailure):
                self.remove([name])

    def must_outlive_a_process(self) -> None:
        """Raise where what is kept is seen by this process alone."""
        if isinstance(self._fs, MemoryFileSystem):
            raise InputError(f"store: {self.url} was given, which only one process sees; it must be seen by all.")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _asked(self, what: str, name: str, ask: Any, *given: Any, **options: Any) -> Any:
        try:
            return ask(self._path(name), *given, **options)
        except (FileNotFoundError, FileExistsError, NotADirectoryError) as error:
            if what != "write" or isinstance(error, FileExistsError):
                raise
            reason = str(error)  # a bucket that is not there
        except Exception as error:  # each file system has its own kinds for a network, a credential, a permission
            reason = first_line(error)
        raise EnvironmentFailure(f"cannot {what} {self.url}/{name}: {reason}; what was kept there before is kept.")


def _create(path: Path, content: bytes) -> None:
    """A file that is whole and was not there: a link is made by one alone, on network file systems too."""
    make_directory(path.parent)
    ready = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    write_bytes(ready, content)
    try:
        os.link(ready, path)
    except FileExistsError:
        raise
    except OSError as error:
        raise environment_failure(error, path) from None
    finally:
        ready.unlink(missing_ok=True)


def _small(error: Exception) -> str:
    text = str(error)
    return text[:1].lower() + text[1:]
