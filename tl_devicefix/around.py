"""What stands around a module's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

Kind = TypeVar("Kind", bound="AroundForward")


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
