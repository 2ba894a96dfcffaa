"""Tensors of another host: what is done with them before they are fetched."""

import pytest
import torch

from tl_devicefix.multihost.remote_tensor import RemoteTensor

pytestmark = pytest.mark.hooked

CPU = torch.device("cpu")


def remote(values):
    return RemoteTensor(values.clone, values.shape, values.dtype, CPU)


def test_tensor_tells_of_gradients_that_its_values_have():
    values = torch.ones(3, requires_grad=True) * 2

    def output():
        return RemoteTensor(lambda: values, values.shape, values.dtype, CPU, waits=True)

    assert output().requires_grad
    assert output()[:2].requires_grad
    assert not output().detach().requires_grad
    cached = remote(torch.ones(3))
    assert not cached.requires_grad
    assert not cached.is_fetched
    cached.requires_grad_().sum().backward()
    assert cached.requires_grad
    assert cached.grad.equal(torch.ones(3))


def flat_after_a_change(tensor, flatten):
    """Return a flattened tensor, read after the tensor was changed in place."""
    flat = flatten(tensor)
    tensor.add_(1)
    return flat * 1


def test_unread_view_sees_later_changes_and_a_copy_does_not():
    values = torch.arange(12.0).reshape(3, 4)
    for flatten in (
        lambda tensor: tensor.reshape(12),  # a view
        lambda tensor: tensor.transpose(0, 1).reshape(12),  # a copy
        lambda tensor: tensor[:, 1:3].reshape(6),  # a copy
    ):
        expected = flat_after_a_change(values.clone(), flatten)
        assert flat_after_a_change(remote(values), flatten).equal(expected)
