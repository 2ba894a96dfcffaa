"""`tl_devicefix.check`: each fault is found and named, the given line fixes it."""

import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from comparison import assert_agrees
from devices import device
from hf_models import D_MODEL
from model_classes import BRIDGE, CLASSES, HOOKED
from parameters import in_turn
from torch import nn

import tl_devicefix
from tl_devicefix import check
from tl_devicefix.monkeypatch.versions import has_hooked_transformer

if has_hooked_transformer():
    from transformer_lens.components import TransformerBlock

pytestmark = pytest.mark.filterwarnings("ignore:.*does not support:UserWarning")


BLOCKS = {f"blocks.{layer}": device for layer, device in enumerate((0, 1, 2, 2, 3))}


@pytest.fixture
def model(load):
    """A folded Llama across four devices, which a test may change; block 2 is on `device(2)`."""
    return load("llama", folded=True, device_map={"": 0, **BLOCKS})


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


REPAIR = "tl_devicefix.check(model, repair=True)"


class Fault(NamedTuple):
    """How a model is broken, what is found, how the given line begins, and whether it fixes it."""

    breaks: Callable[[Any], Any]
    kind: str
    name: str
    says: tuple[str, ...]
    fix: str = REPAIR
    is_fixed: bool = True


def block_moved(model):
    model.blocks[2].to(device(0))


def home_renamed(model):
    model.cfg.device = device(1)


def identity(activation, hook):
    pass


def pytorch_hook_left(model):
    model.blocks[2].register_forward_hook(lambda *args: None)


def parameter_replaced(model):
    model.unembed.W_U = nn.Parameter(model.unembed.W_U.detach().to(device(2)))


def some_parameters_moved(model):
    for name in ("_W_K", "W_Q"):
        parameter = getattr(model.blocks[4].attn, name)
        parameter.data = parameter.data.to("cpu")


def block_replaced(model):
    weights = model.blocks[2].state_dict()
    model.blocks[2] = TransformerBlock(model.cfg, 2).to(device(2))
    model.blocks[2].load_state_dict(weights, strict=False)


def backward_hook_left(model):
    model.blocks[2].hook_resid_post.add_hook(identity, dir="bwd")


def mlp_replaced_in_the_wrapped_model(model):
    model.original_model.model.layers[2].mlp = nn.Linear(D_MODEL, D_MODEL).to(device(0))


def weight_moved(model):
    weight = model.blocks[4].attn.q._original_component.weight
    weight.data = weight.data.to("cpu")


def hook_left(model):
    model.add_hook("blocks.2.hook_resid_post", identity)


OF_EITHER = [
    Fault(block_moved, "device", "blocks.2",
          (f"is on {device(0)}", f"placement puts it on {device(2)}")),
    Fault(pytorch_hook_left, "hooks", "blocks.2", ("PyTorch forward hook", "lambda"),
          "del model.blocks[2]._forward_hooks["),
    Fault(home_renamed, "config", "cfg.device", (f"'{device(1)}'", f"home is {device(0)}"),
          f'model.cfg.device = "{device(0)}"'),
]  # fmt: skip
FAULTS = {
    HOOKED: [
        *OF_EITHER,
        Fault(parameter_replaced, "device", "unembed",
              ("W_U of", f"is on {device(2)}", f"puts it on {device(0)}", "2.5 KiB")),
        Fault(some_parameters_moved, "device", "blocks.4",
              ("attn.W_Q, attn._W_K of blocks.4", "is on cpu", f"puts it on {device(3)}")),
        Fault(block_replaced, "setup", "blocks.2", ("has changed since",)),
        Fault(backward_hook_left, "hooks", "blocks.2.hook_resid_post", ("identity",),
              "model.reset_hooks()"),
    ],
    BRIDGE: [
        *OF_EITHER,
        Fault(mlp_replaced_in_the_wrapped_model, "device", "blocks.2",
              ("_original_component.mlp.weight, ", f"is on {device(0)}", f"puts it on {device(2)}"),
              is_fixed=False),
        Fault(weight_moved, "device", "blocks.4",
              ("attn.q.weight of", "is on cpu", f"puts it on {device(3)}")),
        Fault(hook_left, "hooks", "blocks.2.hook_out", ("identity",), "model.reset_hooks()"),
    ],
}  # fmt: skip
REPLACED = (parameter_replaced, block_replaced, mlp_replaced_in_the_wrapped_model)


