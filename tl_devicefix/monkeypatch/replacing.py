"""Replace attributes, or one module's forward, for a while, and put them back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import nn

Kind = TypeVar("Kind", bound="AroundForward")
Replacement = tuple[Any, str, Callable[[Any], Any]]
"""An owner, the name of its attribute, and a function that makes the new value."""


class Replacing:
    """Attributes that are replaced for all threads, for as long as any of them is within it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._n_within = 0
        self._replaced: dict[tuple[int, str], tuple[Any, Any, Any]] = {}

    @contextlib.contextmanager
    def __call__(self, replacements: Iterable[Replacement]) -> Iterator[None]:
        """Replace these too, within a `with` block."""
        with self._lock:
            self._n_within += 1
            for owner, name, make in replacements:
                if (id(owner), name) not in self._replaced:
                    before = getattr(owner, name)
                    after = make(before)
                    self._replaced[id(owner), name] = owner, before, after
                    setattr(owner, name, after)
        try:
            yield
        finally:
            with self._lock:
                self._n_within -= 1
                if not self._n_within:
                    self._restore()

    def _restore(self) -> None:
        for (_, name), (owner, before, after) in self._replaced.items():
            if getattr(owner, name) is after:  # or else someone has replaced it since
                setattr(owner, name, before)
        self._replaced.clear()


class AroundForward:
    """Stands in the place of one module's forward, and may run it. Others may be around it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own: Callable[..., Any] | None = None
        """The forward of this very module, or the next around it, if that is not its class's."""

    @classmethod
    def of(cls: type[Kind], module: nn.Module) -> Kind | None:
        """The one of this class around a module's forward."""
        around = vars(module).get("forward")
        while isinstance(around, AroundForward) and not isinstance(around, cls):
            around = around.own
        return around if isinstance(around, cls) else None

    def __enter__(self: Kind) -> Kind:
        self.put()
        return self

    def __exit__(self, *error: object) -> None:
        self.take_off()

    def put(self) -> None:
        """Stand around the module's forward, outermost."""
        self.own = vars(self.module).get("forward")
        # Not by setattr, which the components of a Bridge hand on to what they wrap.
        vars(self.module)["forward"] = self

    def take_off(self) -> None:
        """Leave the module's forward as if this had never been around it."""
        around = vars(self.module).get("forward")
        if around is self and self.own is None:
            del vars(self.module)["forward"]
        elif around is self:
            vars(self.module)["forward"] = self.own
        while isinstance(around, AroundForward):
            if around.own is self:
                around.own = self.own
            around = around.own

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward that this stands around."""
        forward = self.own or type(self.module).forward.__get__(self.module)
        return forward(*args, **kwargs)
