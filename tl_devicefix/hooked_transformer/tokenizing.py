"""Text given to a HookedTransformer: without a tokenizer, and in runs that are in flight."""

from __future__ import annotations

import copy
import logging
from typing import Any

from tl_devicefix.checkpoints.hub import TOKENIZER_FILES
from tl_devicefix.dispatch.scheduler import current_run, reading_text, take_own_tokenizer
from tl_devicefix.hooked_transformer.alignment import placement_of, remember_placement
from tl_devicefix.monkeypatch.patch import patches

_logger = logging.getLogger("tl_devicefix")
_ONE_AT_A_TIME = "runs in flight call the tokenizer one at a time"


def warn_without_tokenizer(model: Any, model_name: str) -> None:
    """Warn if a loaded model has no tokenizer, so that it takes no text.

    Args:
        model: a HookedTransformer.
        model_name: the name or directory that it was loaded by.
    """
    if model.tokenizer is None:
        _logger.warning(
            "%r has no tokenizer (none of %s), so the model takes only tokens: pass "
            "tokenizer=AutoTokenizer.from_pretrained(...) to from_pretrained, or give it to "
            "model.set_tokenizer(...).",
            model_name,
            ", ".join(TOKENIZER_FILES),
        )


@patches("HookedTransformer", "to_tokens", "to_str_tokens", takes="self input", why=_ONE_AT_A_TIME)
@patches("HookedTransformer", "to_string", takes="self tokens", why=_ONE_AT_A_TIME)
def reading(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A method of a HookedTransformer that calls the tokenizer."""
    with reading_text():
        return original(self, *args, **kwargs)


@patches(
    "LocallyOverridenDefaults",
    "__enter__",
    takes="self",
    why="runs in flight do not change what others read",
    until="3.9",
)
def override_defaults(original: Any, self: Any) -> Any:
    """`LocallyOverridenDefaults.__enter__`, which changes the config and the tokenizer of a model.

    A run in flight changes copies of its own, as other runs read these meanwhile.
    """
    model, overrides = self.model, self.overrides
    if current_run() is not None:
        if _differs(overrides.get("padding_side"), getattr(model.tokenizer, "padding_side", None)):
            take_own_tokenizer(model)
        if _differs(overrides.get("prepend_bos"), model.cfg.default_prepend_bos):
            placement = placement_of(model.cfg)
            model.cfg = copy.copy(model.cfg)
            if placement is not None:
                remember_placement(model.cfg, placement)
    return original(self)


def _differs(value: Any, default: Any) -> bool:
    # Without an argument it is None, or in TransformerLens 2 a string that says so.
    return value in (True, False, "left", "right") and value != default
