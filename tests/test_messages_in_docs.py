"""Every message that docs/troubleshooting.md quotes is the package's, or a named library's."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
OF_LIBRARIES = (
    *("Expected all tensors to be on the same device", "indices should be either on cpu"),
    *("Found two parameters on different devices", "view size is not compatible", "CUDA error"),
    *("OutOfMemoryError", "derivative for aten", "No space left on device", "KeyError"),
    *("The current node timed out during startup", "not found. Valid official model names"),
    *("You are trying to access a gated repo", "Loading a GPTQ", "Loading an AWQ"),
)
"""Beginnings of what torch, transformers and the system say."""
VALUE = ""
"""Stands for a value that is filled in."""


def quoted():
    rows = (ROOT / "docs" / "troubleshooting.md").read_text().splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("| ")]
    return [quote for cell in cells for quote in re.findall(r"\*([^*]+)\*", cell)]


def words(text):
    return re.findall(r"[A-Za-z_]+", text)


def messages():
    """The words of every text in the package, with `VALUE` where one is filled in."""
    for path in sorted((ROOT / "tl_devicefix").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else None for p in node.values]
                yield [word for p in parts for word in ([VALUE] if p is None else words(str(p)))]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield words(node.value)


def n_same(quote, message):
    """How many words of the quote a message has, in one piece from where it begins, or -1."""
    best = {0: 0}
    for word in message:  # by how many words of the quote are matched, how many of these literally
        after = {0: 0}
        for at, same in best.items():
            if word == VALUE:
                for end in range(at, len(quote) + 1):
                    after[end] = max(after.get(end, -1), same)
            elif at < len(quote) and quote[at] == word:
                after[at + 1] = max(after.get(at + 1, -1), same + 1)
            elif at == len(quote):
                after[at] = max(after.get(at, -1), same)
        best = after
    return best.get(len(quote), -1)


def test_messages_that_the_page_quotes_are_in_the_source():
    texts = list(messages())
    for quote in quoted():
        if not quote.startswith(OF_LIBRARIES):
            a_text = re.sub(r"^[A-Z]\w+: ", "", quote)  # as a traceback begins
            for piece in filter(None, map(words, a_text.split("..."))):
                enough = 0.4 * len(piece)
                likely = (text for text in texts if len({*piece} & {*text}) > enough / 2)
                assert any(n_same(piece, text) >= enough for text in likely), piece
