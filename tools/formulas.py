"""A hook of mkdocs: formulas between dollar signs become MathML when the documentation is built; no script, no network.

Markdown's `pymdownx.arithmatex` marks them; latex2mathml, which the cards use too, writes them. A formula that it does
not know in full stops the build.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

MARKED = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)


def written(match: re.Match[str]) -> str:
    """One marked formula as MathML; a block stands on a line of its own."""
    text = html.unescape(match[2]).strip()
    block = match[1] == "div"
    made = convert(text[2:-2].strip(), display="block" if block else "inline")
    if "\\" in html.unescape(re.sub(r"<[^>]*>", "", made)).replace("∖", ""):
        raise ValueError(f"latex2mathml does not know all of the formula {text}")
    return f'<div class="formula">{made}</div>' if block else made


def on_page_content(content: str, **_: Any) -> str:
    """Called by mkdocs with each page's HTML."""
    return MARKED.sub(written, content)
