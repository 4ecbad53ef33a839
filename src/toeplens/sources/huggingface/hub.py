"""Models by their name on the hub: it is asked once, with a short limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toeplens.ground import InputError
from toeplens.sources.huggingface.failures import words

LIMIT = 5  # seconds that the hub has to answer
_NAMED = 100  # characters of what is no name that are told
_CONFIG = "config.json"


def is_there(name: str) -> bool:
    """Whether it is a file or directory. Raises `InputError` for what can be the name of none."""
    try:
        return Path(name).exists()
    except OSError as error:
        told = name if len(name) <= _NAMED else f"{name[:_NAMED]} ..."
        raise InputError(f"model: {told} could not be loaded: {(error.strerror or str(error)).lower()}.") from None


def hub_options(name: str) -> dict[str, Any]:
    """What to load a model with: nothing for a directory and for a name that the hub knows; else its cache alone.

    Raises `InputError` for what is no directory, and is not given by the hub nor by its cache.
    """
    if is_there(name):
        return {}
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        get_hf_file_metadata(hf_hub_url(name, _CONFIG), timeout=LIMIT)
        return {}
    except HFValidationError:
        why = "and it is no name that the hub could have"
    except HfHubHTTPError as error:
        if isinstance(try_to_load_from_cache(name, _CONFIG), str):
            return {"local_files_only": True}
        why = f"and the hub does not give it ({words(error)})"
    except Exception:  # whatever a network can do
        if isinstance(try_to_load_from_cache(name, _CONFIG), str):
            return {"local_files_only": True}
        why = f"the hub did not answer (it was asked once, for at most {LIMIT} seconds), and its cache does not have it"
    raise InputError(f"model: {name} could not be loaded: there is no such directory, {why}.") from None
