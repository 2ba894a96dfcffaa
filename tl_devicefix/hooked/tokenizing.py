"""Text given to a HookedTransformer that has no tokenizer: an error that says what to do."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from tl_devicefix.checkpoints.hub import TOKENIZER_FILES
from tl_devicefix.patching.applying import original

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

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(type(self), name)(self, *args, **kwargs)
        except AssertionError as error:
            if self.tokenizer is not None or _REMEDY in str(error):
                raise
            says = f"{error}: " if str(error) else ""
            raise AssertionError(f"{says}{_REMEDY}") from error

    return method


_REMEDY = (
    "this model has no tokenizer, so it takes and gives tokens and no text; call "
    "model.set_tokenizer(AutoTokenizer.from_pretrained(...)), or load it with tokenizer=..."
)
