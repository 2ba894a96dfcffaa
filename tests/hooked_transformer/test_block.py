"""A block gives the installed activations and gradients, bit for bit, whoever listens to it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch
from block_variants import (
    ATTENTION_AS_INSTALLED,
    BLOCKS_AS_INSTALLED,
    DTYPES,
    VARIANTS,
    Seen,
    assert_all_as_installed,
    assert_as_installed,
    gradients,
    make,
    padded,
    points,
    shared,
    tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils import parametrize, prune
from transformer_lens.components import Attention, LayerNorm
from transformer_lens.hook_points import HookPoint

import tl_devicefix
from tl_devicefix.hooked_transformer import known_blocks

try:
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache as Cache
except ImportError:  # TransformerLens 2
    from transformer_lens.past_key_value_caching import HookedTransformerKeyValueCache as Cache

every_variant = pytest.mark.parametrize("variant", VARIANTS)
either_grad = pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])


def run(
    model: Any,
    hooks: Any = (),
    bwd_hooks: Any = (),
    *,
    n: int = 5,
    grad: bool = True,
    log: dict[str, Any] | None = None,
    **options: Any,
) -> Seen:
    """Logits, and with `grad` gradients, of a run with hooks, which fill `log`."""
    seen: dict[str, Any] = {} if log is None else log
    seen.clear()
    with torch.set_grad_enabled(grad), model.hooks(list(hooks), list(bwd_hooks)):
        logits = model(tokens(n), **options)
        if grad:
            logits.float().pow(2).sum().backward()
    return {"logits": logits.detach(), **seen, **(gradients(model) if grad else {})}


class Recorder:
    """Makes hooks that note what they are given, in the order they are called.

    Args:
        log: where they note it.
    """

    def __init__(self, log: dict[str, Any]) -> None:
        self.log = log

    def note(self, name: str, value: torch.Tensor) -> None:
        self.log[f"{len(self.log)} {name}"] = value.detach().clone()

    def read(self, value: torch.Tensor, hook: Any) -> None:
        self.note(hook.name, value)

    def edit(self, value: torch.Tensor, hook: Any) -> torch.Tensor:
        self.note(hook.name, value)
        value[:, 0] = 0.25
        return value

    def edit_quietly(self, value: torch.Tensor, hook: Any) -> None:
        self.note(hook.name, value)
        value[:, -1] *= 2

    def replace(self, value: torch.Tensor, hook: Any) -> torch.Tensor:
        self.note(hook.name, value)
        return value * 1.25 + 0.125

    def upcast(self, value: torch.Tensor, hook: Any) -> torch.Tensor:
        self.note(hook.name, value)
        return value.double() if hook.name.endswith(("hook_scale", "hook_pattern")) else value

    def replace_gradient(self, value: torch.Tensor, hook: Any) -> tuple[torch.Tensor]:
        self.note(hook.name, value)
        return (value * 0.5,)


FORWARD, BACKWARD = (
    ("read", "edit", "edit_quietly", "replace", "upcast"),
    ("read", "replace_gradient"),
)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    variant = draw(st.sampled_from(list(VARIANTS)))
    dtype = draw(st.sampled_from(DTYPES))
    names = points(shared(variant, dtype))
    n, past = draw(st.integers(1, 6)), draw(st.sampled_from((None, 0, 1, 4)))
    total = n + (past or 0)
    left = draw(st.integers(0, total - 1))
    return {
        "variant": variant,
        "dtype": dtype,
        "n": n,
        "past": past,
        "mask": draw(
            st.sampled_from((None, padded(total), padded(total, left), padded(total, right=left)))
        ),
        "grad": draw(st.booleans()),
        "frozen": draw(st.booleans()),
        "hooks": draw(st.lists(st.tuples(st.sampled_from(names), st.sampled_from(FORWARD)))),
        "bwd_hooks": draw(
            st.lists(st.tuples(st.sampled_from(names), st.sampled_from(BACKWARD)), max_size=2)
        ),
    }


def test_random_hooks_at_random_points(pytestconfig: pytest.Config) -> None:
    n = 5000 if pytestconfig.getoption("--full") else 250

    @settings(max_examples=n, derandomize=True, deadline=None, database=None)
    @given(cases())
    def holds(case: dict[str, Any]) -> None:
        model = shared(case["variant"], case["dtype"])

        def once() -> Seen:
            log: dict[str, Any] = {}
            record = Recorder(log)
            options: dict[str, Any] = {}
            for block in model.blocks:
                block.attn.alibi = None  # a longer one, of an earlier forward, gives other numbers
            mask, past = case["mask"], case["past"]
            cache = None
            if past is not None:
                cache = Cache.init_cache(model.cfg, "cpu", 2)
                if past:
                    with torch.no_grad():
                        first = None if mask is None else mask[:, :past]
                        model(tokens(past), past_kv_cache=cache, attention_mask=first)
                if case["frozen"]:
                    cache.freeze()
                options["past_kv_cache"] = cache
                mask = None if mask is None else mask[:, past:]
            seen = run(
                model,
                [(name, getattr(record, kind)) for name, kind in case["hooks"]],
                [(name, getattr(record, kind)) for name, kind in case["bwd_hooks"]],
                n=case["n"],
                grad=case["grad"],
                log=log,
                attention_mask=mask,
                **options,
            )
            entries = () if cache is None else cache.entries
            contents = {
                f"{i} {kind}": getattr(entry, kind).detach()
                for i, entry in enumerate(entries)
                for kind in ("past_keys", "past_values")
            }
            return {**seen, **contents}

        model.zero_grad()
        assert_as_installed(once)
        model.zero_grad()  # where both have failed

    holds()


NOT_ALWAYS_CALLED = (
    *("_in", "_input", "hook_result", "blocks.1.hook_mlp_out"),
    "hook_expert_indices",  # what replaces them is no index
)
"""Points that some variants have and do not call, or that refuse what replaces them."""


@pytest.mark.cover(("variant", "grad"))
@either_grad
@every_variant
def test_each_hook_point_alone(variant: str, grad: bool) -> None:
    model = shared(variant)
    log: dict[str, Any] = {}
    record = Recorder(log)

    def hooked(name: str) -> Seen:
        return run(model, [(name, record.replace)], grad=grad, log=log)

    names = [name for name in points(model) if name.startswith("blocks.1.")]

    seen = assert_all_as_installed({name: partial(hooked, name) for name in names})

    uncalled = {name for name in names if not any(key.endswith(name) for key in seen[name])}
    may_be = (*NOT_ALWAYS_CALLED, *(name for name in names if ".experts." in name))
    assert [name for name in uncalled if not name.endswith(may_be)] == []


@pytest.mark.parametrize("dtype", DTYPES[1:])
@every_variant
def test_all_activations_and_their_gradients(variant: str, dtype: torch.dtype) -> None:
    model = shared(variant, dtype)

    def cached() -> Seen:
        _, cache = model.run_with_cache(
            tokens(6), incl_bwd=True, return_type="loss", attention_mask=padded(6, 2)
        )
        return {**cache, **gradients(model)}

    seen = assert_as_installed(cached)

    assert "blocks.1.attn.hook_pattern_grad" in seen


@every_variant
def test_gradients_where_nobody_listens(variant: str) -> None:
    runs = {
        f"{dtype} {mask}": partial(run, shared(variant, dtype), attention_mask=mask)
        for dtype in DTYPES
        for mask in (None, padded(5, 2))
    }
    assert_all_as_installed(runs)


@either_grad
@every_variant
def test_a_kv_cache_with_padding(variant: str, grad: bool) -> None:
    model = shared(variant)

    def generated(mask: torch.Tensor | None) -> Seen:
        cache, seen = Cache.init_cache(model.cfg, "cpu", 2), {}
        with torch.set_grad_enabled(grad):
            for start, end in ((0, 4), (4, 5), (5, 7)):
                new = None if mask is None else mask[:, start:end]
                logits = model(tokens(7)[:, start:end], past_kv_cache=cache, attention_mask=new)
                seen[f"logits {start}"] = logits.detach()
        for i, entry in enumerate(cache.entries):
            seen |= {f"keys {i}": entry.past_keys, f"values {i}": entry.past_values}
        return seen

    masks = (None, padded(7), padded(7, left=3), padded(7, right=2))
    # TransformerLens's ALiBi table grows, and the last bits depend on how large it is.
    model(tokens(7))
    assert_all_as_installed({str(mask): partial(generated, mask) for mask in masks})


@every_variant
def test_from_one_layer_to_another(variant: str) -> None:
    model = shared(variant)

    def parts() -> Seen:
        with torch.no_grad():
            middle = model(tokens(5), stop_at_layer=1)
            embed = None
            if model.cfg.positional_embedding_type == "shortformer":
                embed = model.pos_embed(tokens(5))
            given = {"start_at_layer": 1, "shortformer_pos_embed": embed}
            return {"middle": middle, "end": model(middle, **given)}

    assert_as_installed(parts)


def test_hooks_that_add_and_remove_hooks() -> None:
    model = shared("qk-norm, grouped")
    log: dict[str, Any] = {}
    record = Recorder(log)
    later = ["blocks.0.attn.hook_rot_k", "blocks.0.mlp.hook_post", "blocks.1.ln1.hook_scale"]

    def adds(value: torch.Tensor, hook: Any) -> None:
        for name in later:
            model.hook_dict[name].add_hook(record.replace)

    def removes(value: torch.Tensor, hook: Any) -> None:
        for name in (*later, "blocks.1.hook_mlp_out"):
            model.hook_dict[name].remove_hooks("fwd")

    hooks = [
        ("blocks.0.hook_resid_pre", adds),
        ("blocks.1.attn.hook_z", removes),
        ("blocks.1.hook_mlp_out", record.replace),
    ]
    for first in ("blocks.0.hook_resid_pre", "blocks.0.ln1.hook_normalized", "hook_embed"):
        for grad in (False, True):
            hooks[0] = (first, adds)
            seen = assert_as_installed(lambda grad=grad: run(model, hooks, grad=grad, log=log))
            assert len([key for key in seen if "hook" in key]) >= 3
            model.reset_hooks(including_permanent=True)


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
        given = [tensor for tensor in (*args, *kwargs.values()) if isinstance(tensor, torch.Tensor)]
        for tensor in given:
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


def test_hooks_of_torch_on_every_module() -> None:
    model = shared("RMS, grouped")
    log: list[str] = []
    names = {module: name for name, module in model.named_modules()}

    def called() -> Seen:
        log.clear()
        handle = torch.nn.modules.module.register_module_forward_hook(
            lambda module, args, output: log.append(names[module])
        )
        with handle:
            seen = run(model)
        return {**seen, "called": list(log)}

    assert "blocks.1.attn.hook_pattern" in assert_as_installed(called)["called"]


@pytest.mark.parametrize(
    "path",
    ["attn", "mlp", "ln1", "ln2", "attn.k_norm", "attn.hook_z", "hook_resid_mid", "ln1.hook_scale"],
)
def test_a_forward_of_an_instance(path: str) -> None:
    model = make("qk-norm")
    module = model.get_submodule(f"blocks.0.{path}")
    cls_forward = type(module).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return type(self).forward(self, *args, **kwargs) * 1.5

    module.forward = MethodType(forward, module)
    changed = assert_as_installed(lambda: run(model))["logits"]
    del module.forward

    assert type(module).forward is cls_forward
    assert not torch.equal(changed, run(model)["logits"])


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("", "apply_mlp"),
        ("attn", "calculate_qkv_matrices"),
        ("attn", "calculate_attention_scores"),
        ("attn", "calculate_z_scores"),
        ("attn", "apply_causal_mask"),
        ("attn", "_apply_qk_norm"),
    ],
)
def test_a_method_of_an_instance(path: str, name: str) -> None:
    model = make("qk-norm")
    module = model.get_submodule(f"blocks.0.{path}".rstrip("."))
    called: list[str] = []
    method = getattr(module, name)

    def own(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return method(*args, **kwargs)

    setattr(module, name, own)

    with torch.no_grad():
        model(tokens(5))

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


def pruned(module: Any, name: str) -> None:
    prune.random_unstructured(module, name, amount=0.5)


def plain_tensor(module: Any, name: str) -> None:
    weight = getattr(module, name).detach() * 2
    delattr(module, name)
    setattr(module, name, weight)


def a_buffer(module: Any, name: str) -> None:
    weight = getattr(module, name).detach() * 2
    delattr(module, name)
    module.register_buffer(name, weight)


def other_data(module: Any, name: str) -> None:
    getattr(module, name).data = getattr(module, name).data.flip(0)


@either_grad
@pytest.mark.cover(("change", "which"))
@pytest.mark.parametrize("which", range(6), ids=["W_Q", "W_O", "b_Q", "W_in", "b_out", "w"])
@pytest.mark.parametrize(
    "change",
    [
        parametrized,
        pruned,
        plain_tensor,
        a_buffer,
        other_data,
    ],
)
def test_weights_that_are_replaced(
    change: Callable[[Any, str], None], which: int, grad: bool
) -> None:
    model = make("LN")
    before = run(model, grad=grad)["logits"]
    torch.manual_seed(0)

    change(*weights_of(model.blocks[0])[which])

    changed = assert_as_installed(lambda: run(model, grad=grad))
    assert not torch.equal(changed["logits"], before)


def test_gradients_of_examples_by_vmap() -> None:
    model = shared("RMS, grouped")
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: Any, example: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(model, weights, (example[None],))
        return logits.pow(2).sum()  # type: ignore[no-any-return]

    per_example = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))

    assert_as_installed(lambda: per_example(weights, tokens(5)))


class OwnAttention(Attention):
    def calculate_z_scores(self, v: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
        return super().calculate_z_scores(v, pattern) * 1.5


def test_a_subclass_of_attention() -> None:
    model = make("LN")
    before = run(model)["logits"]
    model.blocks[0].attn.__class__ = OwnAttention

    changed = assert_as_installed(lambda: run(model))

    assert not torch.equal(changed["logits"], before)


CONTEXTS = {
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), True),
    "inference": (torch.inference_mode, False),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("variant", ["LN", "RMS, grouped", "local rotary", "ALiBi", "qk-norm"])
def test_within_autocast_and_inference_mode(variant: str, context: str) -> None:
    model, (make_context, grad) = shared(variant), CONTEXTS[context]

    def within() -> Seen:
        with make_context():
            return run(model, grad=grad, attention_mask=padded(5, 2))

    assert_as_installed(within)


@pytest.mark.parametrize("variant", ["LN", "RMS, grouped", "ALiBi", "qk-norm"])
def test_blocks_and_components_called_by_hand(variant: str) -> None:
    model = shared(variant)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))

    def called() -> Seen:
        block = model.blocks[1]
        with torch.no_grad():
            attended = block.attn(x, x * 2, x * 3, attention_mask=padded(5, 1))
            masked = block.attn(x, x, x, additive_attention_mask=torch.full((2, 1, 1, 5), -1.0))
            outputs = {"block": block(x), "attention": attended, "masked": masked}
            return {**outputs, "MLP": block.mlp(x), "norm": block.ln1(x)}

    assert_as_installed(called)


def test_a_prompt_longer_than_the_tables() -> None:
    model = make("RMS, grouped")
    for block in model.blocks:
        for name in ("rotary_sin", "rotary_cos"):
            setattr(block.attn, name, getattr(block.attn, name)[:4])

    tables = copy.deepcopy(model)
    assert_as_installed(lambda: run(copy.deepcopy(tables), grad=False, n=9))


@pytest.mark.parametrize("variant", VARIANTS)
def test_which_blocks_run_as_installed(variant: str) -> None:
    model = shared(variant)

    why = known_blocks.why_as_installed(model.blocks[1])
    of_attention = known_blocks.why_attention_as_installed(model.blocks[1].attn)

    assert (why is not None) == (variant in BLOCKS_AS_INSTALLED)
    assert (of_attention is not None) == (variant in ATTENTION_AS_INSTALLED)


def test_the_installed_blocks_are_known() -> None:
    versions = known_blocks.KNOWN.get(known_blocks.digest())

    assert versions is not None, (
        f"the blocks of the installed TransformerLens have the digest {known_blocks.digest()}: "
        "compare what has changed, then add it to KNOWN"
    )


def test_blocks_of_an_unknown_transformer_lens_run_as_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_blocks, "KNOWN", {})
    known_blocks._why_functions_unknown.cache_clear()
    try:
        model = make("RMS, grouped")
        with mock.patch("tl_devicefix.hooked_transformer.block.run_block") as run_block:
            assert_as_installed(lambda: run(model))
        blocks = tl_devicefix.set_attn_implementation(model, "sdpa").blocks
    finally:
        known_blocks._why_functions_unknown.cache_clear()

    assert not run_block.called
    assert all("does not know the blocks of" in reason for reason in blocks.values())
