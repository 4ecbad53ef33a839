"""Texts of a page that are written in YAML: titles and captions of its figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from toeplens.report.kit.blocks import Block, View
from toeplens.studies.kit.claims import read_yaml


class Texts(dict[str, Any]):
    """The content of a YAML file; its ``figures`` have a title and a caption by id."""

    def __init__(self, path: Path) -> None:
        super().__init__(read_yaml(path))

    def block(
        self,
        id: str,
        views: list[View],
        width: str = "wide",
        words: Mapping[str, Any] | None = None,
        text: str = "",
        **more: Any,
    ) -> Block:
        """A figure with its title and caption.

        Arguments
            words  what is filled in for ``$name``
            text   name of its text (default: the id)
            more   its legend and its ramp
        """
        own = self["figures"][text or id]
        title, caption = (Template(own[name]).substitute(words or {}) for name in ("title", "caption"))
        return Block(id, title, caption, views, width, **more)
