"""What tracebacks hold and tell: their frames are let go of; tensors of several devices get a note.

Python 3.10 has no notes: there, what torch says is all.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Collection, Iterator


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


ON_MIXED_DEVICES = (
    "The model is on several devices, and tensors of two of them met: work within "
    "`with tl_devicefix.mix_devices():`, which brings them together; or write "
    ".to(model.cfg.device) on a block's weight, or on what a hook kept, to bring it home, or "
    ".to(x.device) to bring it to x. "
    'Every such case, and what to write: "Coming from single-device code", '
    "docs/coming_from_one_device.md"
)


def note(error: BaseException, text: str) -> None:
    """Add a note to an error."""
    if hasattr(error, "add_note"):
        error.add_note(text)


@contextlib.contextmanager
def noting_mixed_devices() -> Iterator[None]:
    """Within it, an error about tensors of several devices gets a note that says what to write."""
    try:
        yield
    except RuntimeError as error:
        note_mixed_devices(error)
        raise


def note_mixed_devices(error: RuntimeError) -> None:
    """Add the note to an error, if it is about several devices and has not got it yet."""
    about_devices = "same device" in str(error) or "expected device" in str(error)
    if about_devices and not _is_noted(error):
        note(error, ON_MIXED_DEVICES)


def _is_noted(error: BaseException | None) -> bool:
    """Whether an error's traceback shows the note already, if with what it came from."""
    while error is not None:
        if ON_MIXED_DEVICES in getattr(error, "__notes__", ()):
            return True
        error = error.__cause__ or error.__context__
    return False
