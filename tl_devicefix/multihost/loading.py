"""Load a model over several hosts, each worker its own blocks from its own files.

First, each worker compares its files with the driver's: `checkpoint_files.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from tl_devicefix.multihost.checkpoint_files import HubArguments, files_of
from tl_devicefix.multihost.remote_block import RemoteModel, attach
from tl_devicefix.multihost.worker import worker_of
from tl_devicefix.placement.devices import Host, host_of, is_elsewhere
from tl_devicefix.placement.placement import Placement
from tl_devicefix.placement.workers import threads

# A worker gets the name and a map of its own, and needs no tokenizer.
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
        placement: the model's.
        load: the class and method that load.
        name: the checkpoint.
        arguments: the arguments of that method.
        hub: those of them by which files are found.

    Yields:
        Block -> the model on another host that it belongs to.

    Raises:
        ValueError: if they cannot load it, or have other files.
    """
    places = {c.name: host_of(c.device) for c in placement.components if is_elsewhere(c.device)}
    if not places:
        yield {}
        return
    if arguments.get("hf_model") is not None:
        raise ValueError(
            "hf_model cannot be loaded over several hosts: save it with save_pretrained() to a "
            "directory that all hosts see, and give that directory's name"
        )
    hosts = list(dict.fromkeys(host for host, _ in places.values()))
    check_files(hosts, name, hub)
    models = {host: RemoteModel(host, placement.home) for host in hosts}
    passed_on = {key: value for key, value in arguments.items() if key not in _NOT_PASSED_ON}
    with threads(len(hosts)) as pool:  # because hosts load at the same time, as home does
        loads = []
        for host in hosts:
            device_map = dict.fromkeys((c.name for c in placement.components), None)
            device_map |= {block: index for block, (of, index) in places.items() if of is host}
            forget = host.take_forgotten()
            request = models[host].number, load, name, passed_on, device_map, forget
            loads.append(pool.submit(worker_of(host).load, *request))
        yield {block: models[host] for block, (host, _) in places.items()}
        for loaded in loads:
            loaded.result()


def attach_blocks(model: nn.Module, remotes: dict[str, RemoteModel]) -> None:
    """Turn blocks without values into remote blocks."""
    for name, remote in remotes.items():
        attach(model.get_submodule(name), remote, int(name.rpartition(".")[2]), name)


def check_files(hosts: list[Host], name: str, hub: HubArguments) -> None:
    """Check that other hosts have this host's files of a checkpoint.

    Raises:
        ValueError: naming the host and the file.
    """
    files = files_of(name, hub)
    for host in hosts:
        wrong = worker_of(host).differences(files, name, hub) if files else []
        if wrong:
            raise ValueError(
                f"{host.connection.name} {wrong[0]} for {name!r}: give all hosts the same files"
            )
