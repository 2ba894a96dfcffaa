"""What is read of a Bridge that accelerate has dispatched: weights by name, edges, and copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from comparison import assert_agrees
from transformer_lens.model_bridge import TransformerBridge


@pytest.mark.fails_unpatched
def test_weights_by_name_are_read_at_home(machine: Any, dispatched: Any, references: Any) -> None:
    weights = dispatched("llama").tl_parameters()

    assert_agrees(dict(weights.items()), references("llama").tl_parameters(), machine.devices[0])


class Borrowing:
    """An object that is no Bridge, and has all that one has."""

    def __init__(self, bridge: Any) -> None:
        self.bridge = bridge

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bridge, name)


def test_an_object_of_another_class_may_borrow_its_methods(dispatched: Any) -> None:
    bridge = dispatched("llama")
    borrowing: Any = Borrowing(bridge)

    stack = TransformerBridge._stack_block_params(borrowing, "attn.W_O")
    weights = TransformerBridge.get_params(borrowing)

    assert torch.equal(stack, bridge.W_O)
    assert_agrees(dict(weights.items()), dict(bridge.get_params().items()))


@pytest.mark.fails_unpatched
def test_edges_are_attributed_across_devices(
    machine: Any, boot: Any, dispatched: Any, tokens: torch.Tensor
) -> None:
    analysis = pytest.importorskip("transformer_lens.tools.analysis")
    if not hasattr(analysis, "faithfulness"):
        pytest.skip("this TransformerLens refuses edges")

    def scores(bridge: Any) -> dict[str, float]:
        clean = tokens[:1, :2].to(bridge.cfg.device)
        result = analysis.attribution_patch(
            bridge,
            clean,
            clean.flip(1),
            lambda logits: logits[0, -1, 5],
            analysis.EdgeAttributionConfig("edge"),
        )
        return {str(edge): score for edge, score in result.edge_scores.items()}

    assert_agrees(scores(dispatched("gpt2")), scores(boot("gpt2", device="cpu")))


@pytest.mark.fails_unpatched
def test_a_deep_copy_changes_alone(dispatched: Any) -> None:
    """Hugging Face's `to` of a model over devices is bound to the model that was copied."""
    bridge = dispatched("llama")

    copy.deepcopy(bridge).to(torch.float64)

    assert {parameter.dtype for parameter in bridge.parameters()} == {torch.float32}
