"""What a patch is: one thing that is replaced in TransformerLens, for which versions, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """One thing that is replaced."""

    name: str
    """The attribute of `owner`, or the function."""
    replacement: Callable[..., Any] | None
    """What takes its place; None if it is only called, and has to be there.

    If its first parameter is `original`, it is called with what is installed first, and then with
    the arguments; else with the arguments alone. A classmethod's gets the class.
    """
    parameters: tuple[str, ...]
    """Parameters that the installed target must have, in this order, for the patch to be right."""
    why: str
    owner: str | None = "HookedTransformer"
    """The class it is an attribute of; None for a function that several modules import."""
    since: str = "2.16.1"
    """The first TransformerLens version that has it."""
    until: str = "3.9"
    """The last one."""

    @property
    def target(self) -> str:
        """What is replaced, as a person would write it."""
        return f"{self.owner}.{self.name}" if self.owner else self.name
