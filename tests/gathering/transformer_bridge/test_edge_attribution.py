"""Edge attribution of TransformerLens 4, which is for a Bridge, across devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import assert_agrees


@pytest.mark.fails_unpatched
def test_edges_are_attributed_across_devices(
    machine: Any, boot: Any, dispatched: Any, tokens: torch.Tensor
) -> None:
    analysis = pytest.importorskip("transformer_lens.tools.analysis")
    if not hasattr(analysis, "faithfulness"):
        pytest.skip("this TransformerLens refuses edges")

    def scores(bridge: Any) -> dict[str, float]:
        clean = tokens[:1, :2].to(bridge.cfg.device)
        found = analysis.attribution_patch(
            bridge,
            clean,
            clean.flip(1),
            lambda logits: logits[0, -1, 5],
            analysis.EdgeAttributionConfig("edge"),
        )
        return {str(edge): score for edge, score in found.edge_scores.items()}

    assert_agrees(scores(dispatched("gpt2")), scores(boot("gpt2", device="cpu")))
