"""What modules of a Bridge were like when they were looked through, and who listens in them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

from tl_devicefix.attention.implementation import HOOKS, looks_away

hooks_of = itemgetter(*HOOKS)


class Seen:
    """Modules, their hooks, and attributes of transformers', as they are now.

    Args:
        around: those whose hooks are asked for by `is_heard_around` only: a block, its first and
            last hook point.
        inside: all others.
    """

    def __init__(self, around: list[nn.Module], inside: list[nn.Module]) -> None:
        self._around = list(map(vars, around))
        self._unheard_around_since = -1
        self._all = [*self._around[:1], *map(vars, inside)]
        self._lengths = list(map(len, self._all))
        self._hooks = list(map(hooks_of, self._all))
        with_children = [each for each in (*around[:1], *inside) if each._modules]
        self._children_now = [each._modules for each in with_children]
        self._children = [dict(each._modules) for each in with_children]
        self._attributes = [_getter(vars(each)) for each in inside if _is_of_layer(each)]
        self._values = [get(held) for get, held in self._attributes]
        config = getattr(around[0], "config", None) if around else None
        self._config = vars(config) if hasattr(config, "__dict__") else {}
        self._unheard_since = -1
        # A list that grows when the block's own forward runs first.
        self._wired = self._around[0].get("_capture_hook_handles", ()) if around else ()
        self._relayed: set[int] = set()
        self._flat: list[dict[int, Any]] = []
        """Dicts of hooks that may have none."""
        self._harmless: list[tuple[dict[int, Any], list[int]]] = []
        """Those that have some, and which, that do nothing by themselves."""
        for module in inside:
            self._relayed |= _relays(module)
            for hooks in hooks_of(vars(module)):
                if not (hooks and self._are_harmless(hooks)):
                    self._flat.append(hooks)

    def _are_harmless(self, hooks: dict[int, Any]) -> bool:
        """Whether hooks do nothing by themselves, which is noted then."""
        recording = {key for key, hook in hooks.items() if _is_of_transformers(hook)}
        away = {key for key, hook in hooks.items() if looks_away(hook)}
        wired = {handle.id for handle in self._wired}
        if not recording | away | wired | self._relayed >= hooks.keys():
            return False
        self._harmless.append((hooks, list(hooks)))
        return True

    def is_as_seen(self) -> bool:
        """Whether modules, their hooks' dicts, and attributes of transformers' are the same.

        torch counts the hooks that are registered, anywhere: where none was, none is looked for.
        """
        try:
            if self._unheard_since != RemovableHandle.next_id and not (
                self._hooks == list(map(hooks_of, self._all))
                and all(list(hooks) == known for hooks, known in self._harmless)
            ):
                return False
            return (
                self._lengths == list(map(len, self._all))
                and self._children == self._children_now
                and self._values == [get(held) for get, held in self._attributes]
            )
        except (RuntimeError, ValueError, KeyError):  # tensors among attributes, and others now
            return False

    def heard(self) -> dict[int, Any] | None:
        """Hooks that listen, of the first module that has any."""
        now = RemovableHandle.next_id
        if self._unheard_since != now:
            for hooks in list(filter(None, self._flat)):
                if not self._are_harmless(hooks):
                    return hooks
                self._flat = [each for each in self._flat if each is not hooks]
            self._unheard_since = now
        return None

    def is_heard_around(self) -> bool:
        """Whether there are hooks around."""
        now = RemovableHandle.next_id
        if self._unheard_around_since != now:
            if any(any(hooks_of(held)) for held in self._around):
                return True
            self._unheard_around_since = now
        return False

    def is_asked_for_heads(self) -> bool:
        """Whether attention is to have other steps, also if nobody listens to them."""
        return any(map(self._config.get, _FLAGS))


_FLAGS = ("use_attn_result", "use_split_qkv_input", "use_attn_in")


def _getter(held: dict[str, Any]) -> tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]:
    """What reads the attributes of a module that its forward may read."""
    names = [name for name in held if name in _READ or name not in _OF_ANY_MODULE]
    return itemgetter(*names), held


_READ = ("training", "_parameters", "_buffers")
_OF_ANY_MODULE = frozenset(vars(nn.Module()))


def _is_of_layer(module: nn.Module) -> bool:
    return not isinstance(module, (HookPoint, GeneralizedComponent))


def _relays(point: nn.Module) -> set[int]:
    """Which hooks of a hook point hand on to another, in a module that only stands for a part."""
    return {
        handle.hook.id
        for handle in getattr(point, "fwd_hooks", ())
        if isinstance(point, HookPoint)
        and getattr(inspect.unwrap(handle.user_hook or _nothing), "__module__", None)
        == "transformer_lens.model_bridge.component_setup"
    }


def _nothing() -> None:
    """Instead of a hook."""


def _is_of_transformers(hook: Any) -> bool:
    """Whether it is the hook by which transformers records what a forward is asked for.

    TransformerLens asks for attentions in each forward, and gives them to nobody.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"
