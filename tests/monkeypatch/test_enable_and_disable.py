"""Applying the patches changes what `report()` lists and nothing else; restoring undoes it all."""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import types

import pytest
import torch
from torch import nn
from transformer_lens import patching

import tl_devicefix
from tl_devicefix.monkeypatch.applying import is_enabled
from tl_devicefix.monkeypatch.patch import named
from tl_devicefix.monkeypatch.versions import (
    UnsupportedTransformerLens,
    has_bridge,
    has_hooked_transformer,
    installed,
)
from tl_devicefix.patches import table

if has_hooked_transformer():
    from transformer_lens import HookedTransformer as MODEL_CLASS
else:
    from transformer_lens.model_bridge import TransformerBridge as MODEL_CLASS

LOADER = "from_pretrained" if has_hooked_transformer() else "boot_transformers"
PROCESSING = "load_and_process_state_dict" if has_hooked_transformer() else "process_weights"


@pytest.fixture(autouse=True)
def applied_again():
    """Whatever a test does, the patches are applied after it."""
    yield
    tl_devicefix.enable()


def parts_of_transformer_lens():
    """Every attribute of every module and class of TransformerLens that is imported, by its path.

    Also of transformers' module with a patch.
    """
    parts = {}
    for module_name, module in list(sys.modules.items()):
        its = module_name, module_name.partition(".")[0]
        if module is None or not {"transformers.masking_utils", "transformer_lens"} & {*its}:
            continue
        for name, value in list(vars(module).items()):
            parts[f"{module_name}:{name}"] = value
            if inspect.isclass(value) and value.__module__ == module_name:
                attributes = vars(value).items()
                parts.update({f"{module_name}:{name}.{k}": part for k, part in attributes})
    return parts


def changed(before, after):
    """What was added, removed, or replaced by another object."""
    missing = object()
    paths = before.keys() | after.keys()
    return {p for p in paths if before.get(p, missing) is not after.get(p, missing)}


def ours(parts):
    """What is replaced by something that tl_devicefix defines."""

    def is_ours(part):
        code = getattr(getattr(part, "__func__", part), "__code__", None)
        return code is not None and f"{os.sep}tl_devicefix{os.sep}" in code.co_filename

    return {path for path, part in parts.items() if is_ours(part)}


def listed(capsys):
    """The targets in the table that `report()` prints."""
    capsys.readouterr()
    tl_devicefix.report()
    _, header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["target", "TL", "versions", "why"]
    return {row.split()[0] for row in rows}


@pytest.mark.fuses
def test_disable_removes_the_hook_that_counts_assigned_modules(load, tokens):
    hooks = nn.modules.module._global_module_registration_hooks
    tl_devicefix.disable()
    before = {*hooks}
    tl_devicefix.enable()
    model = load("llama", device="cpu")
    tl_devicefix.fuse_blocks(model)
    logits = model(tokens)
    assert {*hooks} != before
    tl_devicefix.disable()
    assert {*hooks} == before
    tl_devicefix.enable()
    model.blocks[1].mlp = type("Zero", (nn.Module,), {"forward": lambda _, x, *a, **k: 0 * x})()
    assert not torch.equal(model(tokens), logits)


def test_disable_restores_the_original_objects_even_if_repeated():
    once = parts_of_transformer_lens()
    tl_devicefix.enable()
    importlib.reload(tl_devicefix)
    assert changed(once, parts_of_transformer_lens()) == set()
    with tl_devicefix.disabled():
        original = parts_of_transformer_lens()
    assert ours(original) == set()
    assert changed(original, once) != set()
    for _ in range(2):
        tl_devicefix.disable()
        assert changed(original, parts_of_transformer_lens()) == set()
    tl_devicefix.enable()
    assert changed(once, parts_of_transformer_lens()) == set()


def test_enable_changes_exactly_what_report_lists(capsys):
    if importlib.util.find_spec("transformer_lens.model_bridge"):
        importlib.import_module("transformer_lens.model_bridge")
    patched = parts_of_transformer_lens()
    with tl_devicefix.disabled():
        differences = changed(parts_of_transformer_lens(), patched)

    # "transformer_lens.HookedTransformer:HookedTransformer.to" -> "HookedTransformer.to"
    assert {path.partition(":")[2] for path in differences} == listed(capsys)
    assert f"{MODEL_CLASS.__name__}.{LOADER}" in listed(capsys)
    assert ours(patched) <= differences
    # HookedTransformer and TransformerBridge share these, and neither is to change for the other.
    others = ("ProcessWeights.",) if has_bridge() else ("ProcessWeights.", "TransformerBridge.")
    assert not {path for path in differences if any(other in path for other in others)}


