"""`Around`: one protocol for everything that wraps a module's forward.

docs/architecture.md ("A forward") draws a block's call, with all that is around it. Fused and
remote blocks need no `Around`: their class has another forward, and copies and pickles keep the
class. A dry run adds plain torch hooks, which note the running component even if a pre-hook fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Forward = Callable[..., Any]
AroundT = TypeVar("AroundT", bound="Around")


class Around:
    """Wraps a module's forward, like accelerate's `ModelHook`.

    A subclass overrides one or more of these methods; `attach` puts it on a module.

    - `pre_forward` returns the arguments. It runs before users' pre-hooks, which see its result.
    - `forward` returns the output, with or without calling `run(*args, **kwargs)`. Clean up in
      `finally`.
    - `post_forward` returns the output. It runs before users' hooks; not if the forward fails.

    One object may be attached to many modules. It is copied and pickled with them, and so is any
    module that it holds for longer than a forward.
    """

    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Return the arguments that users' pre-hooks and the forward get."""
        return args, kwargs

    def forward(self, module: nn.Module, run: Forward, args: Args, kwargs: Kwargs) -> object:
        """Return the output; `run` is the wrapped forward."""
        return run(*args, **kwargs)

    def post_forward(self, module: nn.Module, args: Args, output: object) -> object:
        """Return the output that users' hooks and the caller get."""
        return output

    def attach(self, module: nn.Module) -> None:
        """Wrap a module's forward, outside of what wraps it already."""
        cls = type(self)
        # Attach only what the class overrides: each hook costs a call.
        if cls.pre_forward is not Around.pre_forward:
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        if cls.forward is not Around.forward:
            # Bypass setattr: a Bridge's component passes it on to the module that it wraps.
            vars(module)["forward"] = AroundForward(self, module)
        if cls.post_forward is not Around.post_forward:
            module.register_forward_hook(self.post_forward, prepend=True)  # before users' hooks

    @classmethod
    def detach(cls, module: nn.Module) -> None:
        """Remove all objects of this class from a module, even from a copy."""
        # Find hooks by class: those that were copied or unpickled have no handles.
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in [*hooks.items()]:
                if isinstance(getattr(hook, "__self__", None), cls):
                    del hooks[key]
                    # torch records separately which hooks take keyword arguments.
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
        outer, forward = None, vars(module).get("forward")
        while isinstance(forward, AroundForward):
            if not isinstance(forward.around, cls):
                outer = forward
            elif outer is not None:
                outer.inner = forward.inner
            elif forward.inner is not None:
                vars(module)["forward"] = forward.inner
            else:
                del vars(module)["forward"]
            forward = forward.inner

    @classmethod
    def of(cls: type[AroundT], module: nn.Module) -> AroundT | None:
        """Return the outermost object of this class whose `forward` wraps a module's, if any."""
        forward = vars(module).get("forward")
        while isinstance(forward, AroundForward):
            if isinstance(forward.around, cls):
                return forward.around
            forward = forward.inner
        return None


class ResumesModes(Around):
    """Resumes modes that pause in a model's forward while a module, and those in it, run."""


def innermost(forward: Any) -> Any:
    """Unwrap the `forward` of a module's `__dict__`; None if the class's forward is innermost."""
    while isinstance(forward, AroundForward):
        forward = forward.inner
    return forward


class AroundForward:
    """The `forward` of a wrapped module; `inner` is the one that it wraps, or None."""

    def __init__(self, around: Around, module: nn.Module) -> None:
        self.around, self.module, self.inner = around, module, vars(module).get("forward")

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the module."""
        return self.around.forward(self.module, self.run, args, kwargs)

    def run(self, *args: object, **kwargs: object) -> object:
        """Call the inner forward; if there is none, the class's."""
        # Look it up at each call: fusing a block changes its class.
        forward = self.inner or type(self.module).forward.__get__(self.module)
        return forward(*args, **kwargs)
