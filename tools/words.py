"""Fail if the documentation or the source uses words that this project's style replaces by standard terms.

Checks Markdown, templates, study files, and the strings and comments of Python source; and that no module, class or
function has a pronoun or a participle as its whole name. Part of `make check`.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS_FILES = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/**/*.md",
    "docs/**/*.ipynb",
    "src/**/*.j2",
    "src/**/*.yaml",
    "src/**/*.js",
]
SOURCE_FILES = ["src/**/*.py", "examples/*.py"]
REPLACEMENTS = {
    r"silenc(e|es|ed|ing)": "ablate, zero-ablate",
    r"points lost|lost points": "accuracy drop",
    r"stands? still|standing still": "frozen",
    r"stopped (frequenc|pair|band)\w*|(frequencies|pairs|bands) (are |is )?stopped": "frozen",
    r"(a|one|each|every|several|ten|at) moments?": "checkpoint",
    r"knows? nothing": "random-weight baseline",
    r"nats an? \w+": "nats per token",
    r"bits an? \w+": "bits per byte",
    r"best guess": "length-only baseline",
    r"the (released )?program": "the released code",
    r"carr(y|ies|ied|ying) (it |them |this )?out": "run",
    r"(go|goes|going|gone|went) on": "resume, continue",
    r"(what is|is|are) hidden": "masked",
    r"(above|below|under|over|at) the bar|bars? (of )?\d": "threshold",
    r"leaned": "indicative",
    r"foret(ell|old|ells|elling)": "predict",
    r"takes? apart|taken apart|took apart|taking apart": "decompose",
    r"told (apart|from|of|by|in|at)|(is|are|was|were|be) told": "reported, distinguished",
    r"(was|were) given; (it|they)": "must be ..., got ...",
    r"unless given": "(default: ...)",
    r"(a|each|per) (text|sequence)s? of a task": "sequence",
    r"beside": "next to, with",
    r"lay(s|ing)? (them |two )?side by side": "compare",
    r"who(ever)? (must|wants?|knows?|cannot)": "if you ...",
    r"what (one|you) (buy|pay)s?": "benefits and costs",
}
ALLOWED = {  # path: what may stand there, as a regular expression
    "src/toeplens/engine/head_probe.py": "at moments",  # recorded with runs
    "src/toeplens/tasks/sequences.py": "carry out",  # of a sum
}
NO_NAME = re.compile(  # words that say nothing about what has this name
    "_?(told|asked|found|kept|seen|given|made|done|begun|held|shown|taken|left|got|met|said|sent|known|gone"
    "|whole|own|each|every|others?|ones?|it|they|them|this|that|these|those|some|any|all|both|none"
    "|here|there|where|when|how|why|what|who|whose|which|now|then|once|still|again|apart|beside|away|along"
    "|thing|way|place|look|watch|more|most|less|least|rest|such|same|else)_?",
    re.IGNORECASE,
)
PARTICIPLE = re.compile(r"(?i:(?!.*(composed|learned|pretrained|batched|compiled|related|renamed)))_?[A-Za-z][a-z]*ed")
NAMES = re.compile(r"`[^`]*`|\{[^{}]*\}|\"[\w.-]*\"|'[\w.-]*'")  # code, not prose
DEFINITIONS = ast.ClassDef | ast.FunctionDef
PATTERN = re.compile("|".join(rf"(?P<w{n}>\b(?:{each})\b)" for n, each in enumerate(REPLACEMENTS)), re.IGNORECASE)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of prose with their numbers; of Python source only comments and strings."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), start=1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from enumerate(token.string.splitlines(), start=token.start[0])


def find_replaced_words() -> Iterator[str]:
    """One line for each word that should be replaced."""
    for path in sorted({path for pattern in DOCS_FILES + SOURCE_FILES for path in ROOT.glob(pattern)}):
        name = str(path.relative_to(ROOT))
        for number, line in prose(path):
            for match in PATTERN.finditer(NAMES.sub("``", line)):
                if not re.fullmatch(ALLOWED.get(name, ""), match[0]):
                    instead = list(REPLACEMENTS.values())[int(str(match.lastgroup)[1:])]
                    yield f"{name}:{number}: {match[0]!r}: write {instead!r}"


def find_vague_names() -> Iterator[str]:
    """One line for each module, class or function called one of `NO_NAME`, or, at module level, a participle."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        names = {(node.name, node.lineno) for node in ast.walk(tree) if isinstance(node, DEFINITIONS)}
        names = {(name, line) for name, line in names if NO_NAME.fullmatch(name)}
        outer = [(path.stem, 1), *((node.name, node.lineno) for node in tree.body if isinstance(node, DEFINITIONS))]
        names |= {(name, line) for name, line in outer if PARTICIPLE.fullmatch(name)}
        for name, line in sorted(names, key=lambda item: item[1]):
            yield f"{path.relative_to(ROOT)}:{line}: {name}: say what it is (a noun) or does (a verb)"


if __name__ == "__main__":
    lines = [*find_replaced_words(), *find_vague_names()]
    print("\n".join(lines))
    sys.exit(bool(lines))
