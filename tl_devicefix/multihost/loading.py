"""Load a model across several hosts: each worker loads its own blocks from its own files.

First, each worker compares its files with the driver's (`checkpoint_files.py`). Then the driver and
all workers load at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tl_devicefix.multihost.checkpoint_files import files_of
from tl_devicefix.multihost.hosts import host_of
from tl_devicefix.multihost.remote_block import RemoteModel
from tl_devicefix.placement.elsewhere import is_elsewhere
from tl_devicefix.placement.placement import Placement
from tl_devicefix.placement.workers import threads

# Arguments about devices, which the driver has decided, and objects that only this process has.
_NOT_PASSED_ON = (
    *("cls", "model_name", "hf_model", "tokenizer", "device", "n_devices", "move_to_device"),
    *("device_map", "max_memory"),
)


@contextlib.contextmanager
def loading_elsewhere(
    placement: Placement, load: str, name: str, arguments: dict[str, object], **hub: object
) -> Iterator[dict[str, RemoteModel]]:
    """Make other hosts load their blocks within a `with` block, and wait for them at its end.

    Args:
        placement: the model's placement.
        load: the loading method, as "transformer_lens:HookedTransformer.from_pretrained".
        name: the checkpoint.
        arguments: the arguments of that method.
        hub: those of these arguments that are passed to transformers, such as `revision`.

    Yields:
        A dict from each block of another host to the part of the model on that host.
    """
    places = {c.name: host_of(c.device) for c in placement.components if is_elsewhere(c.device)}
    if not places:
        yield {}
        return
    if arguments.get("hf_model") is not None:
        raise ValueError(
            "hf_model cannot be loaded across several hosts: save it with save_pretrained() to a "
            "directory that all hosts see, and give that directory's name"
        )
    hosts = list(dict.fromkeys(host for host, _ in places.values()))
    files = files_of(name, hub)
    for host in hosts:
        wrong = host.call("differences", files, name, hub) if files else []
        if wrong:
            raise ValueError(f"{host.name} {wrong[0]} for {name!r}: give all hosts the same files")
    models = {host: RemoteModel(host, placement.home) for host in hosts}
    passed_on = {key: value for key, value in arguments.items() if key not in _NOT_PASSED_ON}
    with threads(len(hosts)) as pool:
        loads = []
        for host in hosts:
            device_map: dict[str, int | None] = {c.name: None for c in placement.components}
            device_map |= {block: index for block, (of, index) in places.items() if of is host}
            request = models[host].number, load, name, passed_on, device_map
            loads.append(pool.submit(host.call, "load", *request))
        yield {block: models[host] for block, (host, _) in places.items()}
        for loaded in loads:
            loaded.result()
