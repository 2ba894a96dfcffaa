"""The weights of one block, sent to a device, and in the place of the host's where it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tl_devicefix.offload.copying import Copies
from tl_devicefix.placement.devices import HOST


class Sent:
    """The weights of one block, on their way.

    Args:
        hosts: the parameters, which live on the host.
        device: where to.
    """

    def __init__(self, hosts: Iterable[torch.Tensor], device: torch.device) -> None:
        self._sent: list[_Copy] = []  # which is still there when an error has been waited for
        with Copies(device) as self._copies:
            for host in hosts:
                self._sent.append(_Copy(host, self._copies.start(host)))
        self._for_inference = torch.is_inference_mode_enabled()

    def is_current(self, hosts: Sequence[torch.Tensor]) -> bool:
        """Whether these are the parameters that were sent, with the same values.

        Args:
            hosts: in the order in which they were given.
        """
        return (
            self._for_inference == torch.is_inference_mode_enabled()
            and len(hosts) == len(self._sent)
            and all(sent.is_current(host) for sent, host in zip(self._sent, hosts))
        )

    def arrive(self, places: Iterable[tuple[nn.Module, str, torch.Tensor]]) -> list[Visitor]:
        """The weights, for what is computed from now on.

        Args:
            places: a module, the name of its parameter, and that, in the order that was given.
        """
        self._copies.wait()
        return [
            Visitor(module, name, host, sent.there)
            for (module, name, host), sent in zip(places, self._sent)
        ]

    def share(self) -> None:
        """Have them stay for what this thread computes too, on whichever stream."""
        self._copies.share(sent.there for sent in self._sent)

    def let_go(self) -> None:
        """To be called before they are dropped.

        Those that no one wants have to arrive too, before their memory is used for something else.
        """
        self._copies.let_go()


class _Copy:
    """A parameter's values on the device, or on their way.

    Args:
        host: the parameter.
        there: its values.
    """

    def __init__(self, host: torch.Tensor, there: torch.Tensor) -> None:
        self.there = there
        self._host = host
        self._version, self._address = _version(host), host.data_ptr()

    def is_current(self, host: torch.Tensor) -> bool:
        """Whether the parameter is still the one that was copied, with the same values."""
        replaced = host.data_ptr() != self._address  # by `W.data = ...`
        return host is self._host and not replaced and _version(host) == self._version


class Visitor:
    """One weight on a device, for the parameter that lives on the host.

    Args:
        module: whose parameter it is.
        name: its name there.
        host: the parameter.
        copy: its values on the device.
    """

    def __init__(
        self, module: nn.Module, name: str, host: torch.Tensor, copy: torch.Tensor
    ) -> None:
        self.host = host
        self._module, self._name = module, name
        with torch.enable_grad():  # as a parameter requires its gradient under no_grad too
            self.there: torch.Tensor = _Visit.apply(host, copy)
        self._version_there = _version(self.there)
        self._address = self.there.data_ptr()

    def move_in(self) -> None:
        """Take the parameter's place in its module."""
        self._module._parameters[self._name] = self.there  # type: ignore[assignment]

    def move_out(self) -> None:
        """Give the place back, unless a hook has filled it; what one has changed goes back too."""
        if self._module._parameters.get(self._name) is not self.there:
            return
        self._module._parameters[self._name] = self.host  # type: ignore[assignment]
        replaced = self.there.data_ptr() != self._address  # by `W.data = ...`
        if replaced or _version(self.there) != self._version_there:
            with torch.no_grad():
                self.host.copy_(self.there)


class _Visit(torch.autograd.Function):
    """A parameter's copy, through which the gradient goes to the parameter."""

    @staticmethod
    def forward(host: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        return copy.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0].to(HOST), None


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
