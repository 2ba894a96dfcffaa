"""Let go of what an error's traceback holds: every frame that it came through, with its tensors."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Collection


def let_go(error: BaseException, but_not: Collection[int] = ()) -> None:
    """Clear the frames of an error, and of those that it came from.

    Args:
        error: as it is being handled; frames that still run are left.
        but_not: `id` of errors to leave, with what they came from.
    """
    seen = set(but_not)
    errors: list[BaseException | None] = [error]
    while errors:
        if (each := errors.pop()) is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            errors += [each.__cause__, each.__context__]
    gc.collect()
