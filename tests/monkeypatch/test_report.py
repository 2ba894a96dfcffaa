"""What `report()` prints of the patches, or of a model's blocks; it returns that for programs."""

import contextlib

import pytest
import torch
from packaging.version import Version
from transformers import GPT2Config, GPT2LMHeadModel

import tl_devicefix
from tl_devicefix.fusing.listening import is_counting
from tl_devicefix.monkeypatch.versions import has_hooked_transformer, installed

if has_hooked_transformer():
    from architectures import TOYS, build_toy


def printed(capsys):
    """The rows of the table, without its head."""
    _, _, *lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell] for line in lines]


def test_report_returns_the_patches_that_it_prints(capsys):
    report = tl_devicefix.report()
    head, _, *lines = capsys.readouterr().out.splitlines()
    # If an earlier test has fused blocks, there is a row for torch's registration hook, too.
    assert len(report) + is_counting() == len(lines)
    for patch, line in zip(report, lines):
        assert line.split()[0] == patch.target
        assert len(patch.why) > 10
        assert line.endswith(patch.why)
        assert f"{patch.since} - {patch.until}" in line
    assert str(report.version) == str(installed())
    assert report.is_enabled
    assert head.endswith(f"{installed()}: enabled")
    # A notebook does not show the table twice.
    assert repr(report) == f"PatchReport({len(report)} patches of transformer_lens {installed()})"
    with tl_devicefix.disabled():
        assert not tl_devicefix.report().is_enabled
    assert capsys.readouterr().out.splitlines()[0].endswith(f"{installed()}: disabled")


@pytest.mark.fuses
@pytest.mark.hooked
def test_models_report_says_why_a_block_is_not_fused(capsys):
    model = build_toy(TOYS["solu"](n_layers=3))
    assert set(tl_devicefix.report(model).values()) == {"not fused"}
    assert tl_devicefix.fuse_blocks(model) is None  # a notebook would print a model, and keep it
    capsys.readouterr()
    report = tl_devicefix.report(model)
    assert printed(capsys) == [["blocks.0-2", "fused"]]
    assert report == dict.fromkeys(("blocks.0", "blocks.1", "blocks.2"), "fused")
    assert repr(report) == "ModelReport(3 blocks)"
    with tl_devicefix.disabled():
        assert set(tl_devicefix.report(model).values()) == {
            "not fused: TransformerLens is unpatched"
        }

    model.blocks[1].apply_mlp = model.blocks[1].apply_mlp
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.blocks[0].mlp), "forward", lambda self, x: x)
        with pytest.warns(UserWarning, match=r"no block: MLP\.forward was replaced"):
            tl_devicefix.fuse_blocks(model)
        report = tl_devicefix.report(model)
    assert report["blocks.0"] == "not fused: MLP.forward was replaced"
    assert report["blocks.1"] == "not fused: its apply_mlp is not TransformerLens's"
    model.set_use_split_qkv_input(True)
    with pytest.warns(UserWarning, match="no block: use_split_qkv_input"):
        tl_devicefix.fuse_blocks(model)
    assert "use_split_qkv_input" in tl_devicefix.report(model)["blocks.0"]


@pytest.mark.bridge
@pytest.mark.fuses
def test_bridges_report_says_why_a_block_is_not_fused(capsys, load):
    model = load("llama", device="cpu", fuse_blocks=True)
    names = [f"blocks.{index}" for index in range(len(model.blocks))]
    report = tl_devicefix.report(model)
    assert list(report) == names
    assert printed(capsys) == [[f"blocks.0-{len(names) - 1}", "fused"]]

    model.blocks[1].attn.hook_pattern.add_hook(lambda pattern, hook: None)
    assert tl_devicefix.report(model)["blocks.1"] == "not fused: it has hooks"


@pytest.mark.hooked
@pytest.mark.skipif(
    installed() >= Version("3.8"),
    reason="TransformerLens 3.8 and later has blocks that can be fused",
)
def test_report_says_that_older_transformer_lens_fuses_no_block():
    model = build_toy(TOYS["solu"](n_layers=2))
    kind = type(model.blocks[0])
    with pytest.warns(UserWarning, match=r"fuses no block: transformer_lens .* is older than 3.8"):
        tl_devicefix.fuse_blocks(model)
    assert type(model.blocks[0]) is kind
    assert "is older than 3.8" in tl_devicefix.report(model)["blocks.0"]


def test_report_refuses_an_object_that_is_no_model():
    with pytest.raises(TypeError, match=r"the model must be a .* but this is a Linear"):
        tl_devicefix.report(torch.nn.Linear(1, 1))


def transformers_model():
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 9}
    return GPT2LMHeadModel(GPT2Config(**sizes))


@pytest.mark.once
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.nn.Linear(1, 1), "a Linear has no block of TransformerLens's: load it as"),
        (transformers_model, "a GPT2LMHeadModel has no block of TransformerLens's: load it as"),
        (transformers_model, "TransformerLens is unpatched: call tl_devicefix.enable"),
    ],
)
def test_fuse_blocks_that_fuses_no_block_says_why_once(make, why):
    unpatched = tl_devicefix.disabled() if "unpatched" in why else contextlib.nullcontext()
    with unpatched, pytest.warns(UserWarning, match=f"fuse_blocks fuses no block: {why}") as all:
        tl_devicefix.fuse_blocks(make())
    assert len(all) == 1
