"""The simulated devices as torch code sees them: placement, errors, numbers, entering, leaving."""

import contextlib
import copy
import io
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tl_devicefix.placement.devices import resolve
from tl_devicefix.simulation import simulate

pytestmark = pytest.mark.once


def test_simulated_tensors_give_python_their_values(machine):
    x = torch.tensor([[1.5, 2.0]], device="sim:1")
    assert type(x) == torch.Tensor != torch.nn.Parameter  # noqa: E721
    assert x.tolist() == [[1.5, 2.0]]
    assert x[0, 0].item() == 1.5
    assert 2.0 in x
    assert 3.0 not in x
    assert f"{x[0, 1]:.2f}" == "2.00"
    assert repr(x) == "tensor([[1.5000, 2.0000]], device='sim:1')"
    assert "requires_grad=True" in repr(x.requires_grad_())
    assert "grad_fn=<MulBackward0>" in repr(x * 2)
    with pytest.raises(TypeError, match="can't convert sim:1 device type tensor to numpy"):
        x.detach().numpy()


def test_indices_may_be_on_the_cpu_or_the_same_device(machine):
    cpu = torch.arange(6.0).view(2, 3)
    x = cpu.to("sim:1")
    rows = torch.tensor([1, 0])
    assert torch.equal(x[rows].cpu(), cpu[rows])
    assert torch.equal(x[rows.to("sim:1")].cpu(), cpu[rows])
    assert torch.equal(x[0, [1, 2]].cpu(), cpu[0, [1, 2]])
    assert torch.equal(x[cpu > 2].cpu(), cpu[cpu > 2])
    x[rows, [0, 1]] = torch.tensor(7.0)
    cpu[rows, [0, 1]] = torch.tensor(7.0)
    assert torch.equal(x.cpu(), cpu)
    for indexed, index in ((x, rows.to("sim:2")), (cpu, rows.to("sim:2"))):
        with pytest.raises(RuntimeError, match="either on cpu or on the same device"):
            indexed[index]


def test_moved_or_copied_module_keeps_ties_and_gradients(machine):
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    weight = tied[1].weight = tied[0].weight
    weight.label = "mine"
    graph = tied(torch.ones(1, 2))  # A live graph must not keep a module from moving.
    graph.sum().backward()
    gradient = weight.grad.clone()
    for device in ("sim:1", "cpu", "sim:3"):
        tied.to(device)
        assert tied[0].weight is tied[1].weight is weight
        assert weight.device == weight.grad.device == torch.device(device)
        assert isinstance(weight, torch.nn.Parameter)
        assert weight.label == "mine"
        assert torch.equal(weight.grad.cpu(), gradient)
        assert tied(torch.ones(1, 2, device=device)).device == weight.device
    twin = copy.deepcopy(tied)
    with torch.no_grad():
        weight.zero_()
    assert twin[0].weight is twin[1].weight is not weight
    assert isinstance(twin[0].weight, torch.nn.Parameter)
    assert twin[0].weight.device == torch.device("sim:3")
    assert twin[0].weight.any()


def test_deep_copies_of_parameters_share_no_memory(machine):
    both = torch.ones(4, device="sim:1")
    parts = copy.deepcopy(torch.nn.ParameterList(map(torch.nn.Parameter, both.split(2))))
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 2
    assert {part.untyped_storage().nbytes() for part in parts} == {8}


def test_copies_and_pickles_of_leaves_are_as_torch_makes_them(machine):
    for leaf in (torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)):
        simulated = leaf.detach().to("sim:1").requires_grad_()
        if isinstance(leaf, torch.nn.Parameter):
            simulated = torch.nn.Parameter(simulated)
        for copied in (copy.copy(simulated), pickle.loads(pickle.dumps(simulated))):
            assert isinstance(copied, torch.nn.Parameter) == isinstance(leaf, torch.nn.Parameter)
            assert copied.requires_grad


def test_shapes_and_data_changed_in_place_are_seen(machine):
    x, out = torch.zeros(3, device="sim:1").unsqueeze_(0), torch.empty(0, device="sim:1")
    torch.mul(x, 2, out=out)
    assert x.shape == (x + 1).shape == out.shape == (1, 3)
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.data = torch.ones(3, device="sim:1")
    assert parameter.device == torch.device("sim:1")
    assert parameter.tolist() == [1, 1, 1]
    parameter.data = parameter.data.to("sim:2") * 2
    assert parameter.device == torch.device("sim:2")
    assert (parameter + 0).tolist() == [2, 2, 2]
    loss = (parameter * parameter).sum()
    parameter.data = torch.zeros(3)  # while a graph holds it
    assert type(parameter) is torch.nn.Parameter
    assert parameter.tolist() == [0, 0, 0]
    loss.backward()


