"""Free the memory held by tracebacks, and add hints to errors."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Collection, Iterator


def clear_frames(error: BaseException, but_not: Collection[int] = ()) -> None:
    """Clear the frames of a handled error and of its causes, which keep tensors alive.

    Frames that still run are left alone, and so are errors whose `id` is in `but_not`, with their
    causes.
    """
    seen = set(but_not)
    errors: list[BaseException | None] = [error]
    while errors:
        if (raised := errors.pop()) is not None and id(raised) not in seen:
            seen.add(id(raised))
            traceback.clear_frames(raised.__traceback__)
            errors += [raised.__cause__, raised.__context__]
    gc.collect()  # models that the frames held have reference cycles


def is_own_bug(error: BaseException) -> bool:
    """Return True for an error that is a bug of this package.

    Such an error must be raised, not reported as a fault of a file or a model.
    """
    kinds = AssertionError, AttributeError, LookupError, NameError, TypeError
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    raised_in = str(frame.f_globals.get("__name__")).partition(".")[0]
    return isinstance(error, kinds) and raised_in == "tl_devicefix"


ON_MIXED_DEVICES = (
    "The model is on several devices, and this operation has tensors of two of them: run it within "
    "`with tl_devicefix.mix_devices():`, which brings them together; or write "
    ".to(model.cfg.device) on a block's weight, or on a tensor that a hook stored, to bring it "
    "home, or .to(x.device) to bring it to x. "
    'The page "Run single-device code" of the documentation has every such case.'
)


def note(error: BaseException, text: str) -> None:
    """Add a note to an error, or to the end of its message."""
    if hasattr(error, "add_note"):  # since Python 3.11
        if text not in getattr(error, "__notes__", ()):  # an error may pass here several times
            error.add_note(text)
    elif error.args == (str(error),):
        error.args = (f"{error}\n{text}",)


@contextlib.contextmanager
def noting_mixed_devices() -> Iterator[None]:
    """Add the remedy to errors about tensors on several devices, within a `with` block."""
    try:
        yield
    except RuntimeError as error:
        note_mixed_devices(error)
        raise


def note_mixed_devices(error: RuntimeError) -> None:
    """Append the remedy to the message of an error about several devices."""
    about_devices = "same device" in str(error) or "expected device" in str(error)
    is_noted = ON_MIXED_DEVICES in str(error)
    if about_devices and not is_noted:
        # Change the message: the notes of `note` are lost where `str(error)` is logged.
        error.args = (f"{error}\n{ON_MIXED_DEVICES}",)
