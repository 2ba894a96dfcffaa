"""What a device is taken to have free, by what torch's module of its type can tell."""

from unittest.mock import Mock

import pytest
import torch

from tl_devicefix import plan
from tl_devicefix.placement.devices import free_memory
from tl_devicefix.placement.memory import is_out_of_memory

pytestmark = pytest.mark.hooked

GIB = 2**30


@pytest.fixture
def answer(machine, monkeypatch):
    """`answer(memory_reserved=...)`: what torch's module of the device type returns, or raises."""

    def answer(**answers):
        for name, value in answers.items():
            module = type(torch.get_device_module("sim"))
            is_error = isinstance(value, Exception)
            how = {"side_effect": value} if is_error else {"return_value": value}
            monkeypatch.setattr(module, name, Mock(**how), raising=False)

    return answer


@pytest.mark.parametrize(
    ("answers", "free"),
    [
        ({"mem_get_info": (3 * GIB, 80 * GIB)}, 3),  # others hold the rest
        ({"memory_reserved": 2 * GIB, "memory_allocated": GIB}, 4),  # what the allocator keeps
        ({"get_per_process_memory_fraction": 0.25, "mem_get_info": (70 * GIB, 80 * GIB)}, 19),
        ({"get_per_process_memory_fraction": 0.5, "memory_allocated": 60 * GIB}, 0),
    ],
    ids=["of others", "in reserve", "allowed", "more than allowed"],
)
def test_free_memory_counts_the_allocators_cache_and_limits(answers, free, answer):
    if "get_per_process_memory_fraction" in answers:
        answers = {"memory_reserved": 60 * GIB, "memory_allocated": GIB, **answers}
    answer(**{"mem_get_info": (3 * GIB, 80 * GIB), **answers})
    assert free_memory(torch.device("sim:0")) == free * GIB


def test_a_device_that_cannot_tell_has_no_limit(answer):
    for error in (
        RuntimeError("The device (GPU) doesn't support querying the available free memory."),
        NotImplementedError("torch.xpu.mem_get_info requires PyTorch to be built with SYCL 2025."),
    ):
        answer(mem_get_info=error)
        assert free_memory(torch.device("sim:0")) is None
        assert len(plan("gpt2", n_devices=4).devices) == 4


def test_failed_device_is_not_taken_for_one_without_a_limit(answer):
    answer(mem_get_info=RuntimeError("CUDA error: CUDA-capable device(s) is/are busy"))
    with pytest.raises(RuntimeError, match="is/are busy"):
        free_memory(torch.device("sim:0"))


def test_running_out_of_memory_is_known_whatever_its_type():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    for says in (
        "CUDA error: out of memory",  # pinned memory of the host
        "MPS backend out of memory (MPS allocated: 18.00 GB).",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
    ):
        assert is_out_of_memory(RuntimeError(says))
    assert not is_out_of_memory(RuntimeError("CUDA error: invalid device ordinal"))