def test_the_device_module_tells_the_devices():
    with simulate(3, memory="1GiB") as machine:
        module = torch.get_device_module("sim")
        assert module.device_count() == 3
        assert module.is_available()
        assert module.current_device() == 0
        kept = torch.zeros(256, device="sim:2")
        assert module.mem_get_info(2) == machine.mem_get_info("sim:2") == (2**30 - 1024, 2**30)
        assert kept.nbytes == module.memory_allocated(2) == module.max_memory_allocated(2) == 1024
        module.synchronize()
        module.empty_cache()
        assert torch.accelerator.device_count() == 3
    assert module.device_count() == 0
    assert not module.is_available()
    assert torch.accelerator.device_count() == 0


def changeable_state():
    return (
        torch.inference_mode.__enter__,
        torch._has_compatible_shallow_copy_type,
        "data" in vars(torch.Tensor),
        torch.__future__.get_swap_module_params_on_conversion(),
        torch._C._is_multithreading_enabled(),
        torch.is_grad_enabled(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
    )


def test_leaving_restores_torch_even_after_an_error():
    before = changeable_state()
    with contextlib.suppress(KeyError), simulate(2):
        assert changeable_state() != before
        raise KeyError
    assert changeable_state() == before
    with simulate(1):
        assert torch.zeros(1, device="sim:0").device.index == 0
    assert changeable_state() == before


def test_an_untested_torch_is_refused(monkeypatch):
    for version in ("2.9.1", "2.16.0+cpu"):
        monkeypatch.setattr(torch, "__version__", version)
        sentence = f"2.10 to 2.15, whose private parts it uses, but this is torch {version}: "
        with pytest.raises(RuntimeError, match=re.escape(sentence)), simulate(2):
            pass


@pytest.fixture
def kept():
    """A tensor with a history, and one of integers, of a machine that has been left."""
    with simulate(2):
        x = torch.arange(4.0, device="sim:1", requires_grad=True)
        return x * 2, torch.arange(3, device="sim:0")


def test_tensors_can_be_read_after_the_machine_has_been_left(kept):
    x, n = kept
    assert x.cpu().tolist() == [0, 2, 4, 6]
    assert x.data.to("cpu", torch.float64).tolist() == [0, 2, 4, 6]
    assert (x.numpy(force=True) == [0, 2, 4, 6]).all()
    assert repr(n[1:]) == "tensor([1, 2], device='sim:0')"
    assert f"{x[1]:.1f} {n[2]}" == "2.0 2"
    assert (x[3].item(), bool(n[1]), "abc"[n[1]], list(map(int, n))) == (6, True, "b", [0, 1, 2])
    assert x.detach().view(2, 2).T.contiguous().tolist() == [[0, 4], [2, 6]]
    assert copy.deepcopy(n).cpu().tolist() == [0, 1, 2]
    assert torch.zeros(3).copy_(n).tolist() == [0, 1, 2]
    torch.save(n, io.BytesIO())


def test_tensors_of_a_left_machine_compute_only_after_cpu(kept):
    x, n = kept
    for compute in (lambda: x + 1, lambda: x @ torch.ones(4), lambda: x.to("sim:0"), n.zero_):
        with pytest.raises(RuntimeError, match=r"has been left.*compute with its \.cpu\(\)"):
            compute()
    with simulate(2):
        other = torch.ones(4, device="sim:1")
        with pytest.raises(RuntimeError, match=r"has been left.*or load the model again"):
            other + x
        assert (other + x.detach().cpu().to("sim:1")).tolist() == [1, 3, 5, 7]
    with pytest.raises(RuntimeError, match="no sim device here"):
        torch.ones(2, device="sim:1")
    with pytest.raises(ValueError, match=r"does not exist: .*load within `with tl_dev"):
        resolve("sim:1")


MIXES = {
    "add": lambda x, y: x + y,
    "matmul": lambda x, y: x @ y,
    "cat": lambda x, y: torch.cat([x, y]),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "in place": lambda x, y: x.add_(y),
    "embedding": lambda x, y: F.embedding(y.long(), x),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], x[None], y[None]),
}


