"""What a worker would not see is refused, and changes nothing."""

import copy
import shutil
from unittest import mock

import pytest
import torch
from hf_models import HF_CONFIGS, make_hf_model
from torch import nn
from torch.overrides import BaseTorchFunctionMode
from transformers import StaticCache

from tl_devicefix.dispatch.views import View
from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.multihost.checkpoint_files import differences, files_of
from tl_devicefix.multihost.remote_tensor import RemoteTensor
from tl_devicefix.multihost.worker import Worker

ONE, WEIGHTS = torch.zeros(1), "model.safetensors"


@pytest.fixture
def weight(spread):
    return next(p for p in spread("llama").blocks[2].parameters() if type(p) is RemoteTensor)


CHANGES = {
    "asked for a gradient": lambda weight: weight.requires_grad_(),
    "set to require a gradient": lambda weight: setattr(weight, "requires_grad", True),
    "multiplied in place": lambda weight: weight.mul_(2),
    "given other data": lambda weight: setattr(weight, "data", torch.zeros(weight.shape)),
    "changed by its data": lambda weight: weight.data.zero_(),
    "changed by an unread view": lambda weight: weight.transpose(0, -1).zero_(),
    "changed by a read view": lambda weight: weight.mT.zero_(),
    "changed detached": lambda weight: weight.detach().zero_(),
    "changed with others": lambda weight: torch._foreach_mul_([weight], 2),
    "taken for the output": lambda weight: torch.mul(weight.clone(), 2, out=weight),
}


@pytest.mark.once
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_remote_weight_refuses_every_change(change, weight):
    before = weight.clone()
    frozen = r"^blocks\.2\.\S+ is on node-b, where weights are frozen: they cannot be changed and "
    with pytest.raises(RuntimeError, match=frozen), torch.no_grad():
        change(weight)
    assert torch.equal(weight.clone(), before)
    assert not weight.requires_grad


def test_optimizer_changes_no_remote_weight(load, host, tokens):
    model = load("llama", device_map={"": "cpu", "blocks.2": "node-b/cpu"})
    own = [p for p in model.parameters() if p.requires_grad]
    before = own[0].clone()
    model(tokens, return_type="loss").backward()
    frozen = r"where weights are frozen: .* give the optimiser only"
    with pytest.raises(RuntimeError, match=frozen):
        torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(own, lr=0.1)
    with pytest.raises(RuntimeError, match=frozen):
        optimizer.add_param_group({"params": model.blocks[2].parameters()})
    optimizer.step()
    assert len(optimizer.param_groups) == 1
    assert not torch.equal(own[0], before)
    before = own[0].clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True)
    with pytest.raises(RuntimeError, match=frozen):
        optimizer.step()
    assert torch.equal(own[0], before)


def _first_weight(block):
    module = next(module for module in block.modules() if module._parameters)
    return module, next(iter(module._parameters))


PUT_IN = {
    "module": lambda block: setattr(block, "mlp", nn.Identity()),
    "module within one": lambda block: block.mlp.add_module("probe", nn.Linear(2, 2)),
    "forward": lambda block: setattr(block, "forward", lambda x: None),
    "parameter": lambda block: setattr(*_first_weight(block), nn.Parameter(ONE)),
    "buffer": lambda block: block.attn.register_buffer("mask", ONE),
    "attribute": lambda block: setattr(block.ln1, "eps", 3.0),
    "direction": lambda block: setattr(block.attn, "_attention_dir_override", "bidirectional"),
    "config": lambda block: setattr(block.attn, "cfg", None),
    "transformers' config": lambda block: setattr(block.attn, "config", object()),
    "torch hook": lambda block: block.mlp.register_forward_hook(lambda *args: None),
    "backward hook": lambda block: block.register_full_backward_hook(lambda *args: None),
}


@pytest.mark.parametrize("put_in", PUT_IN.values(), ids=PUT_IN)
def test_remote_block_refuses_local_edits(put_in, spread, tokens):
    model = spread("llama")
    with torch.no_grad():
        expected = model(tokens)
        with pytest.raises(RuntimeError, match=r"^blocks\.2 runs on node-b, .* assigned to it"):
            put_in(model.blocks[2])
        assert torch.equal(model(tokens), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: View(model).model])
def test_copies_of_remote_blocks_refuse_local_edits(copied, spread):
    with pytest.raises(RuntimeError, match="mlp was assigned to it here"):
        copied(spread("gpt2")).blocks[2].mlp = nn.Identity()


def a_hook_for_every_module():
    """One that is removed where the context ends."""
    return nn.modules.module.register_module_forward_hook(lambda module, args, output: None)


def within(context):
    def run(model, tokens):
        with context():
            model(tokens)

    return run


def edits_an_earlier_activation(model, tokens):
    kept = []

    def edit(x, hook):
        kept[0][:, 0] = 7.0

    for name, hook in (("resid_mid", lambda x, hook: kept.append(x)), ("mlp_out", edit)):
        model.add_hook(f"blocks.2.hook_{name}", hook)
    with torch.no_grad():
        model(tokens)


def hooks_its_own_block(model, tokens):
    def add(x, hook):
        model.add_hook("blocks.2.hook_resid_post", lambda x, hook: x * 1.5)

    model.add_hook("blocks.2.hook_resid_mid", add)
    model(tokens)


def differentiates_twice(model, tokens):
    kept = []
    model.add_hook("blocks.1.hook_resid_post", lambda x, hook: kept.append(x))
    loss = model(tokens, return_type="loss")
    torch.autograd.grad(loss, kept[0], create_graph=True)


