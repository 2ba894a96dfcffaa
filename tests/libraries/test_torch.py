"""docs/compatibility.md: the rows of its table, functions of a model and tokens, for each class."""

import contextlib
import copy
import io
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import safetensors.torch
import torch
from comparison import assert_agrees
from model_classes import BRIDGE, HOOKED
from torch.func import functional_call, grad, vmap
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parameters_to_vector
from torch.utils.checkpoint import checkpoint

import tl_devicefix

ROWS = {}


def row(name):

    def put(call):
        ROWS[name] = call
        return call

    return put


def loss_of(model, tokens):
    return model(tokens, return_type="loss")


def gradients(model):
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def trained(make):
    """Two steps; the losses before, between and after them."""

    def run(model, tokens):
        optimizer = make(model.parameters())
        losses = []
        for _ in range(3):
            loss = loss_of(model, tokens)
            losses.append(loss.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses

    return run


ROWS["`AdamW`"] = trained(lambda parameters: torch.optim.AdamW(parameters, lr=0.01))


def step_of_lbfgs(model, tokens):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        return loss

    optimizer.step(closure)
    return loss_of(model, tokens)


ROWS["`LBFGS`"] = step_of_lbfgs


@row("`LBFGS`, weights made contiguous")
def lbfgs_of_contiguous(model, tokens):
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    return step_of_lbfgs(model, tokens)


@row("`clip_grad_norm_`")
def clipped(model, tokens):
    loss_of(model, tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return [norm, *gradients(model)]


ROWS |= {
    "`parameters_to_vector`": lambda model, tokens: parameters_to_vector(model.parameters()),
    "`torch.cat([p.flatten() for p in model.parameters()])`": lambda model, tokens: torch.cat(
        [parameter.flatten() for parameter in model.parameters()]
    ),
}


@row("`torch.utils.checkpoint`")
def recomputed(model, tokens):
    loss = checkpoint(loss_of, model, tokens, use_reentrant=False)
    loss.backward()
    return [loss, *gradients(model)]


@row("`torch.utils.checkpoint`, block by block")
def blocks_recomputed(model, tokens):
    stream = model(tokens, stop_at_layer=0)
    for block in model.blocks:
        stream = checkpoint(block, stream, use_reentrant=True)
    stream.square().mean().backward()
    return [stream, *gradients(model)]


@row("`functional_call`")
def with_other_weights(model, tokens):
    weights = {name: 1.1 * parameter for name, parameter in model.named_parameters()}
    return functional_call(model, weights, (tokens,))


@row("`torch.func.grad`")
def gradients_of_weights(model, tokens):
    def loss(weights):
        return functional_call(model, weights, (tokens,), {"return_type": "loss"})

    return grad(loss)({name: parameter.detach() for name, parameter in model.named_parameters()})


@row("`vmap`")
def mapped(model, tokens):
    """The logits, as each of three vectors at home is added to the residual stream."""

    def logits(vector):
        hook = ("blocks.1.hook_resid_pre", lambda stream, hook: stream + vector)
        return model.run_with_hooks(tokens, fwd_hooks=[hook])

    scales = torch.tensor([[0.5], [1.0], [2.0]], device=model.cfg.device)
    return vmap(logits)(scales.expand(3, model.cfg.d_model))


@row("`torch.autocast`")
def autocast(model, tokens):
    with torch.autocast(torch.device(model.cfg.device).type, dtype=torch.bfloat16):
        return model(tokens)


@row("`torch.inference_mode`")
def inference(model, tokens):
    with torch.inference_mode():
        return model(tokens)


def saved(model, **options):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False, **options)


ROWS |= {
    "`torch.save(model)`": lambda model, tokens: saved(model)(tokens),
    '`torch.load(..., map_location="cpu")`': lambda model, tokens: saved(model, map_location="cpu")(
        tokens
    ),
}


def elsewhere(model, save, load):
    """A copy on one device that loads what was saved; a Bridge's stays on the same devices."""
    other = copy.deepcopy(model)
    if not hasattr(model, "original_model"):
        other.to(model.cfg.device)
    with torch.no_grad(), TemporaryDirectory() as directory:
        for parameter in other.parameters():
            parameter.zero_()
        path = str(Path(directory) / "model.safetensors")
        save(model, path)
        load(other, path)
    return other


@row("`safetensors.torch.save_model`, loaded onto other devices")
def in_safetensors(model, tokens):
    other = elsewhere(model, safetensors.torch.save_model, safetensors.torch.load_model)
    return other(tokens)


@row("`safetensors.torch.save_file` of copies, loaded onto other devices")
def copies_in_safetensors(model, tokens):
    def save(model, path):
        copied = {"device": "cpu", "copy": True, "memory_format": torch.contiguous_format}
        safetensors.torch.save_file(
            {name: tensor.to(**copied) for name, tensor in model.state_dict().items()}, path
        )

    def load(model, path):
        model.load_state_dict(safetensors.torch.load_file(path))

    return elsewhere(model, save, load)(tokens)


@row("`register_module_forward_hook`, which adds a vector from home")
def global_hook_that_adds(model, tokens):
    vector = torch.ones(model.cfg.d_model, device=model.cfg.device)
    mlps = [block.mlp for block in model.blocks]
    handle = register_module_forward_hook(
        lambda module, _, output: output + vector if module in mlps else None
    )
    try:
        return model(tokens)
    finally:
        handle.remove()


PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
WORKS, MIXING, NEITHER, REFUSED = "yes", "within `mix_devices`", "fails on one device too", "no: "
STATES = (WORKS, MIXING, NEITHER, REFUSED)


def table():
    """What the page says of each row, for each class."""
    _, _, section = PAGE.read_text().partition("\n## What works with torch")
    section, _, _ = section.partition("\n## ")
    cells = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    rows = [cell for cell in cells if cell[0] in ROWS or cell[1].startswith(STATES)]
    return {name: {HOOKED: hooked, BRIDGE: bridge} for name, hooked, bridge in rows}


TABLE = table()


def test_page_lists_exactly_the_rows_that_are_tested():
    assert list(TABLE) == list(ROWS)


CHANGING = {
    *("`AdamW`", "`LBFGS`", "`LBFGS`, weights made contiguous"),
    *("`functional_call`", "`torch.func.grad`"),
    *(name for name in ROWS if "safetensors" in name),  # a Bridge keeps activations of its copies
}
"""The rows that leave other weights or activations in a model."""


@pytest.fixture
def both(name, load, shared, on_one, machine):
    """A Llama over four devices, which a row changes only if it is `CHANGING`, and one on a CPU."""
    models = (load if name in CHANGING else shared)("llama", n_devices=4), on_one("llama")
    return tuple(model.requires_grad_() for model in models)


@pytest.mark.parametrize("name", ROWS)
def test_each_row_behaves_as_the_page_says(name, model_class, both, tokens):
    (spread, alone), says, call = both, TABLE[name][model_class], ROWS[name]
    if says.startswith(NEITHER):
        with pytest.raises((AttributeError, RuntimeError)):
            call(alone, tokens)
        return
    if says.startswith(REFUSED):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            call(spread, tokens)
        assert str(caught.value).split("\n")[0].startswith(says.removeprefix(REFUSED).split("*")[1])
        return
    expected = call(alone, tokens)
    if says == MIXING:
        with pytest.raises(RuntimeError, match="same device"):
            call(spread, tokens)
    else:
        assert says == WORKS
    with tl_devicefix.mix_devices() if says == MIXING else contextlib.nullcontext():
        assert_agrees(call(spread, tokens), expected, tolerance=1e-4)


@pytest.mark.full("it compiles for half a minute")
def test_a_model_on_one_device_may_be_compiled(on_one, tokens):
    model = on_one("llama").requires_grad_()
    expected = model(tokens, return_type="loss")
    torch._dynamo.reset()
    result = torch.compile(model, backend="eager")(tokens, return_type="loss")
    result.backward()
    assert_agrees(result, expected, tolerance=1e-4)
    assert gradients(model)
