"""One protocol for all that stands around a module's forward: `Around`.

A call of blocks.8, which lives on cuda:1:

    CarryTo.pre_forward       brings the arguments to cuda:1    a forward pre-hook of torch's
      users' pre-hooks        see them on cuda:1
        SkipBlock.forward     returns what is known, or         the instance's `forward`
        StopAfter.forward     ends the model's forward after it
          OffloadedForward    brings the weights, and takes them away again
            the class's forward: TransformerLens's, a fused block's, or a remote block's
      BringHome.post_forward  brings the output home            a forward hook of torch's
      users' hooks            see it at home

`RunWhereItIs.forward` is around modules that users put into a block, `AlibiAt.pre_forward` around
blocks that need a table on their device. A fused block's forward and a remote block's are those of
a class, because copies and pickles of a block keep its class. A dry run adds hooks of torch's own
while it lasts, because it notes which component runs even where a pre-hook fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Forward = Callable[..., Any]
Kind = TypeVar("Kind", bound="Around")


class Around:
    """Stands around a module's forward, as accelerate's `ModelHook` does.

    To add another, write one or more of these, and have `align` attach it:

    - `pre_forward`, which runs before users' own pre-hooks, so that these see what it returns;
    - `forward`, which decides whether the module's own runs, and may undo something in `finally`;
    - `post_forward`, which runs before users' own hooks, but not after an error.

    One object may stand around many modules. It is deep-copied and pickled with them, so it should
    hold none, unless it is a module's own.
    """

    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Return the arguments that users' pre-hooks and the forward get.

        Args:
            module: the module that is called.
            args: its positional arguments.
            kwargs: its named arguments.
        """
        return args, kwargs

    def forward(self, module: nn.Module, run: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Return the output of the module's forward.

        Args:
            module: the module that is called.
            run: the forward that this stands around; call it once, or not at all.
            args: the positional arguments.
            kwargs: the named arguments.
        """
        return run(*args, **kwargs)

    def post_forward(self, module: nn.Module, args: Args, output: Any) -> Any:
        """Return the output that users' hooks and the caller get.

        Args:
            module: the module that was called.
            args: the positional arguments that its forward got.
            output: what its forward returned.
        """
        return output

    def attach(self, module: nn.Module) -> None:
        """Stand around a module's forward, outermost, in the place of another of this class."""
        kind = type(self)
        kind.detach(module)
        if kind.pre_forward is not Around.pre_forward:
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        if kind.forward is not Around.forward:
            # Not by setattr, because the components of a Bridge hand it on to what they wrap.
            vars(module)["forward"] = _Forward(self, module)
        if kind.post_forward is not Around.post_forward:
            module.register_forward_hook(self.post_forward, prepend=True)

    @classmethod
    def detach(cls, module: nn.Module) -> None:
        """Leave a module as if none of this class had been attached, whoever copied it there."""
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in [*hooks.items()]:
                if isinstance(getattr(hook, "__self__", None), cls):
                    del hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
        around, forward = [], vars(module).pop("forward", None)
        while isinstance(forward, _Forward):
            around.append(forward)
            forward = forward.inner
        for each in reversed(around):
            if not isinstance(each.around, cls):
                each.inner, forward = forward, each
        if forward is not None:
            vars(module)["forward"] = forward

    @classmethod
    def of(cls: type[Kind], module: nn.Module) -> Kind | None:
        """Return the one of this class whose `forward` is around a module's; None without it."""
        forward = vars(module).get("forward")
        while isinstance(forward, _Forward):
            if isinstance(forward.around, cls):
                return forward.around
            forward = forward.inner
        return None


class _Forward:
    """The `forward` of one module, while an `Around` has one. `inner` is the next, if any."""

    def __init__(self, around: Around, module: nn.Module) -> None:
        self.around, self.module, self.inner = around, module, vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around.forward(self.module, self.run, args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the next forward, which is the class's own if there is no other."""
        forward = self.inner or type(self.module).forward.__get__(self.module)
        return forward(*args, **kwargs)