CONVERTED = "on node-b, where weights keep their device"
ON = "where this has no effect: {}; undo it, or load".format
REFUSED = [
    (
        within(lambda: mock.patch("torch.compiler.is_compiling", return_value=True)),
        ON("it is compiled"),
    ),
    (within(lambda: torch.autocast("cpu", torch.bfloat16)), ON("torch.autocast is on")),
    (within(BaseTorchFunctionMode), ON("a BaseTorchFunctionMode is active")),
    (
        lambda model, tokens: torch.func.vmap(lambda row: model(row[None]))(tokens),
        ON("torch.func transforms it"),
    ),
    (within(a_hook_for_every_module), ON("torch has hooks for every module")),
    (edits_an_earlier_activation, "changes an activation of an earlier hook point"),
    (hooks_its_own_block, r"has put one on \S+ of the same block"),
    (differentiates_twice, "gradients of gradients"),
    (lambda model, tokens: model.half(), CONVERTED),
    (lambda model, tokens: model.to_empty(device="cpu"), CONVERTED),
]
REFUSED_OF_HOOKED = [(lambda model, tokens: model.load_and_process_state_dict({}), "are frozen")]
REFUSED_OF_BRIDGE = [
    (lambda model, tokens: model.train()(tokens), ON("the model is in training mode")),
    (
        lambda model, tokens: model.original_model(tokens, output_hidden_states=True),
        ON("transformers was asked for hidden states or attentions"),
    ),
    (
        lambda model, tokens: model(
            tokens, past_key_values=StaticCache(model.original_model.config, max_cache_len=16)
        ),
        "a StaticCache is used: only a Dyn",
    ),
]
REFUSED += REFUSED_OF_HOOKED if has_hooked_transformer() else REFUSED_OF_BRIDGE


@pytest.mark.parametrize(("run", "message"), REFUSED)
def test_edit_a_remote_host_would_miss_is_refused_before_it_acts(run, message, spread, tokens):
    model = spread("llama")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        expected = model(tokens)

    with pytest.raises(RuntimeError, match=message):
        run(model, tokens)

    model.eval().reset_hooks()
    for name, weight in model.state_dict().items():
        assert (weight.dtype, weight.device.type) == (before[name].dtype, "cpu")
        assert torch.equal(weight, before[name])
    with torch.no_grad():
        assert torch.equal(model(tokens), expected)


def test_hf_model_in_memory_cannot_be_loaded_over_hosts(load, host):
    host.calls.clear()
    refused = "hf_model cannot be loaded across several hosts: save it|When passing hf_model"
    where = {"": "cpu", "blocks.2": "node-b/cpu"}
    with pytest.raises(ValueError, match=refused):
        load("llama", hf_model=make_hf_model(HF_CONFIGS["llama"]()), device_map=where)
    assert not {"differences", "load"} & {*host.calls}


@pytest.mark.once
@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"device_map": {"": "cpu", "embed": "node-b/cpu"}}, "device_map puts embed on another h"),
        ({"device_map": {"": "cpu", "ln_final": 2}}, "device_map puts ln_final on another host"),
        ({"device_map": "node-b/cpu"}, "device_map puts embed on another host"),
        ({"device": "node-b/cpu", "n_devices": 2}, "device='node-b/cpu' is on another host"),
    ],
    ids=str,
)
def test_components_other_than_blocks_cannot_be_remote(where, message, load, host):
    host.calls.clear()
    with pytest.raises(ValueError, match=f"^{message}.* where only blocks can be: "):
        load("llama", **where)
    assert "load" not in host.calls


@pytest.mark.once
def test_pytorch_checkpoints_are_compared_to_their_ends(tmp_path):
    """Their zip files have checksums there."""
    for folder, end in (("here", b"a"), ("there", b"b")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
        (tmp_path / folder / "pytorch_model.bin").write_bytes(bytes(2**21 + 2**17) + end)
    here = files_of(str(tmp_path / "here"), {})
    (told,) = differences(here, str(tmp_path / "there"), {})
    assert "pytorch_model.bin of the same size" in told


@pytest.mark.once
def test_a_checkpoint_file_without_a_header_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=rf"{WEIGHTS} is damaged or incomplete"):
        files_of(str(tmp_path), {})


def changed(change, file):
    return lambda directory: (directory / file).write_bytes(change((directory / file).read_bytes()))


@pytest.mark.once
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            changed(lambda content: content[:-1] + bytes([content[-1] ^ 1]), WEIGHTS),
            "has another model.safetensors of the same size",
        ),
        (
            changed(lambda text: text.replace(b': "silu"', b': "gelu"'), "config.json"),
            "has another config.json of the same size",
        ),
        (lambda directory: (directory / WEIGHTS).unlink(), "has no model.safetensors"),
        (
            lambda directory: shutil.copy(directory / WEIGHTS, directory / "adapter.safetensors"),
            "has adapter.safetensors, which is not here",
        ),
        (
            changed(lambda content: content + b"\0", WEIGHTS),
            r"has another model.safetensors \(\d+ bytes instead of \d+\)",
        ),
    ],
)
def test_hosts_checkpoint_that_differs_is_refused(
    change, message, load, checkpoints, tmp_path, monkeypatch, host
):
    """Workers read a copy, under the name of the first."""
    there, here = tmp_path / "copy", Worker.differences
    shutil.copytree(checkpoints("llama"), there)
    monkeypatch.setattr(
        Worker, "differences", lambda self, files, name, hub: here(files, str(there), hub)
    )
    change(there)
    host.calls.clear()
    with pytest.raises(ValueError, match=f"^node-b {message} for '.*': give all hosts the same fi"):
        load("llama", device_map={"": "cpu", "blocks.2": "node-b/cpu"})
    assert "load" not in host.calls
