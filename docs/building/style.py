"""Count the style of pages, docstrings, comments and test names; fail if one exceeds its limit.

    python docs/building/style.py

Words are those of a page without its code. Each style figure is counted per 1000 words of all user
pages together, so that one page may have more of something and another less.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]

USER_PAGES = {
    "README.md": 400,
    "docs/comparison.md": 400,
    "docs/install.md": 350,
    "docs/tutorial.md": 1200,
    "docs/fit_a_model.md": 800,
    "docs/load.md": 750,
    "docs/single_device_code.md": 680,
    "docs/transformer_bridge.md": 600,
    "docs/offload.md": 500,
    "docs/many_inputs.md": 950,
    "docs/save_activations.md": 800,
    "docs/train_saes.md": 250,
    "docs/long_contexts.md": 500,
    "docs/several_hosts.md": 800,
    "docs/slurm.md": 400,
    "docs/check.md": 350,
    "docs/numbers.md": 400,
    "docs/simulate.md": 400,
    "docs/what_lives_where.md": 600,
    "docs/how_it_works.md": 1500,
    "docs/command_line.md": 500,
    "docs/cheat_sheet.md": 350,
    "docs/compatibility.md": 1350,
    "docs/troubleshooting.md": 1200,
    "docs/benchmarks.md": 1500,
    "docs/glossary.md": 250,
}
CONTRIBUTORS_PAGES = {
    "CONTRIBUTING.md": 450,
    "docs/architecture.md": 1200,
    "docs/adding.md": 650,
    "docs/testing_on_gpus.md": 700,
}
"""A page -> the most words that it may have; tables of README, which is the index, do not count."""


class Style(NamedTuple):
    """A figure of style: what is counted, and the limits of its number per 1000 words."""

    name: str
    pattern: str
    at_least: float = 0
    at_most: float = float("inf")


_OUR_WORDS = (
    r"\bover \w+ (?:simulated )?(?:devices|GPUs)\b|\b(?:mended|under way|taken away|as ever)\b"
)
"""Say across, fixed, in flight, removed, as usual; and a tiny model, for twin."""

STYLES = (
    Style('"what ..."', r"\bwhat\b", at_most=3),
    Style('"you"', r"\b(?:you|your|yours|yourself)\b", at_least=10),
    Style("reasons", r"\b(?:because|for example|so that)\b", at_least=2),
    Style("words of ours", rf"{_OUR_WORDS}|\btwins?\b", at_most=0),
    Style("code blocks", r"^ *```[ \w{].*$", at_least=6),
)


_COMMENT = r"(?:^|  )# (?!-|type: |noqa|fmt: )(.*)"
"""A comment that is written for readers, at a line's start or end."""
_COMMENT_BLOCK = r"(?m)^(?:[ ]*# .*\n)+|  # .*$"
"""Lines of comments that follow each other, or a comment at a line's end."""


class CodeStyle(NamedTuple):
    """A figure of the style of code, and its limit."""

    name: str
    value: float
    at_least: float = 0
    at_most: float = float("inf")


def docstrings(tree: ast.Module) -> list[str]:
    """Return the docstrings of a module, its classes and its functions."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return [docstring for docstring in found if docstring]


def code_styles() -> list[CodeStyle]:
    """Count the package's docstrings and comments, and the tests' names."""
    sources = [path.read_text() for path in (REPOSITORY / "tl_devicefix").rglob("*.py")]
    lines = [line.strip() for source in sources for line in source.splitlines()]
    found = [docstring for source in sources for docstring in docstrings(ast.parse(source))]
    vague = [text for text in found if re.match(r"(?:Whether|What|Of|Those|Whoever)\b", text)]
    comments = [comment for line in lines for comment in re.findall(_COMMENT, line)]
    blocks = [block for source in sources for block in re.findall(_COMMENT_BLOCK, source)]
    ours = [text for text in found if re.search(_OUR_WORDS, text)]
    begins = r"(?:Not|Only now|Held|Sorted|Disabled|Keyed|Called|Apart|Names)\b"
    headless = [comment for comment in comments if re.match(begins, comment)]
    because = [block for block in blocks if re.search(r"\bbecause\b", block, re.I)]
    tests = [path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py")]
    names = [name for test in tests for name in re.findall(r"def (test_\w+)", test)]
    return [
        CodeStyle('docstrings that begin with "Whether", "What", "Of"', len(vague), at_most=0),
        CodeStyle(
            'comment blocks with "because", in %', 100 * len(because) / len(blocks), at_most=10
        ),
        CodeStyle("docstrings with words of ours", len(ours), at_most=0),
        CodeStyle("comments without a subject", len(headless), at_most=0),
        CodeStyle("comments, in % of lines", 100 * len(comments) / len(lines), at_least=4.5),
        CodeStyle('"Any"', len(re.findall(r"\bAny\b", "\n".join(sources))), at_most=370),
        CodeStyle(
            "test names of more than 60 characters",
            sum(len(name) > 60 for name in names),
            at_most=0,
        ),
    ]


def prose(page: str) -> str:
    """Return the words of a page, without code, comments, links' targets and markup."""
    page = re.sub(r"^( *)```.*?^\1```$", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"<!--.*?-->|<[^>]+>|`[^`]+`|^:::.*$", "", page, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\]\([^)]*\)|\]\[[^\]]*\]", " ", page)


def words(text: str) -> int:
    """Return how many words a text has."""
    return len(re.findall(r"[^\W\d_][\w'.-]*", text))


def main() -> int:
    """Print a line for each page; return 1 if a figure exceeds its limit."""
    faults = []
    total = dict.fromkeys((style.name for style in STYLES), 0)
    all_words = 0
    print(f"{'page':32}{'words':>7}{'budget':>8}", *(f"{style.name:>12}" for style in STYLES))
    for name, budget in (USER_PAGES | CONTRIBUTORS_PAGES).items():
        page = (REPOSITORY / name).read_text()
        text = prose(page)
        if name == "README.md":
            text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
        count = words(text)
        if count > budget:
            faults.append(f"{name} has {count} words, and its budget is {budget}")
        figures = {}
        for style in STYLES:
            where = page if style.name == "code blocks" else text
            figures[style.name] = len(re.findall(style.pattern, where, re.I | re.M))
        print(f"{name:32}{count:7}{budget:8}", *(f"{figure:12}" for figure in figures.values()))
        if name in USER_PAGES:
            all_words += count
            for figure, number in figures.items():
                total[figure] += number
    rates = {name: 1000 * number / all_words for name, number in total.items()}
    print(f"{'per 1000 words of user pages':47}", *(f"{rate:12.1f}" for rate in rates.values()))
    for style in STYLES:
        if not style.at_least <= rates[style.name] <= style.at_most:
            limit = f"at least {style.at_least}" if style.at_least else f"at most {style.at_most}"
            faults.append(f"{style.name}: {rates[style.name]:.1f} per 1000 words, not {limit}")
    for figure in code_styles():
        print(f"{figure.name:60}{figure.value:7.1f}")
        if not figure.at_least <= figure.value <= figure.at_most:
            limits = f"at least {figure.at_least}, at most {figure.at_most}"
            faults.append(f"{figure.name}: {figure.value:.1f}, and it has to be {limits}")
    print("\n".join(faults) or "all as it should be")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
