"""What `report()` prints of the patches, or of a model's blocks; it returns that for programs."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_bridge, has_hooked_transformer, installed

if has_bridge():
    from bridges import boot  # noqa: F401
if has_hooked_transformer():
    from architectures import build_toy, solu_config

    from tl_devicefix.hooked_transformer.known_blocks import KNOWN, digest

hooked = pytest.mark.skipif(
    not has_hooked_transformer() or digest() not in KNOWN,
    reason="a HookedTransformer whose blocks are known",
)
in_4 = pytest.mark.skipif(installed() < Version("4.0"), reason="a Bridge of TransformerLens 4")


def printed(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The rows of the table, without its head."""
    _, _, *lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell] for line in lines]


def test_it_returns_what_it_prints(capsys):
    report = tl_devicefix.report()
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert len(report) == len(lines)
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


@hooked
def test_blocks_that_go_the_same_way_are_one_row_and_others_say_why(capsys):
    model = build_toy(solu_config(n_layers=3))
    report = tl_devicefix.report(model)
    assert printed(capsys) == [["blocks.0-2", "one function", "eager"]]
    assert report == dict.fromkeys(("blocks.0", "blocks.1", "blocks.2"), ("one function", "eager"))
    assert repr(report) == "ModelReport(3 blocks)"

    model.blocks[1].apply_mlp = model.blocks[1].apply_mlp
    model.blocks[2].forward = model.blocks[2].forward
    report = tl_devicefix.report(model)
    assert [report[f"blocks.{i}"].forward for i in range(3)] == [
        "one function",
        "as installed: its apply_mlp is not TransformerLens's",
        "as installed: its forward was replaced",
    ]
    assert [row[0] for row in printed(capsys)] == ["blocks.0", "blocks.1", "blocks.2"]


@hooked
def test_attention_by_sdpa_is_said_and_who_listens_to_a_pattern():
    model = build_toy(solu_config(n_layers=3))
    model.blocks[2].attn.hook_pattern.add_hook(lambda pattern, hook: None)
    with tl_devicefix.set_attn_implementation(model, "sdpa"):
        report = tl_devicefix.report(model)
    ways = [block.attention for block in report.values()]
    assert ways == ["sdpa", "sdpa", "eager: hook_pattern has hooks"]
    assert {block.forward for block in report.values()} == {"one function"}


@in_4
def test_a_block_of_a_bridge_runs_transformers_layer_unless_somebody_listens(capsys, request):
    model = request.getfixturevalue("boot")("llama", device="cpu")
    names = [f"blocks.{index}" for index in range(len(model.blocks))]
    report = tl_devicefix.report(model)
    assert list(report) == names
    layer = "transformers' own layer"
    assert printed(capsys) == [[f"blocks.0-{len(names) - 1}", layer, "eager"]]

    model.blocks[1].attn.hook_z.add_hook(lambda z, hook: None)
    report = tl_devicefix.report(model)
    assert [report[name].forward for name in names[:2]] == [
        layer,
        "as installed: attn.o.hook_in has hooks",
    ]


def test_what_is_no_model_is_refused_in_a_sentence():
    with pytest.raises(TypeError, match=r"the model must be a .* but this is a Linear"):
        tl_devicefix.report(torch.nn.Linear(1, 1))