@pytest.mark.parametrize("start", ["enable", "disable"])
@pytest.mark.parametrize("block", ["enabled", "disabled"])
def test_enabled_and_disabled_restore_the_state_before_them(start, block):
    tl_devicefix.disable()
    original = parts_of_transformer_lens()
    getattr(tl_devicefix, start)()
    with contextlib.suppress(KeyboardInterrupt), getattr(tl_devicefix, block)():
        assert is_enabled() == (block == "enabled")
        with tl_devicefix.disabled(), tl_devicefix.enabled():
            assert is_enabled()
        assert is_enabled() == (block == "enabled")
        raise KeyboardInterrupt
    assert is_enabled() == (start == "enable")
    tl_devicefix.disable()
    assert changed(original, parts_of_transformer_lens()) == set()


def test_disable_restores_another_librarys_patch(monkeypatch):
    tl_devicefix.disable()
    original = getattr(MODEL_CLASS, PROCESSING)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return original(*args, **kwargs)

    monkeypatch.setattr(MODEL_CLASS, PROCESSING, wrapped)
    with tl_devicefix.enabled():
        assert getattr(MODEL_CLASS, PROCESSING) is not wrapped
    assert getattr(MODEL_CLASS, PROCESSING) is wrapped


def test_patched_functions_change_where_they_were_imported(monkeypatch):
    """Also within partials, and in modules that import them while they are patched."""
    early, late = types.ModuleType("early"), types.ModuleType("late")
    for module in (early, late):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in [patch.name for patch in table() if patch.owner is None]:
        tl_devicefix.disable()
        function = named(name)
        early.function, early.partial = function, functools.partial(function, None, key=1)
        kept = early.partial
        with tl_devicefix.enabled():
            ours = late.function = named(name)
            assert ours is not function
            assert inspect.signature(ours) == inspect.signature(function)
            assert early.function is early.partial.func is ours
            assert (early.partial.args, early.partial.keywords) == ((None,), {"key": 1})
        assert early.function is early.partial.func is late.function is named(name) is function
        assert early.partial is kept


def test_a_function_that_somebody_decorated_stays_decorated(monkeypatch, load, tokens):
    calls = []
    tl_devicefix.disable()
    installed = patching.generic_activation_patch

    @functools.wraps(installed)
    def decorated(*args, **kwargs):
        calls.append("called")
        return installed(*args, **kwargs)

    monkeypatch.setattr(patching, "generic_activation_patch", decorated)
    with tl_devicefix.enabled():
        model = load("llama", device="cpu")
        _, cache = model.run_with_cache(tokens[:1])
        patch = functools.partial(patching.generic_activation_patch, model, tokens[:1], cache)
        patch(torch.sum, patching.layer_pos_patch_setter, "resid_pre", ("layer", "pos"))
    assert calls == ["called"]
    assert patching.generic_activation_patch is decorated


VERSION = importlib.metadata.version("transformer_lens")


@pytest.fixture
def monkeypatch_unpatched():
    """Change TransformerLens while it is unpatched; afterwards it is put right and patched."""
    with tl_devicefix.disabled(), pytest.MonkeyPatch.context() as monkeypatch:
        yield monkeypatch
        monkeypatch.undo()
        installed.cache_clear()


@contextlib.contextmanager
def refuses(*says):
    before = parts_of_transformer_lens()
    with pytest.raises(UnsupportedTransformerLens) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    assert all(text in message for text in says), message
    assert changed(before, parts_of_transformer_lens()) == set()
    assert not is_enabled()


@pytest.mark.parametrize("version", ["5.0.0.dev3", "2.15.4"])
def test_a_version_that_is_too_new_or_too_old_is_not_patched(version, monkeypatch_unpatched):
    monkeypatch_unpatched.setattr(importlib.metadata, "version", lambda _: version)
    installed.cache_clear()
    for do in (tl_devicefix.enable, tl_devicefix.enabled().__enter__, tl_devicefix.report):
        with refuses(version, "install 'transformer_lens>=2.16.1,<5'"):
            do()


def places_of(name):
    """Modules and classes of TransformerLens that have something of a name."""
    places = [owner for owner in MODEL_CLASS.__mro__ if name in vars(owner)]
    modules = (path.partition(":") for path in parts_of_transformer_lens())
    return places or [importlib.import_module(module) for module, _, its in modules if its == name]


THIRD = "get_device_for_block_index" if has_hooked_transformer() else "get_caching_hooks"


@pytest.mark.parametrize("name", [LOADER, PROCESSING, THIRD])
def test_missing_target_is_named_and_nothing_is_patched(name, monkeypatch_unpatched):
    for place in places_of(name):
        monkeypatch_unpatched.delattr(place, name)
    with refuses(name, VERSION, "nothing was replaced"):
        tl_devicefix.enable()


def test_a_target_with_other_arguments_is_named_and_refused(monkeypatch_unpatched):
    def changed(self, weights, twice): ...

    monkeypatch_unpatched.setattr(MODEL_CLASS, PROCESSING, changed)
    with refuses(PROCESSING, "(self, weights, twice)", VERSION, "nothing was replaced"):
        tl_devicefix.enable()
