"""A block whose modules, methods or weights are exchanged gives the installed results."""

from __future__ import annotations

import contextlib
import copy
import pkgutil
from collections import OrderedDict
from collections.abc import Callable
from functools import partial, partialmethod
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
    padded,
    points,
    run,
    shared,
    tokens,
)
from torch.nn.utils import parametrize
from transformer_lens.components import MLP, Attention, LayerNorm, TransformerBlock
from transformer_lens.hook_points import HookPoint

from tl_devicefix.dispatch import stand_ins
from tl_devicefix.hooked_transformer import known_blocks
from tl_devicefix.hooked_transformer.known_blocks import IS_2

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


class OwnMLP(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.5


class OwnBlock(TransformerBlock):
    def apply_mlp(self, normalized_resid: torch.Tensor) -> torch.Tensor:
        return super().apply_mlp(normalized_resid) * 1.5


class OwnHookPoint(HookPoint):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5


@pytest.mark.parametrize(
    ("path", "cls"),
    [("", OwnBlock), (".attn", OwnAttention), (".mlp", OwnMLP), (".attn.hook_z", OwnHookPoint)],
)
@pytest.mark.parametrize("hooked", [False, True], ids=["unhooked", "hooked"])
def test_a_class_that_is_exchanged_after_a_forward(path: str, cls: type, hooked: bool) -> None:
    model = make("LN")
    module = model.get_submodule(f"blocks.0{path}")
    own = type(module)
    hooks = [("blocks.0.attn.hook_q", lambda activation, hook: activation * 0.5)] * hooked

    def exchanged() -> Seen:
        module.__class__ = own
        before = run(model, hooks)["logits"]
        module.__class__ = cls
        return {**run(model, hooks), "before": before}

    changed = assert_as_installed(exchanged)

    assert not torch.equal(changed["logits"], changed["before"])


def test_an_attention_that_becomes_one_of_another_class() -> None:
    model = make("RMS, grouped")
    run(model, [("blocks.0.attn.hook_q", lambda activation, hook: None)])
    model.blocks[0].attn.__class__ = Attention

    with pytest.raises(AttributeError, match="has no attribute 'W_K'"):  # as installed
        run(model)


def exchange_dicts_of_hooks(module: torch.nn.Module) -> None:
    """The common idiom to remove all hooks."""
    module._forward_hooks = OrderedDict()
    module._forward_pre_hooks = OrderedDict()


def test_hooks_in_dicts_that_were_exchanged_after_a_forward() -> None:
    model = make("RMS, grouped")
    run(model)
    model.apply(exchange_dicts_of_hooks)

    def cached_and_ablated() -> Seen:
        _, cache = model.run_with_cache(tokens(5))
        ablated = run(model, [("blocks.0.hook_mlp_out", lambda activation, hook: activation * 0)])
        return {**cache, **ablated}

    seen = assert_as_installed(cached_and_ablated)

    assert len(points(model)) < len(seen)


def own_direction(attn: Any) -> None:
    attn.cfg = copy.copy(attn.cfg)
    attn.cfg.attention_dir = "bidirectional"


def own_direction_by_override(attn: Any) -> None:
    attn._attention_dir_override = "bidirectional"


def own_window(attn: Any) -> None:
    attn.cfg = copy.copy(attn.cfg)
    attn.cfg.window_size = 2


def own_sines(attn: Any) -> None:
    attn.rotary_sin = attn.rotary_sin * 0.5


def own_pairs(attn: Any) -> None:
    attn.cfg = copy.copy(attn.cfg)
    attn.cfg.rotary_adjacent_pairs = True


OWN = [own_direction, own_sines, own_pairs]
if not IS_2:  # which keeps a mask in each block
    OWN += [own_direction_by_override, own_window]


@pytest.mark.parametrize("change", OWN)
@pytest.mark.parametrize("by_hook", [False, True], ids=["before", "by a hook"])
def test_a_block_with_a_mask_or_positions_of_its_own(
    change: Callable[[Any], None], by_hook: bool
) -> None:
    model = make("local rotary" if change is own_window else "RMS, grouped")
    attn = model.blocks[1].attn
    attn.attn_type = model.blocks[0].attn.attn_type
    attn._buffers.update(model.blocks[0].attn._buffers)  # as in a model that was loaded

    def changed() -> Seen:
        with mock.patch.dict(vars(attn)), mock.patch.dict(attn._buffers):
            if not by_hook:
                change(attn)
            hooks = [("blocks.0.hook_resid_pre", lambda activation, hook: change(attn))] * by_hook
            return run(model, hooks, grad=False)

    before = run(model, grad=False)["logits"]
    assert not torch.equal(assert_as_installed(changed)["logits"], before)


def test_a_block_that_was_grafted_from_another_model() -> None:
    model, other = make("LN"), make("bidirectional")

    def grafted() -> Seen:
        with mock.patch.dict(model.blocks._modules, {"1": other.blocks[1]}):
            return run(model)

    before = run(model)["logits"]
    assert not torch.equal(assert_as_installed(grafted)["logits"], before)


class PassesCodeOn:
    """A descriptor around a function that looks like it, as wrapt's."""

    def __init__(self, function: Any) -> None:
        self.__wrapped__ = function
        self.__code__ = function.__code__

    def __eq__(self, other: object) -> bool:
        return bool(self.__wrapped__ == other)

    __hash__ = None  # type: ignore[assignment]

    def __get__(self, instance: Any, owner: Any) -> Any:
        if instance is None:
            return self
        return lambda *args, **kwargs: self.__wrapped__(instance, *args, **kwargs) * 1.5


def by_mock(function: Any) -> Any:
    return property(
        lambda self: mock.Mock(side_effect=lambda *a, **k: function(self, *a, **k) * 1.5)
    )


def by_partial(function: Any) -> Any:
    method = partial(lambda self, *args, **kwargs: function(self, *args, **kwargs) * 1.5)
    return property(lambda self: partial(method, self))


def by_partialmethod(function: Any) -> Any:
    return partialmethod(lambda self, *args, **kwargs: function(self, *args, **kwargs) * 1.5)


@pytest.mark.parametrize(
    ("cls", "name", "wrap"),
    [
        *((MLP, "forward", wrap) for wrap in (PassesCodeOn, by_mock, by_partial, by_partialmethod)),
        (torch.nn.Module, "__call__", PassesCodeOn),
    ],
)
@pytest.mark.parametrize("known", [False, True], ids=["before any forward", "after one"])
def test_a_method_of_a_class_in_another_form(
    cls: type,
    name: str,
    wrap: Callable[[Any], Any],
    known: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = shared("LN")
    before = run(model)["logits"]
    if not known:
        monkeypatch.setattr(stand_ins, "_known", {})

    with mock.patch.object(cls, name, wrap(getattr(cls, name))):
        changed = assert_as_installed(lambda: run(model))

    assert not torch.equal(changed["logits"], before)
    assert_as_installed(lambda: run(model))
    assert known_blocks.why_as_installed(model.blocks[0]) is None


def doubled_mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_method_that_is_given_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As IPython's autoreload does with edited files."""
    model = shared("LN")
    run(model)

    with monkeypatch.context() as context:
        context.setattr(MLP.forward, "__code__", doubled_mlp.__code__)
        changed = assert_as_installed(lambda: run(model))

    again = assert_as_installed(lambda: run(model))
    assert not torch.equal(changed["logits"], again["logits"])


def times(factor: float, function: Any) -> Any:
    def scaled(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) * factor

    return scaled


FUNCTIONS = ["abstract_attention.simple_attn_linear", "mlps.mlp.batch_addmm"]
if not IS_2:
    FUNCTIONS += [
        "abstract_attention.apply_softcap",
        "abstract_attention.get_offset_position_ids",
        "abstract_attention.einops.rearrange",
    ]


@pytest.mark.parametrize("path", FUNCTIONS)
def test_a_function_of_a_module_that_is_replaced(path: str) -> None:
    model = shared("adjacent pairs" if "position" in path else "LN")
    options = {"attention_mask": padded(5, left=2)}
    before = run(model, **options)["logits"]
    module, _, name = f"transformer_lens.components.{path}".rpartition(".")
    owner = pkgutil.resolve_name(module)
    factor = 2 if "position" in path else 1.5

    with mock.patch.object(owner, name, times(factor, getattr(owner, name))):
        changed = assert_as_installed(lambda: run(model, **options))

    assert not torch.equal(changed["logits"], before)


def test_a_call_of_a_class_that_is_replaced() -> None:
    model = shared("LN")
    before = run(model)["logits"]

    with mock.patch.object(MLP, "__call__", times(1.5, MLP.__call__), create=True):
        changed = assert_as_installed(lambda: run(model))

    assert not torch.equal(changed["logits"], before)


def by_setting(model: Any, stack: contextlib.ExitStack) -> None:
    model.cfg.use_attn_result = True


def by_class(model: Any, stack: contextlib.ExitStack) -> None:
    stack.enter_context(mock.patch.object(MLP, "forward", times(1.5, MLP.forward)))


def by_global_hook(model: Any, stack: contextlib.ExitStack) -> None:
    def scale(module: Any, args: Any, output: Any) -> Any:
        return output * 1.5 if isinstance(module, MLP) else None

    stack.enter_context(torch.nn.modules.module.register_module_forward_hook(scale))


@pytest.mark.parametrize("change", [by_setting, by_class, by_global_hook])
@pytest.mark.parametrize("name", ["hook_embed", "blocks.0.hook_resid_post"])
def test_a_hook_that_changes_how_later_blocks_compute(
    change: Callable[[Any, contextlib.ExitStack], None], name: str
) -> None:
    model = make("LN")

    def changed() -> Seen:
        log: dict[str, Any] = {}
        record = Recorder(log)
        with contextlib.ExitStack() as stack:
            hooks = [
                (name, lambda activation, hook: change(model, stack)),
                ("blocks.1.attn.hook_result", record.read),
            ]
            seen = run(model, hooks, log=log)
        model.cfg.use_attn_result = False
        return seen

    before = run(model)
    after = assert_as_installed(changed)
    assert len(after) > len(before) or not torch.equal(after["logits"], before["logits"])


def test_an_attribute_that_makes_room_for_a_method_between_two_forwards() -> None:
    model = make("LN")
    attn = model.blocks[0].attn

    def changed() -> Seen:
        attn.extra = 1
        vars(attn).pop("calculate_z_scores", None)
        run(model)
        del attn.extra
        attn.calculate_z_scores = times(1.5, attn.calculate_z_scores)
        return run(model)

    before = run(model)["logits"]
    assert not torch.equal(assert_as_installed(changed)["logits"], before)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("components.abstract_attention", "simple_attn_linear"),
        ("components.mlps.mlp", "batch_addmm"),
    ],
)
def test_a_function_that_is_replaced_before_any_forward(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared("LN")
    before = run(model)["logits"]
    owner = pkgutil.resolve_name(f"transformer_lens.{module}")
    monkeypatch.setattr(stand_ins, "_known", {})

    with mock.patch.object(owner, name, times(1.5, getattr(owner, name))):
        changed = assert_as_installed(lambda: run(model))

    assert not torch.equal(changed["logits"], before)


def test_a_method_in_a_decorator_of_torch_before_any_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = shared("LN")
    monkeypatch.setattr(stand_ins, "_known", {})

    with mock.patch.object(MLP, "forward", torch.no_grad()(MLP.forward)):
        seen = assert_as_installed(lambda: run(model))

    assert "grad blocks.0.mlp.W_in" not in seen


@pytest.mark.parametrize("path", ["attn", "attn.hook_z", "mlp", "hook_resid_post"])
@pytest.mark.parametrize(
    "register",
    ["register_full_backward_pre_hook", "register_full_backward_hook", "register_forward_pre_hook"],
)
def test_each_kind_of_torch_s_hooks(path: str, register: str) -> None:
    model = make("LN")
    module, called = model.get_submodule(f"blocks.0.{path}"), list[str]()
    getattr(module, register)(lambda *_: called.append(path))

    assert_as_installed(lambda: run(model))

    assert len(called) >= 2  # with the package, and without