@pytest.mark.parametrize("operation", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("other", ["sim:2", "cpu"])
def test_mixed_devices_raise_the_error_of_torch(machine, operation, other):
    x, y = torch.ones(2, 2, device="sim:1"), torch.ones(2, 2, device=other)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device") as info:
        operation(x, y)
    named = str(info.value).partition("devices, ")[2].partition("!")[0]
    assert {"sim:1", other} == set(named.split(" and "))


def test_cpu_scalars_mix_elementwise_only(machine):
    x, scalar = torch.ones(2, 2, device="sim:1"), torch.tensor(2.0)
    assert (scalar * x).device == x.masked_fill(x > 0, scalar).device == x.device
    embed, add_to_scalar = lambda: F.embedding(torch.tensor(1), x), lambda: scalar.add_(x.sum())
    add = lambda: x + scalar.to("sim:0")  # noqa: E731
    for mix, other in ((embed, "cpu"), (add_to_scalar, "cpu"), (add, "sim:0")):
        with pytest.raises(RuntimeError, match=f"found at least two devices, sim:1 and {other}!"):
            mix()


OPERATIONS = {
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "einsum": lambda x: torch.einsum("abc,dbc->ad", x, x),
    "bfloat16": lambda x: x.bfloat16() @ x.bfloat16().mT,
    "causal": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    "masked": lambda x: F.scaled_dot_product_attention(
        x[None], x[None], x[None], (x[0] @ x[0].mT > 0) | torch.eye(6, device=x.device).bool()
    ),
    "cross_entropy": lambda x: F.cross_entropy(x[0], x[0].argmax(-1)),
    "kl_div": lambda x: F.kl_div(x @ x.mT, x @ x.mT, log_target=True),
    "linear": lambda x: F.linear(x, x[0], x[0, :, 0]),
    "silu": F.silu,
    "joined": lambda x: torch.cat([x, x.bfloat16()]),
    "float64": lambda x: x.double() @ x.double().mT,
    "written in place": lambda x: x.clone().index_put_((torch.tensor([0]),), torch.tensor(1.0)),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("autocast", [False, True])
def test_numbers_and_gradients_are_exactly_those_of_the_cpu(machine, operation, autocast):
    cpu = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    x = cpu.detach().to("sim:1").requires_grad_()
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        torch.autocast("sim", torch.bfloat16, enabled=autocast),
    ):
        expected, result = operation(cpu), operation(x)
    assert (result.device, result.dtype) == (x.device, expected.dtype)
    assert torch.equal(result.cpu(), expected)
    expected.float().sum().backward()
    result.float().sum().backward()
    assert torch.equal(x.grad.cpu(), cpu.grad)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "n_devices must be an int from 1 to 64, but is 0"),
        ((2, "500mb"), "memory must be bytes .*, but is '500mb'"),  # bits, as accelerate reads it
        ((2, ["1GiB"]), "a list of one for each of 2 devices, but is .'1GiB'"),
    ],
)
def test_senseless_sizes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message), simulate(*arguments):
        pass


def raising(error):
    def hook(gradient):
        raise error

    return hook


class WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, backward):
        ctx.function = backward
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return ctx.function(gradient), None


def differentiated_by(backward):
    return lambda x: WithBackward.apply(x, backward).sum().backward()


def hooked(hook):
    def differentiate(x):
        y = x * 2
        y.register_hook(hook)
        y.sum().backward()

    return differentiate


def accumulating(hook):
    def differentiate(x):
        x.register_post_accumulate_grad_hook(hook)
        x.sum().backward()

    return differentiate


def recomputed(x):
    others = [x, torch.ones(3, device="sim:1")]
    product = checkpoint(lambda x: x.sin() * others.pop(0), x, use_reentrant=False)
    product.sum().backward()


def without_room(x):
    y = (torch.ones(1 << 20, device="sim:0") * x[0]).exp()
    y.backward(torch.ones(1, device="sim:0").expand(1 << 20))


@pytest.mark.parametrize(
    ("differentiate", "error", "message"),
    [
        (hooked(raising(ValueError("mine"))), ValueError, "mine"),
        (hooked(raising(KeyboardInterrupt())), KeyboardInterrupt, "^$"),
        (hooked(lambda gradient: (gradient,)), TypeError, "hook returned 'tuple'"),
        (accumulating(raising(ValueError("mine"))), ValueError, "mine"),
        (accumulating(lambda x: (x.zero_(), x.grad)), TypeError, "hook returned 'tuple'"),
        (hooked(lambda gradient: gradient.to("sim:1")), RuntimeError, "sim:0 but got sim:1"),
        (hooked(lambda gradient: gradient * torch.ones(3, device="sim:1")), RuntimeError, "same"),
        (lambda x: (x * 2).backward(torch.ones(3, device="sim:1")), RuntimeError, "invalid grad"),
        (differentiated_by(raising(ValueError("mine"))), ValueError, "mine"),
        (differentiated_by(lambda g: g + torch.ones(3, device="sim:1")), RuntimeError, "same"),
        (recomputed, RuntimeError, "same device"),
        (without_room, torch.OutOfMemoryError, "Tried to allocate"),
    ],
)
def test_a_backward_that_fails_raises(differentiate, error, message):
    """Torch alone would end the process."""
    with simulate(2, memory="10MiB"), pytest.raises(error, match=message):
        differentiate(torch.ones(3, device="sim:0", requires_grad=True))


def test_a_hook_may_handle_an_error_of_its_own(machine):
    def recover(gradient):
        with pytest.raises(RuntimeError, match="same device"):
            gradient + torch.ones(3, device="sim:1")

    hooked(recover)(torch.ones(3, device="sim:0", requires_grad=True))
