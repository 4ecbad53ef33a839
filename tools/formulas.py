"""A hook of mkdocs that converts formulas between dollar signs to MathML, without scripts or network.

`pymdownx.arithmatex` marks the formulas, and latex2mathml converts them. A formula that it does not know completely
stops the build.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

MARKED = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)


def mathml_of(match: re.Match[str]) -> str:
    """One marked formula as MathML; a block stands on a line of its own."""
    text = html.unescape(match[2]).strip()
    block = match[1] == "div"
    mathml = convert(text[2:-2].strip(), display="block" if block else "inline")
    if "\\" in html.unescape(re.sub(r"<[^>]*>", "", mathml)).replace("∖", ""):
        raise ValueError(f"latex2mathml does not know all of the formula {text}")
    return f'<div class="formula">{mathml}</div>' if block else mathml


def on_page_content(content: str, **_: Any) -> str:
    """Called by mkdocs with each page's HTML."""
    return MARKED.sub(mathml_of, content)
