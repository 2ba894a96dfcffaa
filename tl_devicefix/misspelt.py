"""Parts of messages: the name a user may have meant, and a value in few words."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

# At 0.76, transformers' argument "device_mesh" would pass for "device_map".
_NEAR = 0.85
_MAX_LENGTH = 120


def did_you_mean(name: object, names: Collection[str], at_least: float = 0.6) -> str:
    """Return "; did you mean 'balanced'?" with the nearest name, or "" if none is near."""
    close = difflib.get_close_matches(str(name), list(names), n=1, cutoff=at_least)
    return f"; did you mean {close[0]!r}?" if close else ""


def shown(value: object) -> str:
    """Return a value's repr; if it is long, the ends of a text, or the class of another value."""
    text = repr(value)
    if isinstance(value, str) and len(text) > _MAX_LENGTH:
        return f"{text[: _MAX_LENGTH - 20]}...{text[-20:]}"
    return text if len(text) <= _MAX_LENGTH and "\n" not in text else f"a {type(value).__name__}"


def refuse_unknown(
    function: str,
    arguments: Iterable[str],
    parameters: Iterable[str],
    where: str = "",
    passes_on: bool = False,
) -> None:
    """Refuse arguments that do not exist; `where` ends the clause, such as " for a directory".

    With `passes_on`, only near misses are refused: TransformerLens passes unknown arguments on to
    transformers, which ignores them.
    """
    parameters = list(parameters)
    for name in arguments:
        meant = did_you_mean(name, parameters, _NEAR if passes_on else 0.6)
        if name not in parameters and (meant or not passes_on):
            raise TypeError(f"{function} has no argument {name!r}{where}{meant}")
