"""`Around`: one protocol for everything that stands around a module's forward.

A call of blocks.8, which lives on cuda:1:

    CarryTo.pre_forward       brings the arguments to cuda:1    a forward pre-hook of torch's
      users' pre-hooks        see them on cuda:1
        SkipBlock.forward     returns what is known, or         the instance's `forward`
        StopAfter.forward     passes the output on, and ends the forward
          OffloadedForward    copies the weights in, and removes the copies
            the class's forward: TransformerLens's, a fused block's, or a remote block's
      BringHome.post_forward  brings the output home            a forward hook of torch's
      users' hooks            see it at home

`RunWhereItIs.forward` is around modules that users put into a block, `OffloadedPart.forward` around
all modules in an offloaded one, `AlibiAt.pre_forward` around blocks that need a table on their
device. A fused block's forward and a remote block's are methods of a class of their own: copies and
pickles of a block keep its class. A dry run adds torch's own hooks while it lasts: these note which
component runs, even if a pre-hook fails.
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
    """Stands around a module's forward, as accelerate's `ModelHook` does.

    To add another, write one or more of these three, and attach it where `align` attaches others:

    - `pre_forward` returns the arguments. It runs before users' pre-hooks, which see what it gives.
    - `forward` returns the output, of `run(*args, **kwargs)` or without running the module. It may
      undo something in `finally`.
    - `post_forward` returns the output. It runs before users' hooks, but not after an error.

    One object may be attached to many modules. It is copied and pickled with them, so it should
    hold no module but its own.
    """

    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Return the arguments that users' pre-hooks and the forward get."""
        return args, kwargs

    def forward(self, module: nn.Module, run: Forward, args: Args, kwargs: Kwargs) -> object:
        """Return the output; `run` is the forward that this stands around."""
        return run(*args, **kwargs)

    def post_forward(self, module: nn.Module, args: Args, output: object) -> object:
        """Return the output that users' hooks and the caller get."""
        return output

    def attach(self, module: nn.Module) -> None:
        """Stand around a module's forward, outermost."""
        cls = type(self)
        # Attach only what the class overrides: torch calls hooks that do nothing, too.
        if cls.pre_forward is not Around.pre_forward:
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        if cls.forward is not Around.forward:
            # A Bridge's component passes setattr on to the module that it wraps.
            vars(module)["forward"] = AroundForward(self, module)
        if cls.post_forward is not Around.post_forward:
            module.register_forward_hook(self.post_forward, prepend=True)  # before users' hooks

    @classmethod
    def detach(cls, module: nn.Module) -> None:
        """Remove all objects of this class from a module, also those that came with a copy."""
        # Find them by class: there are no handles of hooks that were copied or unpickled.
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in [*hooks.items()]:
                if isinstance(getattr(hook, "__self__", None), cls):
                    del hooks[key]
                    # torch records separately that the hook takes keyword arguments.
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
        """Return the outermost object of this class whose `forward` is around a module's."""
        forward = vars(module).get("forward")
        while isinstance(forward, AroundForward):
            if isinstance(forward.around, cls):
                return forward.around
            forward = forward.inner
        return None


def innermost(forward: Any) -> Any:
    """Return the innermost `forward` in a module's `__dict__`; None if that is the class's."""
    while isinstance(forward, AroundForward):
        forward = forward.inner
    return forward


class AroundForward:
    """The `forward` of a module that an `Around` stands around; `inner` is the next, if any."""

    def __init__(self, around: Around, module: nn.Module) -> None:
        self.around, self.module, self.inner = around, module, vars(module).get("forward")

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the module."""
        return self.around.forward(self.module, self.run, args, kwargs)

    def run(self, *args: object, **kwargs: object) -> object:
        """Run the next forward, which is the class's own if there is no other."""
        # Looked up at each call: fusing a block changes its class.
        forward = self.inner or type(self.module).forward.__get__(self.module)
        return forward(*args, **kwargs)
