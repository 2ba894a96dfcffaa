"""Addresses of storages that have no memory, by which libraries find what shares memory."""

from __future__ import annotations

import threading

import torch

_FIRST = 1 << 60  # no process has memory there
_adding = threading.Lock()
_next = _FIRST


class _Nowhere(torch.UntypedStorage):
    """A storage on meta, all of which have the address 0 otherwise."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a tensor, with an address that is no other's."""
    storage = tensor.untyped_storage()
    if tensor.is_meta and type(storage) is torch.UntypedStorage:
        global _next
        with _adding:
            address, _next = _next, _next + max(storage.nbytes(), 1)
        # It stays so: torch gives the same object for the same storage.
        storage.__class__ = _Nowhere
        storage.address = address  # type: ignore[attr-defined]
    return storage
