"""What fails on another rank is raised here, and says where; afterwards all goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tl_devicefix.demo.demo import load_checkpoint
from tl_devicefix.multihost import rpc_worker
from tl_devicefix.multihost.checkpoint_files import File, current_file, differences
from tl_devicefix.placement.devices import consecutive


def test_an_operation_that_fails_there(machine: Any) -> None:
    singular = torch.zeros(3, 3, device="sim:3")

    with pytest.raises(RuntimeError, match=r"singular.*on rank 1 \("):
        torch.linalg.inv(singular)

    assert (singular + 1).sum().item() == 9


def test_what_follows_from_it_is_not_another_error(machine: Any) -> None:
    index = torch.tensor([7], device="sim:3")
    wrong = torch.zeros(3, device="sim:3")[index] + 1

    with pytest.raises(IndexError, match=r"index 7 is out of bounds.*on rank 1"):
        wrong.cpu()
    with pytest.raises(RuntimeError, match=r"never computed, as an earlier operation failed"):
        wrong.cpu()


def test_more_devices_than_all_ranks_have(machine: Any) -> None:
    with pytest.raises(ValueError, match=r"the hosts have 4 \(.*; lower n_devices"):
        consecutive(torch.device("sim:0"), 8)


def in_a_file(path: Path) -> torch.Tensor:
    """A tensor whose values are in a file, as those of a checkpoint."""
    path.write_bytes(bytes(range(256)) * 64)
    values: Any = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=256 * 64)
    return torch.empty(0, dtype=torch.uint8).set_(values)[256:]


def test_a_rank_reads_its_own_file(machine: Any, commands: Any, tmp_path: Path) -> None:
    tensor = in_a_file(tmp_path / "model.safetensors")

    present = tensor.view(-1, 16).T.to("sim:3")

    assert commands[-1].name == "load"
    assert torch.equal(present.cpu(), tensor.view(-1, 16).T)


def test_what_was_written_to_is_sent(machine: Any, commands: Any, tmp_path: Path) -> None:
    tensor = in_a_file(tmp_path / "model.safetensors")
    tensor[5000] += 1

    present = tensor.to("sim:3")

    assert commands[-1].name == "put"
    assert torch.equal(present.cpu(), tensor)


def test_a_file_that_was_written_again_is_read_again(machine: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    before = in_a_file(path).to("sim:3").cpu()
    path.unlink()
    path.write_bytes(bytes(256 * 64))

    assert before.any()
    again: Any = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=256 * 64)
    present = torch.empty(0, dtype=torch.uint8).set_(again).to("sim:3")
    assert not present.any().item()


def difference(file: File) -> str | None:
    """What is wrong with this rank's, if anything is."""
    return differences([file]).get(file.path)


def test_a_rank_without_the_file_or_with_another(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    in_a_file(path)
    file = current_file(str(path))
    assert difference(file) is None

    missing = file._replace(path=str(tmp_path / "missing.safetensors"))
    assert difference(missing) == "cannot read it: No such file or directory"

    content = path.read_bytes()
    path.write_bytes(content + b"more")
    assert difference(file) == "has another one (16388 bytes, and rank 0's 16384)"
    path.write_bytes(content[:-1] + b"?")
    assert difference(file) == "has another one of the same size"


def weights(differing: slice = slice(0)) -> dict[str, torch.Tensor]:
    """8 MiB and a norm, with other values in some of them."""
    tensors = {f"layers.{layer}.weight": torch.zeros(4, 1 << 18) for layer in range(2)}
    tensors["norm"] = torch.zeros(1000)
    tensors["layers.1.weight"].view(-1)[differing] = 1
    return tensors


@pytest.mark.parametrize("save", [save_file, torch.save], ids=["safetensors", "bin"])
def test_a_rank_with_other_weights(save: Any, tmp_path: Path) -> None:
    path = tmp_path / "model"
    save(weights(), path)
    file = current_file(str(path))

    for start in (0, 1 << 12, 1 << 18, (1 << 20) - 75_000):
        save(weights(slice(start, start + 75_000)), path)  # 300 kB
        assert difference(file) == "has another one of the same size"
    a_norm = weights()
    a_norm["norm"][500] = 1
    reshaped = {**weights(), "layers.0.weight": torch.zeros(1 << 18, 4)}
    for tensors in (a_norm, reshaped):
        save(tensors, path)
        assert difference(file) is not None

    save(weights(), path)
    assert difference(file) is None


def test_a_checkpoint_that_differs_on_a_rank(
    machine: Any, load_over: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_worker, "differences", lambda files: {files[-1].path: "cannot read it"})
    expected = (
        r"^rank 0 loads .*\.safetensors, but rank 1 \(host1/cpu:0, on .*\), which holds "
        r".*\bblocks\.\d-\d\b.*, cannot read it: put the same checkpoint .* give it as hf_model"
    )

    with pytest.raises(ValueError, match=expected):
        load_checkpoint(4)


def test_a_file_that_is_gone_is_sent(machine: Any, tmp_path: Path) -> None:
    tensor = in_a_file(tmp_path / "gone.safetensors")
    (tmp_path / "gone.safetensors").unlink()

    assert torch.equal(tensor.to("sim:3").cpu(), tensor)
