"""A block whose modules, methods or weights are exchanged gives the installed results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from block_variants import (
    Recorder,
    Seen,
    assert_all_as_installed,
    assert_as_installed,
    make,
    points,
    run,
    shared,
    tokens,
)
from torch.nn.utils import parametrize
from transformer_lens.components import Attention, LayerNorm
from transformer_lens.hook_points import HookPoint

from tl_devicefix.hooked_transformer import known_blocks

either_grad = pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])


class Coder(torch.nn.Module):
    """Stands where a hook point was, as an SAE does."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.heard.append(x.detach().clone())
        return torch.relu(x) * 1.5


@pytest.mark.parametrize("variant", ["LN", "qk-norm"])
def test_a_module_in_the_place_of_each_hook_point(variant: str) -> None:
    model = shared(variant)

    def with_coder(path: str) -> Seen:
        parent, _, name = path.rpartition(".")
        holder, coder = model.get_submodule(parent), Coder()
        with mock.patch.dict(holder._modules, {name: coder}):
            seen = run(model)
        return {**seen, **{f"heard {i}": tensor for i, tensor in enumerate(coder.heard)}}

    assert_all_as_installed({path: partial(with_coder, path) for path in points(model)[::2]})


@pytest.mark.parametrize("path", ["blocks.1.mlp.hook_post", "blocks.3.attn.hook_z"])
@pytest.mark.parametrize("of_torch", [False, True], ids=["hook point", "module"])
def test_a_hook_that_exchanges_a_module_of_its_block_or_a_later_one(
    path: str, of_torch: bool
) -> None:
    model = make("RMS, grouped", n_layers=4)
    parent, _, name = path.rpartition(".")
    holder, coder = model.get_submodule(parent), Coder()

    def exchange(*_: Any, **__: Any) -> None:
        holder._modules[name] = coder

    def exchanged() -> Seen:
        coder.heard.clear()
        with mock.patch.dict(holder._modules):
            run(model, grad=False)  # the blocks are known as they are
            if not of_torch:
                seen = run(model, [("blocks.1.hook_resid_pre", exchange)], grad=False)
            else:
                with model.blocks[1].register_forward_pre_hook(exchange):
                    seen = run(model, grad=False)
        assert coder.heard
        return seen

    assert_as_installed(exchanged)


def test_a_copy_of_a_model_has_its_own_hooks() -> None:
    model = make("RMS, grouped")
    before = run(model, grad=False)["logits"]
    copied = copy.deepcopy(model)
    copied.add_hook("blocks.1.hook_resid_mid", lambda activation, hook: activation * 0.5)
    assert not torch.equal(run(copied, grad=False)["logits"], before)
    assert torch.equal(run(model, grad=False)["logits"], before)
    model.add_hook("blocks.0.hook_resid_mid", lambda activation, hook: activation * 0.5)
    assert_as_installed(lambda: run(copied, grad=False))


COMPONENTS = ("", ".attn", ".mlp", ".ln1", ".ln2", ".attn.q_norm", ".mlp.hook_pre")


@either_grad
@pytest.mark.parametrize("component", COMPONENTS)
def test_hooks_of_torch_on_a_component(component: str, grad: bool) -> None:
    model = make("qk-norm, grouped")
    module = model.get_submodule(f"blocks.1{component}")
    log: dict[str, Any] = {}
    record = Recorder(log)

    def before(module: Any, args: Any, kwargs: Any) -> Any:
        tensors = [
            tensor for tensor in (*args, *kwargs.values()) if isinstance(tensor, torch.Tensor)
        ]
        for tensor in tensors:
            record.note("before", tensor)
        args = tuple(tensor * 1.5 for tensor in args)
        if "query_input" in kwargs:
            kwargs = {**kwargs, "query_input": kwargs["query_input"] * 1.5}
        return args, kwargs

    def after(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        record.note("after", output)
        return output * 0.5

    def back(module: Any, grad_input: Any, grad_output: Any) -> None:
        record.note("back", grad_output[0])

    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after),
    ]
    assert_as_installed(lambda: run(model, log=log, grad=grad))
    assert len(log) >= 2
    for handle in handles:
        handle.remove()

    module.register_full_backward_hook(back)
    assert_as_installed(lambda: run(model, log=log, grad=grad))
    assert bool(log) == grad


