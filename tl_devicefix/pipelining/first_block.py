"""The first block that a run has to run, as those below do what they do in the unpatched run.

They do if no hook is on them, of the run or of anyone else, and nothing else in them might change
from one run to the next; and if nobody may want a gradient that goes through them. If there is a
doubt, it is the first block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from transformer_lens.hook_points import HookPoint

from tl_devicefix.attention.implementation import HOOKS
from tl_devicefix.monkeypatch.versions import is_bridge, is_hooked_transformer

Hooks = Sequence[tuple[Any, Any]]
"""(name of a hook point, or a function of names, and the hook), as `run_with_hooks` takes them."""

INPUTS = ("attention_mask", "padding_side", "position_ids", "prepend_bos")
"""Arguments of a forward on which the residual stream depends."""
KNOWN = {
    *INPUTS,
    *("labels", "loss_per_token", "return_type", "stop_at_layer"),
    *("clear_contexts", "remove_batch_dim"),
}
"""Arguments with which a run may start at any block: none of them is changed by a run."""

# Bridges of these hand the residual stream alone from one block to the next. What other blocks
# share (keys and values, states, an embedding for each layer) would be missing.
RESIDUAL_STREAM_ALONE = {
    *("ApertusForCausalLM", "BloomForCausalLM", "GPT2LMHeadModel", "GPTJForCausalLM"),
    *("GPTNeoForCausalLM", "GPTNeoXForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
    *("GemmaForCausalLM", "GptOssForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"),
    *("MixtralForCausalLM", "OPTForCausalLM", "Olmo2ForCausalLM", "OlmoForCausalLM"),
    *("OlmoeForCausalLM", "Phi3ForCausalLM", "PhiForCausalLM", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM",
}


# Modules of these do the same in each run, but for `UNSTEADY`. A Bridge's layers are transformers'.
LIBRARIES = {"bitsandbytes", "peft", "torch", "transformer_lens", "transformers"}
UNSTEADY = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm, nn.RReLU)


class FirstBlock:
    """Finds the first block that each of several runs of a model has to run.

    Args:
        model: a HookedTransformer or a TransformerBridge.
        tokens: what it is run on.
        arguments: those that `run_with_hooks` gets with them, other than hooks.

    Attributes:
        is_known: whether it runs as TransformerLens has it.
    """

    def __init__(self, model: Any, tokens: Any, arguments: dict[str, Any]) -> None:
        self._model = model
        self._inputs = (tokens, *arguments.values())
        self._is_bridge = is_bridge(model)
        self.is_known = _is_known(model, self._is_bridge)
        self._steady: dict[bool, int] = {}
        self._last = 0
        if set(arguments) <= KNOWN and self.is_known:
            self._last = len(range(len(model.blocks))[: arguments.get("stop_at_layer")])

    def of(self, hooks: Hooks) -> int:
        """The first block that a run with these hooks has to run; their number, if none."""
        first = min([self._last, *_layers(self._model, hooks)] if self._last else [0])
        if first == 0 or _has_any_global_hook() or any(map(needs_gradient, self._inputs)):
            return 0
        grad = torch.is_grad_enabled()
        if grad not in self._steady:  # once, as hooks on the model do not change meanwhile
            self._steady[grad] = self._steady_blocks()
        return min(first, self._steady[grad])

    def _steady_blocks(self) -> int:
        """How many blocks, from the first on, do the same in each run."""
        if any(map(self._may_differ, _beside_blocks(self._model))):
            return 0
        for index, block in enumerate(self._model.blocks):
            if any(map(self._may_differ, block.modules())):
                return index
        return len(self._model.blocks)

    def _may_differ(self, module: nn.Module) -> bool:
        """Whether a module may do something else in another run, or someone watches it run."""
        has = vars(module)
        if any(_is_of_user(module, hook) for name in HOOKS for hook in has[name].values()):
            return True
        if any(map(needs_gradient, module._parameters.values())):
            return True
        if module is self._model:  # of which `_is_known` has seen enough
            return False
        if type(module).__module__.partition(".")[0] not in LIBRARIES:
            return True
        if has.get("_compiled_call_impl") is not None or _has_forward_of_user(module):
            return True
        # A HookedTransformer is in training mode from the start, and has nothing that minds it.
        return module.training and (self._is_bridge or isinstance(module, UNSTEADY))


def needs_gradient(value: Any) -> bool:
    """Whether autograd is recording what is done with a tensor."""
    return isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled()


def _is_known(model: Any, is_a_bridge: bool) -> bool:
    """Whether it runs its blocks as TransformerLens has it, and these pass on nothing else."""
    if is_a_bridge:
        if model.cfg.architecture not in RESIDUAL_STREAM_ALONE:
            return False
        if getattr(model, "_capture_hf_cache", False):  # within `generate`
            return False
        names = ["forward", "run_with_hooks"]
    elif is_hooked_transformer(model):
        names = ["forward", "run_with_hooks", "input_to_embed"]
    else:
        return False
    base = next(
        cls for cls in type(model).__mro__ if cls.__module__.startswith("transformer_lens.")
    )
    return not any(
        name in vars(model) or getattr(type(model), name) is not getattr(base, name)
        for name in names
    )


def _layers(model: Any, hooks: Hooks) -> Iterator[int]:
    """For each hook point with a hook, the first block that could see what it does."""
    points = model.hook_dict
    for name, _ in hooks:
        for each in [name] if isinstance(name, str) else filter(name, points):
            point = points.get(each)
            yield _layer(model, each)
            yield _layer(model, getattr(point, "name", None) or each)  # that of a Bridge's alias


def _layer(model: Any, name: str) -> int:
    part, _, rest = name.partition(".")
    if part in ("ln_final", "unembed"):
        return len(model.blocks)
    index = rest.partition(".")[0]
    return int(index) if part == "blocks" and index.isdecimal() else 0


def _beside_blocks(model: Any) -> Iterator[nn.Module]:
    """All modules that run before the first block, or around all of them."""
    after = [getattr(model, name, None) for name in ("ln_final", "unembed")]
    seen = {id(each) for each in (*model.blocks, *after)}
    to_see = [model, getattr(model, "original_model", None)]
    while to_see:
        module = to_see.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        yield module
        to_see += module._modules.values()


def _is_of_user(module: nn.Module, hook: Any) -> bool:
    """Whether a PyTorch hook is neither this package's nor a library's own.

    Those of hook points are TransformerLens's functions that call the user's.
    """
    made_in = getattr(hook, "__module__", "").partition(".")[0]
    if made_in == "tl_devicefix":
        return False
    return isinstance(module, HookPoint) or made_in not in (*LIBRARIES, "accelerate")


def _has_forward_of_user(module: nn.Module) -> bool:
    """Whether someone has given this very module a forward: not this package, not accelerate."""
    forward = vars(module).get("forward")
    return (
        forward is not None
        and type(forward).__module__.partition(".")[0] != "tl_devicefix"
        and "_hf_hook" not in vars(module)
    )
