"""`tl_devicefix.check` of either class: each fault is found and named, the given line mends it."""

import pytest
from comparison import assert_agrees
from devices import device
from faults import FAULTS, MISPLACED, parameter_replaced
from model_classes import BRIDGE, CLASSES, HOOKED
from torch import nn

from tl_devicefix import check
from tl_devicefix.monkeypatch.versions import has_hooked_transformer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not support:UserWarning")


@pytest.fixture
def reference(on_one):
    return on_one("llama", folded=True)


UNPATCHED = {
    HOOKED: [("bloom", True)],  # of which no one has set W_pos
    BRIDGE: [("gpt2", False), ("gpt2", True)],
}


@pytest.mark.parametrize(
    ("model_class", "name", "folded"),
    [(model_class, *item) for model_class in CLASSES for item in UNPATCHED[model_class]],
)
def test_check_finds_no_fault_in_an_unpatched_model(name, folded, on_one):
    assert repr(check(on_one(name, folded=folded))) == "all is well"


@pytest.mark.parametrize(
    ("model_class", "fault"),
    [(model_class, fault) for model_class in CLASSES for fault in FAULTS[model_class]],
    ids=lambda value: value if isinstance(value, str) else value.breaks.__name__,
)
def test_each_fault_is_named_and_mended_by_its_fix_and_by_repair(
    model_class, fault, model, reference, tokens, machine
):
    placed = repr(model.placement)
    held = [machine.memory_allocated(device) for device in machine.devices]
    parameters = dict(model.named_parameters())
    fault.breaks(model)

    report = check(model)

    (finding,) = report.findings
    assert (finding.kind, finding.name) == (fault.kind, fault.name)
    assert all(part in finding.message for part in fault.says), finding.message
    assert not report
    assert str(finding) in repr(report)

    assert finding.fix.startswith(fault.fix)
    exec(finding.fix, {"model": model})
    assert check(model), check(model)
    if fault.mends:
        assert_agrees(model(tokens), reference(tokens), model.placement.home)

    if fault.breaks in MISPLACED:
        fault.breaks(model)

        report = check(model, repair=True)

        assert (report.findings, report.repaired) == ((), (finding,))
        assert "repaired (1)" in repr(report)
        assert check(model), check(model)
        assert repr(model.placement) == placed
        if fault.breaks is not parameter_replaced:
            assert all(parameters[name] is item for name, item in model.named_parameters())
            # TransformerLens 3.9 runs a gated MLP of a folded Bridge by plain tensors beside its
            # parameters (`_processed_W_in` and the like). They share memory until a parameter is
            # moved, which they are not.
            if not (model_class == BRIDGE and has_hooked_transformer()):
                assert [machine.memory_allocated(device) for device in machine.devices] == held
        assert_agrees(model(tokens), reference(tokens), model.placement.home)
        assert_agrees(model.run_with_cache(tokens)[1], reference.run_with_cache(tokens)[1])


CLASS_NAMES = {HOOKED: "HookedTransformer", BRIDGE: "TransformerBridge"}


def test_check_refuses_an_object_that_is_no_model(model_class, on_one):
    with pytest.raises(TypeError, match=f"{CLASS_NAMES[model_class]}.*, but this is a Linear"):
        check(nn.Linear(2, 2))
    if model_class == BRIDGE:
        with pytest.raises(TypeError, match=r"TransformerBridge, but this is a GPT2LMHeadModel"):
            check(on_one("gpt2").original_model)


NAMES = ["llama", "gpt2", "gemma-2", "mixtral", "bloom", "gpt-neo", "gpt-j", "gemma-3", "gpt-oss"]


@pytest.mark.bridge
@pytest.mark.parametrize("name", [*NAMES, "mamba-2", "nemotron-h"])
def test_check_finds_no_fault_in_a_bridge_folded_or_not(name, load, machine, tokens):
    bridge = load(name, n_devices=3)
    assert check(bridge), check(bridge)
    bridge.enable_compatibility_mode(fold_ln=name != "gpt2")  # which leaves all norms
    assert check(bridge), check(bridge)
    bridge(tokens)
    assert check(bridge), check(bridge)


@pytest.mark.bridge
def test_repair_keeps_tied_embeddings_tied(load, machine):
    bridge = load("gpt2", n_devices=3)
    bridge.embed.to(device(2))
    assert check(bridge, repair=True), check(bridge)
    embed, unembed = bridge.embed._original_component, bridge.unembed._original_component
    assert embed.weight is unembed.weight
    assert embed.weight.device == machine.devices[0]
