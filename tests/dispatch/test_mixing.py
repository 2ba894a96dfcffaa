"""`mix_devices`: when it is on, for whom, and where results lie."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from devices import device

import tl_devicefix
from tl_devicefix.dispatch.mixing import JoinedAt, _Mixing
from tl_devicefix.placement import in_use

pytestmark = pytest.mark.hooked


@pytest.fixture(scope="module", autouse=True)
def of_this_module_only():
    """Models of other modules' tests may live on, and their devices be in use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_use, "_in_use", weakref.WeakValueDictionary())
        yield


def mixes(model):
    try:
        mixed = model.blocks[0].attn.W_O + model.blocks[4].attn.W_O
    except RuntimeError:
        return False
    return str(mixed.device) == device(0)


def test_mix_devices_is_on_until_its_outermost_with_ends(model):
    assert not mixes(model)
    with tl_devicefix.mix_devices() as mixing:
        with tl_devicefix.mix_devices(), mixing:
            assert mixes(model)
        assert mixes(model)
    assert not mixes(model)
    with pytest.raises(ZeroDivisionError), mixing:
        raise ZeroDivisionError
    assert not mixes(model)


def test_mix_devices_as_a_statement_is_on_until_turned_off(model):
    try:
        tl_devicefix.mix_devices()
        with torch.device("cpu"), tl_devicefix.mix_devices():
            assert mixes(model)
        assert mixes(model)
        with tl_devicefix.mix_devices(False):
            assert not mixes(model)
        assert mixes(model)
        with ThreadPoolExecutor(1) as other_thread:
            assert not other_thread.submit(mixes, model).result()
        with torch.device("cpu"):
            tl_devicefix.mix_devices(False)
            assert not mixes(model)
            tl_devicefix.mix_devices()
        assert mixes(model)
        tl_devicefix.mix_devices(False)
        torch.set_default_device("cpu")
        tl_devicefix.mix_devices()
        torch.set_default_device(None)
        assert mixes(model)
    finally:
        tl_devicefix.mix_devices(False)
    assert not mixes(model)


@pytest.mark.parametrize("spread", [1, 4])
def test_mix_devices_is_off_in_a_forward_but_for_users_code(model, at_home, monkeypatch):
    def calls(run=lambda: model(at_home)):
        before = len(seen)
        run()
        return len(seen) - before

    def called(*args, **kwargs):
        seen.append(args)
        return own(*args, **kwargs)

    def run_again(activation, hook):
        return activation + model(at_home, stop_at_layer=1).sum()

    def fail(activation, hook):
        raise ZeroDivisionError

    own, seen = _Mixing.__torch_function__, []
    monkeypatch.setattr(_Mixing, "__torch_function__", called)
    point = "blocks.1.hook_resid_post"
    with tl_devicefix.mix_devices():
        assert calls() == 0
        of_one_hook = calls(lambda: model.run_with_hooks(at_home, fwd_hooks=[(point, run_again)]))
        assert 0 < of_one_hook < 30
        with pytest.raises(ZeroDivisionError):
            model.run_with_hooks(at_home, fwd_hooks=[(point, fail)])
        assert calls(lambda: torch.ones(1) + 1) > 0
        with model.blocks[2].mlp.register_forward_hook(lambda *_: None):
            assert calls() > 50
        with monkeypatch.context() as patch:
            patch.setattr(type(model.blocks[2].ln1), "forward", lambda ln, x: ln.hook_normalized(x))
            assert calls() > 50
    assert calls(lambda: torch.ones(1) + 1) == 0


class Mixing(torch.nn.Module):
    def __init__(self, own):
        super().__init__()
        self.own = own

    def forward(self, *args, **kwargs):
        return self.own(*args, **kwargs) + torch.zeros(1)