@pytest.mark.parametrize("variant", ["LN", "no norm", "RMSPre, grouped"])
def test_what_is_edited_in_place_before_attention_is_edited_there_alone(variant: str) -> None:
    model = make(variant)
    model.requires_grad_(False)

    def before(module: Any, args: Any, kwargs: Any) -> None:
        kwargs["query_input"][:, 0] = 0.5

    model.blocks[1].attn.register_forward_pre_hook(before, with_kwargs=True)

    def cached() -> Seen:
        return dict(model.run_with_cache(tokens(5))[1])

    assert_as_installed(cached)


METHODS = (
    *("calculate_qkv_matrices", "calculate_attention_scores", "calculate_z_scores"),
    *("apply_causal_mask", "_apply_qk_norm"),
)
PATHS = ("attn", "mlp", "ln1", "attn.k_norm", "attn.hook_z", "hook_resid_mid", "ln1.hook_scale")


@pytest.mark.parametrize(
    ("path", "name"),
    [*((path, "forward") for path in PATHS), *(("attn", name) for name in METHODS)],
)
def test_a_method_of_an_instance(path: str, name: str) -> None:
    model = make("qk-norm")
    module = model.get_submodule(f"blocks.0.{path}")
    method, called = getattr(module, name), list[str]()

    def own(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return method(*args, **kwargs)

    setattr(module, name, own)
    assert_as_installed(lambda: run(model))
    called.clear()
    run(model)
    assert called


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (Attention, "calculate_z_scores"),
        (Attention.__base__, "apply_causal_mask"),
        (LayerNorm, "forward"),
        (HookPoint, "forward"),
    ],
)
def test_a_method_of_a_class_that_is_replaced(cls: Any, name: str) -> None:
    model = shared("LN")
    run(model)  # which has found out which way its blocks take
    method = getattr(cls, name)

    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs) * 1.5

    with mock.patch.object(cls, name, own):
        changed = assert_as_installed(lambda: run(model))

    again = assert_as_installed(lambda: run(model))
    assert not torch.equal(changed["logits"], again["logits"])
    assert known_blocks.why_as_installed(model.blocks[0]) is None


class Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def weights_of(block: Any) -> list[tuple[Any, str]]:
    return [
        *((block.attn, name) for name in ("W_Q", "W_O", "b_Q")),
        *((block.mlp, name) for name in ("W_in", "b_out")),
        (block.ln1, "w"),
    ]


def parametrized(module: Any, name: str) -> None:
    parametrize.register_parametrization(module, name, Doubled())


def plain_tensor(module: Any, name: str) -> None:
    weight = getattr(module, name).detach() * 2
    delattr(module, name)
    setattr(module, name, weight)


@either_grad
@pytest.mark.cover(("change", "which"))
@pytest.mark.parametrize("which", range(6), ids=["W_Q", "W_O", "b_Q", "W_in", "b_out", "w"])
@pytest.mark.parametrize("change", [parametrized, plain_tensor])
def test_weights_that_are_replaced(
    change: Callable[[Any, str], None], which: int, grad: bool
) -> None:
    model = make("LN")
    before = run(model, grad=grad)["logits"]
    torch.manual_seed(0)

    change(*weights_of(model.blocks[0])[which])

    changed = assert_as_installed(lambda: run(model, grad=grad))
    assert not torch.equal(changed["logits"], before)


class OwnAttention(Attention):
    def calculate_z_scores(self, v: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
        return super().calculate_z_scores(v, pattern) * 1.5


def test_a_subclass_of_attention() -> None:
    model = make("LN")
    before = run(model)["logits"]
    model.blocks[0].attn.__class__ = OwnAttention

    changed = assert_as_installed(lambda: run(model))

    assert not torch.equal(changed["logits"], before)
