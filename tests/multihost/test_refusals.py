"""What a worker would not see is refused, and changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hf_models import HF_CONFIGS, make_hf_model
from local_hosts import LocalConnection
from torch import nn
from torch.overrides import TorchFunctionMode

from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.multihost import worker
from tl_devicefix.placement.remote_tensor import RemoteTensor

# --------------------------------------------------------------------------------------------
# Weights elsewhere are frozen


@pytest.fixture
def weight(spread: Any) -> torch.Tensor:
    """A weight of node-b."""
    return next(p for p in spread("llama").blocks[2].parameters() if type(p) is RemoteTensor)


def asked_for_a_gradient(weight: torch.Tensor) -> None:
    weight.requires_grad_()


def set_to_require_a_gradient(weight: torch.Tensor) -> None:
    weight.requires_grad = True


def multiplied_in_place(weight: torch.Tensor) -> None:
    weight.mul_(2)


def divided_in_place(weight: torch.Tensor) -> None:
    weight /= 2


def given_other_data(weight: torch.Tensor) -> None:
    weight.data = torch.zeros(weight.shape)


def changed_by_its_data(weight: torch.Tensor) -> None:
    weight.data.zero_()


def changed_in_a_row(weight: torch.Tensor) -> None:
    weight[0] = 0


def changed_by_a_row(weight: torch.Tensor) -> None:
    weight[0].zero_()


def changed_by_a_view(weight: torch.Tensor) -> None:
    weight.transpose(0, -1).zero_()


def changed_detached(weight: torch.Tensor) -> None:
    weight.detach().zero_()


def drawn_anew(weight: torch.Tensor) -> None:
    nn.init.zeros_(weight)


def changed_with_others(weight: torch.Tensor) -> None:
    torch._foreach_mul_([weight], 2)


def taken_for_the_output(weight: torch.Tensor) -> None:
    torch.mul(weight.clone(), 2, out=weight)


CHANGES = [
    *(asked_for_a_gradient, set_to_require_a_gradient, multiplied_in_place, divided_in_place),
    *(given_other_data, changed_by_its_data, changed_in_a_row, changed_by_a_row),
    *(changed_by_a_view, changed_detached, drawn_anew, changed_with_others, taken_for_the_output),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_elsewhere_cannot_be(change: Any, weight: torch.Tensor) -> None:
    before = weight.clone()

    frozen = r"^blocks\.2\.\S+ is on node-b, where weights are frozen: they cannot be changed and "
    with pytest.raises(RuntimeError, match=frozen), torch.no_grad():
        change(weight)

    assert torch.equal(weight.clone(), before)
    assert not weight.requires_grad


@pytest.mark.skipif(not has_hooked_transformer(), reason="a Bridge's hosts process their own")
def test_processing_of_weights_elsewhere_is_refused_before_any(spread: Any) -> None:
    model = spread("llama")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}

    with pytest.raises(RuntimeError, match="is on node-b, where weights are frozen"):
        model.load_and_process_state_dict({})

    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_an_optimiser_of_weights_elsewhere_changes_none(
    load: Any, host: LocalConnection, tokens: torch.Tensor
) -> None:
    model = load("llama", device_map={"": "cpu", "blocks.2": "node-b/cpu"})
    every, own = model.parameters(), [p for p in model.parameters() if p.requires_grad]
    before = [parameter.clone() for parameter in own]
    model(tokens, return_type="loss").backward()

    with pytest.raises(RuntimeError, match=r"where weights are frozen: .* give the optimiser only"):
        torch.optim.SGD(every, lr=0.1).step()

    assert all(torch.equal(parameter, was) for parameter, was in zip(own, before))
    torch.optim.SGD(own, lr=0.1).step()
    assert not torch.equal(own[0], before[0])


# --------------------------------------------------------------------------------------------
# What is put into a remote block, or exchanged in this process alone


def _attention(model: Any) -> Any:
    return model.blocks[2].attn


def a_module(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(model.blocks[2]._modules, "mlp", nn.Identity())


def a_module_within_one(model: Any, patch: pytest.MonkeyPatch) -> None:
    mlp = model.blocks[2].mlp
    patch.setitem(mlp._modules, "probe", nn.Linear(2, 2))


def a_forward(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(vars(_attention(model)), "forward", lambda *args, **kwargs: None)


def an_object_as_forward(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(vars(_attention(model)), "forward", Mock())


def a_method(model: Any, patch: pytest.MonkeyPatch) -> None:
    name = "apply_causal_mask" if has_hooked_transformer() else "_apply_reconstruct_attention_mask"
    assert callable(getattr(_attention(model), name))
    patch.setitem(vars(_attention(model)), name, lambda *args, **kwargs: None)


def a_parameter(model: Any, patch: pytest.MonkeyPatch) -> None:
    module = next(m for m in model.blocks[2].modules() if m._parameters)
    name = next(iter(module._parameters))
    patch.setitem(module._parameters, name, nn.Parameter(torch.zeros(1)))


def a_buffer(model: Any, patch: pytest.MonkeyPatch) -> None:
    buffers = _attention(model)._buffers
    patch.setitem(buffers, next(iter(buffers), "mask"), torch.zeros(1))


def a_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    mlp = model.blocks[2].mlp
    patch.setattr(mlp, "__class__", type("Mine", (type(mlp),), {"forward": lambda self, x: x}))


def a_hook_of_torch(model: Any, patch: pytest.MonkeyPatch) -> None:
    hooks = model.blocks[2].mlp._forward_hooks
    patch.setitem(hooks, 1 << 40, lambda module, args, output: output * 0)


def a_forward_of_its_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(model.blocks[2].mlp), "forward", lambda self, x, *args, **kwargs: x)


def a_method_of_its_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    name = "apply_causal_mask" if has_hooked_transformer() else "_apply_reconstruct_attention_mask"
    owner = next(cls for cls in type(_attention(model)).__mro__ if name in vars(cls))
    method = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: method(*args, **kwargs))


def a_function_of_torch(model: Any, patch: pytest.MonkeyPatch) -> None:
    silu = nn.functional.silu
    patch.setattr(nn.functional, "silu", lambda *args, **kwargs: silu(*args, **kwargs))


def a_function_of_the_library(model: Any, patch: pytest.MonkeyPatch) -> None:
    if has_hooked_transformer():
        from transformer_lens.components import grouped_query_attention as module

        name = "simple_attn_linear"
    else:
        import transformers.models.llama.modeling_llama as module

        name = "apply_rotary_pos_emb"
    function = getattr(module, name)
    patch.setattr(module, name, lambda *args, **kwargs: function(*args, **kwargs))


PUT_IN = [
    *(a_module, a_module_within_one, a_forward, a_method, a_parameter, a_buffer, a_class),
    *(a_hook_of_torch, an_object_as_forward),
    *(a_forward_of_its_class, a_method_of_its_class, a_function_of_torch),
    a_function_of_the_library,
]


@pytest.mark.parametrize("put_in", PUT_IN)
def test_what_is_put_in(
    put_in: Callable[..., None], spread: Any, alone: Any, tokens: torch.Tensor
) -> None:
    model = spread("llama")
    with torch.no_grad():
        expected = model(tokens)

        with pytest.MonkeyPatch.context() as patch:
            put_in(model, patch)
            with pytest.raises(RuntimeError, match="2 runs on node-b, where this has no effect"):
                model(tokens)

        assert torch.equal(model(tokens), expected)


def test_what_is_put_on_a_whole_block_acts(spread: Any, tokens: torch.Tensor) -> None:
    model = spread("llama")
    block = model.blocks[2]

    def doubled(output: Any) -> Any:
        return output * 2 if isinstance(output, torch.Tensor) else (output[0] * 2, *output[1:])

    forward = block.forward
    given = []
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        hook = block.register_forward_hook(lambda module, args, output: doubled(output))
        given.append(model(tokens))
        hook.remove()
        patch.setitem(vars(block), "forward", lambda *args, **kw: doubled(forward(*args, **kw)))
        given.append(model(tokens))
        patch.undo()
        given.append(model(tokens))

    assert torch.equal(given[0], given[1])
    assert not torch.equal(given[0], given[2])


# --------------------------------------------------------------------------------------------
# What is on in this process while a block runs elsewhere


class _Mode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return function(*args, **(kwargs or {}))


def autocast(model: Any, tokens: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens)


def a_function_mode(model: Any, tokens: torch.Tensor) -> Any:
    with _Mode():
        model(tokens)


def vmap(model: Any, tokens: torch.Tensor) -> Any:
    torch.func.vmap(lambda row: model(row[None]))(tokens)


def a_hook_for_every_module(model: Any, tokens: torch.Tensor) -> Any:
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        model(tokens)
    finally:
        hook.remove()


def torch_compile(model: Any, tokens: torch.Tensor) -> Any:
    torch.compile(model, backend="eager")(tokens)


def training(model: Any, tokens: torch.Tensor) -> Any:
    model.train()
    try:
        model(tokens)
    finally:
        model.eval()


def recorded(model: Any, tokens: torch.Tensor) -> Any:
    model.original_model(tokens, output_hidden_states=True)


ON = {
    torch_compile: "it is compiled",
    autocast: "torch.autocast is on",
    a_function_mode: "a _Mode is active",
    vmap: "torch.func transforms it",
    a_hook_for_every_module: "torch has hooks for every module",
}


if not has_hooked_transformer():
    ON |= {
        training: "the model is in training mode",
        recorded: "transformers was asked for hidden states or attentions",
    }


@pytest.mark.parametrize("run", ON)
def test_what_is_on(run: Any, spread: Any, tokens: torch.Tensor) -> None:
    with pytest.raises(
        RuntimeError, match=f"where this has no effect: {ON[run]}; undo it, or load"
    ):
        run(spread("llama"), tokens)


# --------------------------------------------------------------------------------------------
# Loading


def test_a_model_in_memory_is_refused(load: Any, host: LocalConnection) -> None:
    hf_model = make_hf_model(HF_CONFIGS["llama"]())
    host.calls.clear()

    refused = "hf_model cannot be loaded over several hosts: save it|When passing hf_model"
    with pytest.raises(ValueError, match=refused):
        load("llama", hf_model=hf_model, device_map={"": "cpu", "blocks.2": "node-b/cpu"})

    assert not {"differences", "load"} & {*host.calls}


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"device_map": {"": "cpu", "embed": "node-b/cpu"}}, "device_map puts embed on another h"),
        ({"device_map": {"": "cpu", "unembed": "host1/1"}}, "device_map puts unembed on another h"),
        ({"device_map": {"": "cpu", "ln_final": 2}}, "device_map puts ln_final on another host"),
        ({"device_map": "node-b/cpu"}, "device_map puts embed on another host"),
        ({"device": "node-b/cpu", "n_devices": 2}, "device='node-b/cpu' is on another host"),
    ],
    ids=str,
)
def test_only_blocks_can_be_elsewhere(
    where: Any, message: str, load: Any, host: LocalConnection
) -> None:
    host.calls.clear()

    with pytest.raises(ValueError, match=f"^{message}.* where only blocks can be: "):
        load("llama", **where)

    assert "load" not in host.calls


@pytest.fixture
def other_files(checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a checkpoint, which workers read under the name of the first."""
    copy = tmp_path / "copy"
    shutil.copytree(checkpoints("llama"), copy)
    here = worker.differences
    monkeypatch.setattr(worker, "differences", lambda files, name, hub: here(files, str(copy), hub))
    return copy


def a_value(directory: Path) -> None:
    file = directory / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def a_setting(directory: Path) -> None:
    file = directory / "config.json"
    file.write_text(file.read_text().replace('"hidden_act": "silu"', '"hidden_act": "gelu"'))


def a_file_less(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def more(directory: Path) -> None:
    with (directory / "model.safetensors").open("ab") as file:
        file.write(b"\0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (a_value, "has another model.safetensors of the same size"),
        (a_setting, "has another config.json of the same size"),
        (a_file_less, "has no model.safetensors"),
        (more, r"has another model.safetensors \(\d+ bytes instead of \d+\)"),
    ],
)
def test_a_checkpoint_that_differs(
    change: Any, message: str, load: Any, other_files: Path, host: LocalConnection
) -> None:
    load("llama", device_map={"": "cpu", "blocks.2": "node-b/cpu"})
    change(other_files)
    host.calls.clear()

    with pytest.raises(ValueError, match=f"^node-b {message} for '.*': give all hosts the same fi"):
        load("llama", device_map={"": "cpu", "blocks.2": "node-b/cpu"})

    assert "load" not in host.calls