@pytest.mark.parametrize("spread", [1, 4])
def test_a_users_module_in_a_block_mixes_devices(spread, load, tokens):
    model = load("gpt2", spread)
    model.blocks[1].mlp = Mixing(model.blocks[1].mlp)
    model.setup()
    with tl_devicefix.mix_devices():
        assert model(tokens.to(model.cfg.device)).isfinite().all()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_a_gradient_mixes_in_any_thread(model, register):
    def hook(gradient):
        seen.append((gradient * at_home * torch.ones(2)).device)

    seen = []
    at_home = torch.ones(2, device=device(0))
    weight = torch.nn.Parameter(torch.ones(2, device=device(2)))
    with tl_devicefix.mix_devices():
        getattr(weight, register)(hook)
    hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
    (registered,) = hooks.values()
    with ThreadPoolExecutor(1) as other_thread:  # as autograd runs it for a CUDA device
        other_thread.submit(registered, weight.detach()).result()
    assert seen == [weight.device]


def test_mixed_result_lies_at_home_or_beside_the_largest_operand(model):
    small, large = (torch.ones(n, device=device(n)) for n in (1, 3))
    with tl_devicefix.mix_devices():
        assert (small + large).device == large.device
        stacked = torch.stack([large, torch.ones(3, device=device(1))])
        assert stacked.device == torch.device(device(0))
        smalls = [small.clone() for _ in range(3)]
        assert torch.cat([large, *smalls]).device == torch.device(device(0))


def test_changed_or_indexed_tensors_stay_on_their_device(model):
    table, index = torch.arange(6.0, device=device(3)), torch.tensor([1, 2], device=device(1))
    out, other = torch.empty(6, device=device(1)), torch.zeros(6, device=device(0))
    with tl_devicefix.mix_devices():
        assert table[index].device == table.device
        assert table.index_add_(0, index, torch.ones(2, device=device(2))).device == table.device
        assert torch.mul(table, torch.ones(6, device=device(2)), out=out) is out
        assert table.tolist() == out.tolist() == [0, 2, 3, 3, 4, 5]
        other[index] = table[index]
        torch._foreach_add_([other, out], [table, table])
        assert other.copy_(other + out).device == torch.device(device(0))
    assert (out.device, out.tolist()) == (torch.device(device(1)), [0, 4, 6, 6, 8, 10])
    assert other.tolist() == [0, 8, 12, 9, 12, 15]


def test_a_device_that_is_not_in_use_is_left_to_torch(model):
    with tl_devicefix.mix_devices():
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(3, device="meta") + torch.ones(3, device=device(0))
        with pytest.raises(RuntimeError, match=r"shapes|size"):  # and so is another error
            torch.ones(2, 3, device=device(0)) @ torch.ones(2, 3, device=device(1))


def test_gather_on_s_device_is_in_use_and_home(model):
    with tl_devicefix.mix_devices(), tl_devicefix.gather_on("cpu"):
        assert (torch.ones(3) + torch.ones(3, device=device(2))).device == torch.device("cpu")


def test_copies_made_for_mixing_are_freed_with_the_result(model, machine):
    at_home, elsewhere = torch.ones(256, device=device(0)), torch.ones(256, device=device(1))
    gc.collect()
    before = machine.memory_allocated(0)
    gc.disable()
    try:
        with tl_devicefix.mix_devices():
            mixed = at_home + elsewhere
        assert machine.memory_allocated(0) - before == mixed.nbytes
    finally:
        gc.enable()


HOST_AND_META = frozenset({torch.device("cpu"), torch.device("meta")})
"""Under `inference_mode` torch counts no changes; simulated devices do not have it, meta does."""


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_lists_that_may_be_changed_in_part_are_not_changed_twice(mode):
    with mode():
        first, second = torch.zeros(2), torch.zeros(3)
        with JoinedAt(torch.device("cpu"), HOST_AND_META), pytest.raises(RuntimeError):
            torch._foreach_add_([first, second], [torch.ones(2), torch.ones(5, device="meta")])
        assert first.tolist() in ([0, 0], [1, 1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_tensor_changed_without_grad_stays_on_its_device(mode):
    with mode():
        buffer = torch.zeros(3, device="meta")
        with JoinedAt(torch.device("cpu"), HOST_AND_META):
            assert buffer.add_(torch.ones(3)) is buffer
            assert (torch.zeros(3, device="meta") + torch.ones(3, device="meta")).is_meta