@pytest.mark.parametrize(
    ("model_class", "fault"),
    [(model_class, fault) for model_class in CLASSES for fault in FAULTS[model_class]],
    ids=lambda value: value if isinstance(value, str) else value.breaks.__name__,
)
def test_each_fault_is_named_and_fixed_by_its_line(
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
    if finding.fix == REPAIR:
        report = check(model, repair=True)
        assert (report.findings, report.repaired) == ((), (finding,))
        assert "repaired (1)" in repr(report)
    else:
        exec(finding.fix, {"model": model})
    assert check(model), check(model)
    if fault.breaks not in REPLACED:
        assert repr(model.placement) == placed
        assert all(parameters[name] is item for name, item in model.named_parameters())
        # TransformerLens 3.9 runs a gated MLP of a folded Bridge by plain tensors beside its
        # parameters (`_processed_W_in` and the like). They share memory until a parameter is
        # moved, which they are not.
        if not (model_class == BRIDGE and has_hooked_transformer()):
            assert [machine.memory_allocated(device) for device in machine.devices] == held
    if fault.is_fixed:
        assert_agrees(model(tokens), reference(tokens), model.placement.home)
        assert_agrees(model.run_with_cache(tokens)[1], reference.run_with_cache(tokens)[1])


def everything_in(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    places = {name: (id(tensor), tensor.device) for name, tensor in tensors.items()}
    modules = {name: set(vars(module)) for name, module in model.named_modules()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return places, modules, hooks, repr(model.cfg), id(model.placement)


@pytest.mark.hooked
def test_many_faults_of_a_kind_are_all_found_and_a_few_printed(model):
    model.add_hook(lambda name: "resid" in name, identity)
    report = check(model)
    assert len(report.findings) == 3 * len(model.blocks)
    assert f"and {len(report.findings) - 8} more of this kind" in repr(report)
    assert len(repr(report).splitlines()) == 10


@pytest.mark.hooked
def test_a_check_changes_nothing_and_copies_nothing(model, machine):
    for fault in (block_moved, some_parameters_moved, backward_hook_left):
        fault(model)
    before = everything_in(model)
    machine.reset_transfers()
    assert {finding.kind for finding in check(model).findings} == {"device", "hooks"}
    assert machine.transfers == []
    assert everything_in(model) == before


@pytest.mark.hooked
def test_repair_of_everything_at_once_leaves_what_it_cannot_mend(model, reference, tokens):
    model(tokens, return_type="loss").backward()
    model.blocks[3].to(device(0))
    for fault in (
        block_moved,
        home_renamed,
        parameter_replaced,
        block_replaced,
        backward_hook_left,
    ):
        fault(model)

    report = check(model, repair=True)

    assert [item.kind for item in report.findings] == ["hooks"]
    gradients = [p.grad for p in model.blocks[3].parameters() if p.grad is not None]
    assert {gradient.device for gradient in gradients} == {torch.device(device(2))}
    model.reset_hooks()
    assert check(model)
    assert_agrees(model(tokens), reference(tokens), model.placement.home)


CLASS_NAMES = {HOOKED: "HookedTransformer", BRIDGE: "TransformerBridge"}


def test_check_refuses_an_object_that_is_no_model(model_class, on_one):
    with pytest.raises(TypeError, match=f"{CLASS_NAMES[model_class]}.*, but this is a Linear"):
        check(nn.Linear(2, 2))
    if model_class == BRIDGE:
        with pytest.raises(TypeError, match=r"TransformerBridge, but this is a GPT2LMHeadModel"):
            check(on_one("gpt2").original_model)


@pytest.mark.bridge
@pytest.mark.parametrize("name", ["gpt2", "bloom", "gpt-oss", "nemotron-h"])
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


@pytest.mark.hooked
def test_repaired_blocks_share_the_buffers_that_they_shared(load):
    model = load("llama", 2)
    shared, own = torch.ones(3, device=device(1)), torch.ones(3, device=device(0))
    for layer, misplaced in {0: shared, 1: shared, 4: own}.items():
        model.blocks[layer].register_buffer("table", misplaced)
    assert check(model, repair=True)
    first, second, on_other = (model.blocks[layer].table for layer in (0, 1, 4))
    assert first is second
    assert (str(first.device), str(on_other.device)) == (device(0), device(1))


WHERE = [
    {"device": None},
    {"n_devices": 2, "device": device(2)},
    {"device_map": {"": 1, "blocks.0": 3, "blocks.3": 0}},
]


@pytest.mark.hooked
@pytest.mark.parametrize(
    ("name", "options"), in_turn(["gemma-2", "mixtral", "bloom", "gpt2"], WHERE)
)
def test_check_finds_no_fault_after_loading_copying_or_moving(name, options, load, tokens):
    model = load(name, **options)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model(tokens.to(model.cfg.device))  # leaves ALiBi biases
    assert check(model), check(model)
    assert check(copy.deepcopy(model))
    assert check(model.to(torch.bfloat16))
    assert check(model.to(device(2)))


@pytest.mark.hooked
def test_check_accepts_aliases_of_parts_and_permanent_hooks(model):
    model.probe = model.blocks[3].mlp
    model.blocks[2].hook_resid_post.add_perma_hook(lambda activation, hook: None)
    assert check(model), check(model)


@pytest.mark.hooked
def test_misplaced_module_is_found_until_setup_then_stays(model, tokens):
    model.blocks[4].mlp = nn.Linear(D_MODEL, D_MODEL).to(device(0))
    (finding,) = check(model).findings
    assert (finding.kind, finding.name) == ("device", "blocks.4")

    model.setup()

    assert check(model)
    expected = model(tokens)
    model.blocks[4].attn.to(device(1))
    report = check(model, repair=True)

    assert report
    assert [item.kind for item in report.repaired] == ["device"]
    assert model.blocks[4].mlp.weight.device == torch.device(device(0))
    assert_agrees(model(tokens), expected)


@pytest.mark.hooked
def test_a_model_without_a_placement_is_compared_with_its_config(on_one):
    model = on_one("gpt2")
    with tl_devicefix.simulate(2):
        assert check(model)
        model.blocks[2].to(device(1))

        report = check(model, repair=True)

    (finding,) = report.repaired
    assert finding.name == "blocks.2"
    assert "cfg.device puts it on cpu" in finding.message
    assert report
    assert {parameter.device for parameter in model.parameters()} == {torch.device("cpu")}


@pytest.mark.hooked
def test_offloaded_block_moved_to_a_device_is_found_and_repaired(load, tokens):
    model = load("llama", 1, device_map={"": 0, "blocks.2": "cpu"})
    assert check(model).well, check(model)
    model.blocks[2].to(device(0))
    (finding,) = check(model).findings
    assert re.search(r"of blocks\.2 .* but the placement puts it on cpu", finding.message)
    assert check(model, repair=True).well
    assert {p.device.type for p in model.blocks[2].parameters()} == {"cpu"}
