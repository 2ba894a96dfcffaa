"""Patch TransformerLens as soon as it is imported, so that this package need not import it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


class _ImportHook(MetaPathFinder):
    """Calls a function after the first import that has imported TransformerLens.

    That is an import of TransformerLens, or of a module of this package that imports it: it is
    complete before the function is called, which imports other modules of this package.
    """

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self.waits = True
        self._of_thread = threading.local()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        ours = name == "transformer_lens" or name.startswith("tl_devicefix.")
        if not (ours and self.waits) or getattr(self._of_thread, "is_within", False):
            return None
        spec = self._within(importlib.util.find_spec, name)  # by the other finders
        if spec is not None and spec.loader is not None:
            # The loader is this module's alone, so it may have another method for once.
            executes = functools.partial(self._execute, spec.loader)
            spec.loader.exec_module = executes
        return spec

    def _execute(self, loader: Any, module: Any) -> None:
        vars(loader).pop("exec_module", None)
        self._within(loader.exec_module, module)
        if self.waits and "transformer_lens" in sys.modules:
            self.call()

    def call(self) -> None:
        """Call the function; if it raises an error, the next import calls it again.

        TransformerLens is imported first, while this thread holds no lock of a module of ours: the
        thread that imports it already waits for those, and then this one waits for that thread.
        """
        importlib.import_module("transformer_lens")
        self._within(self._then)
        self.waits = False  # and stays there: other threads may be going through the finders

    def _within(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function whose imports are part of the one that is under way."""
        before = getattr(self._of_thread, "is_within", False)
        self._of_thread.is_within = True
        try:
            return function(*arguments)
        finally:
            self._of_thread.is_within = before


def when_imported(then: Callable[[], None]) -> None:
    """Call a function once TransformerLens is imported: now, if it is already."""
    if "transformer_lens" in sys.modules:
        then()
    elif not _waiting():  # as if this package is reloaded
        sys.meta_path.insert(0, _ImportHook(then))


def call_now() -> None:
    """Call the function that waits for TransformerLens, if one does."""
    for hook in _waiting():
        hook.call()


def _waiting() -> list[_ImportHook]:
    return [finder for finder in sys.meta_path if isinstance(finder, _ImportHook) and finder.waits]
