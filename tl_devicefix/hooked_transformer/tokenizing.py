"""Text given to a HookedTransformer: without a tokenizer, and in runs that are in flight."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

from tl_devicefix.checkpoints.hub import TOKENIZER_FILES
from tl_devicefix.dispatch.scheduler import current_run, reading_text, take_own_tokenizer
from tl_devicefix.hooked_transformer.alignment import placement_of, remember_placement

_logger = logging.getLogger("tl_devicefix")


def warn_without_tokenizer(model: Any, model_name: str) -> None:
    """Say, when a model has been loaded, that it takes no text.

    Args:
        model: a HookedTransformer.
        model_name: the name or directory that it was loaded by.
    """
    if model.tokenizer is None:
        _logger.warning(
            "%r has no tokenizer (none of %s), so the model takes tokens and no text: pass "
            "tokenizer=AutoTokenizer.from_pretrained(...) to from_pretrained, or give it to "
            "model.set_tokenizer(...).",
            model_name,
            ", ".join(TOKENIZER_FILES),
        )


@functools.cache
def asking_for_tokenizer(name: str) -> Callable[..., Any]:
    """A method of HookedTransformer that needs a tokenizer for text, and says so without one."""

    def method(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with reading_text() if name in _READING else contextlib.nullcontext():
                return original(self, *args, **kwargs)
        except AssertionError as error:
            if self.tokenizer is not None or _REMEDY in str(error):
                raise
            says = f"{error}: " if str(error) else ""
            raise AssertionError(f"{says}{_REMEDY}") from error

    return method


_READING = ("to_tokens", "to_str_tokens", "to_string")
_REMEDY = (
    "this model has no tokenizer, so it takes and gives tokens and no text; call "
    "model.set_tokenizer(AutoTokenizer.from_pretrained(...)), or load it with tokenizer=..."
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


def _differs(given: Any, default: Any) -> bool:
    # Without an argument it is None, or in TransformerLens 2 a string that says so.
    return given in (True, False, "left", "right") and given != default
