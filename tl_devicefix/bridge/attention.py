"""`TransformerBridge.forward`."""

from __future__ import annotations

from typing import Any

from tl_devicefix.bridge.plain_layer import within_bridge
from tl_devicefix.running import forward as running


def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`TransformerBridge.forward`, whose results are at home.

    Raises:
        RuntimeError: if the model's weights are only partly processed.
    """
    with within_bridge(self, args, kwargs):
        return running.forward(original, self, *args, **kwargs)
