"""`tl_devicefix.check` of a Bridge: each fault is found and named, and the given line mends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from comparison import assert_agrees
from hf_models import D_MODEL, D_VOCAB, HF_CONFIGS
from torch import nn

import tl_devicefix
from tl_devicefix import check

pytestmark = pytest.mark.filterwarnings("ignore:.*does not support:UserWarning")


@pytest.fixture
def bridge(boot: Any, machine: Any) -> Any:
    """A Llama in compatibility mode over four devices; block 2 is on sim:2."""
    blocks = {f"blocks.{layer}": device for layer, device in enumerate((0, 1, 2, 2, 3))}
    return boot("llama", compatible=True, device_map={"": 0, **blocks})


# --------------------------------------------------------------------------------------------
# Nothing is wrong


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_a_booted_bridge_is_well_before_and_after_folding(
    name: str, boot: Any, machine: Any, tokens: torch.Tensor
) -> None:
    bridge = boot(name, n_devices=3)
    for fold in (False, True):
        if fold:
            bridge.enable_compatibility_mode()
        report = check(bridge)
        assert (report.findings, report.notes) == ((), ())
        held = [machine.memory_allocated(index) for index in range(3)]
        assert [each.held for each in report.memory] == held
    bridge(tokens)
    assert check(bridge), check(bridge)


@pytest.mark.parametrize("compatible", [False, True])
def test_a_bridge_of_the_unpatched_release_is_well(compatible: bool, references: Any) -> None:
    report = check(references("gpt2", compatible=compatible))

    assert report, report
    assert repr(report).endswith("on cpu")


def test_parameters_in_one_memory_are_counted_once(references: Any, hf_models: Any) -> None:
    expected = sum(parameter.numel() for parameter in hf_models("gemma-2").parameters())
    zeros = D_VOCAB  # a bias of the unembedding, which the release adds
    assert check(references("gemma-2")).n_parameters in (expected, expected + zeros)


def test_processing_without_folding_leaves_all_norms(boot: Any, machine: Any) -> None:
    bridge = boot("llama", n_devices=3)
    bridge.enable_compatibility_mode(fold_ln=False)
    assert check(bridge), check(bridge)


# --------------------------------------------------------------------------------------------
# Something is


@dataclass(frozen=True)
class Fault:
    """How a Bridge is broken, and what is found.

    The fix is run with `values`, which are those that the reference has under the name.
    """

    breaks: Callable[[Any], Any]
    kind: str
    name: str
    says: tuple[str, ...]
    fix: str | None


def block_moved(bridge: Any) -> None:
    bridge.blocks[2].to("sim:0")


def mlp_replaced_in_the_wrapped_model(bridge: Any) -> None:
    bridge.original_model.model.layers[2].mlp = nn.Linear(D_MODEL, D_MODEL).to("sim:0")


def weight_moved(bridge: Any) -> None:
    weight = bridge.blocks[4].attn.q._original_component.weight
    weight.data = weight.data.to("cpu")


def on_meta(bridge: Any) -> None:
    linear = bridge.blocks[2].attn.q._original_component
    linear.weight = nn.Parameter(linear.weight.detach().to("meta"))


def not_finite(bridge: Any) -> None:
    values = bridge.blocks[2].attn.q._original_component.weight.data
    values[0, :3], values[1, 3] = float("nan"), -float("inf")


def tied(bridge: Any) -> None:
    bridge.unembed._original_component.weight.data = bridge.embed._original_component.weight.data


def norm_not_folded(bridge: Any) -> None:
    bridge.blocks[2].ln1._original_component.weight.data.fill_(2.0)


def hook_left(bridge: Any) -> None:
    bridge.add_hook("blocks.2.hook_resid_post", identity)


def identity(activation: Any, hook: Any) -> None:
    pass


def pytorch_hook_left(bridge: Any) -> None:
    bridge.blocks[2].register_forward_hook(lambda *args: None)


def home_renamed(bridge: Any) -> None:
    bridge.cfg.device = "sim:1"


FAULTS = {
    "a block moved by hand": Fault(
        block_moved, "device", "blocks.2",
        ("is on sim:0", "placement puts it on sim:2"), 'model.blocks[2].to("sim:2")',
    ),
    "a module of the wrapped model replaced": Fault(
        mlp_replaced_in_the_wrapped_model, "device", "blocks.2._original_component.mlp",
        ("is on sim:0", "puts it on sim:2"), 'model.blocks[2]._original_component.mlp.to("sim:2")',
    ),
    "a weight moved": Fault(
        weight_moved, "device", "blocks.4.attn.q",
        ("is on cpu", "puts it on sim:3"), 'model.blocks[4].attn.q.to("sim:3")',
    ),
    "a weight on meta": Fault(
        on_meta, "meta", "blocks.2.attn.q.weight", ("[16, 16]", "no values"),
        'model.load_state_dict({"blocks.2.attn.q.weight": values}, strict=False, assign=True)',
    ),
    "values that are not finite": Fault(
        not_finite, "values", "blocks.2.attn.q.weight", ("3 NaN and 1 infinite of 256 values",),
        'model.load_state_dict({"blocks.2.attn.q.weight": values}, strict=False)',
    ),
    "embeddings tied after folding": Fault(
        tied, "storage", "unembed.weight", ("shares its memory with embed.weight",), None
    ),
    "a norm that is not folded": Fault(
        norm_not_folded, "norms", "blocks.2.ln1", ("blocks.2.ln1 still scales", "boot"), None
    ),
    "a hook": Fault(
        hook_left, "hooks", "blocks.2.hook_out", ("identity",), "model.reset_hooks()"
    ),
    "a PyTorch hook": Fault(
        pytorch_hook_left, "hooks", "blocks.2", ("PyTorch forward hook", "lambda"),
        "del model.blocks[2]._forward_hooks[",
    ),
    "a config of another device": Fault(
        home_renamed, "config", "cfg.device", ("'sim:1'", "home is sim:0"),
        'model.cfg.device = "sim:0"',
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_each_fault_is_found_alone_and_named(fault: Fault, bridge: Any) -> None:
    fault.breaks(bridge)

    report = check(bridge)

    (finding,) = report.findings
    assert (finding.kind, finding.name) == (fault.kind, fault.name)
    assert all(part in finding.message for part in fault.says), finding.message
    assert not report


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=name)
        for name, fault in FAULTS.items()
        if fault.fix and fault.breaks is not mlp_replaced_in_the_wrapped_model
    ],
)
def test_the_line_that_is_given_mends_it(
    fault: Fault, bridge: Any, references: Any, tokens: torch.Tensor
) -> None:
    reference = references("llama", compatible=True)
    fault.breaks(bridge)
    (finding,) = check(bridge).findings
    assert finding.fix is not None
    assert finding.fix.startswith(str(fault.fix))

    values = reference.state_dict().get(finding.name)
    if finding.kind == "meta":  # is assigned, so it has to be there already
        values = values.clone().to("sim:2")
    exec(finding.fix, {"model": bridge, "values": values, "torch": torch})

    assert check(bridge), check(bridge)
    assert_agrees(bridge(tokens), reference(tokens))


@pytest.mark.parametrize("breaks", [block_moved, weight_moved, home_renamed])
def test_a_repair_moves_what_is_misplaced(
    breaks: Any, bridge: Any, references: Any, tokens: torch.Tensor
) -> None:
    breaks(bridge)

    report = check(bridge, repair=True)

    assert report, report
    assert report.repaired
    assert check(bridge), check(bridge)
    assert_agrees(bridge(tokens), references("llama", compatible=True)(tokens))


def test_a_repair_keeps_what_is_tied_tied(boot: Any, machine: Any) -> None:
    bridge = boot("gpt2", n_devices=3)
    bridge.embed.to("sim:2")

    assert check(bridge, repair=True), check(bridge)

    embed, unembed = bridge.embed._original_component, bridge.unembed._original_component
    assert embed.weight is unembed.weight
    assert embed.weight.device == machine.devices[0]


def test_what_is_no_model_is_refused(references: Any) -> None:
    with pytest.raises(TypeError, match=r"TransformerBridge, but this is a GPT2LMHeadModel"):
        tl_devicefix.check(references("gpt2").original_model)
