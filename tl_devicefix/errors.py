"""Parts of error messages, notes on errors, and the memory that errors hold."""

from __future__ import annotations

import contextlib
import difflib
import gc
import traceback
from collections.abc import Collection, Iterable, Iterator

# At 0.76, transformers' argument "device_mesh" would pass for "device_map".
_NEAR = 0.85
_MAX_LENGTH = 120


def did_you_mean(name: object, names: Collection[str], at_least: float = 0.6) -> str:
    """Return "; did you mean 'balanced'?" with the nearest name, or "" if none is near."""
    close = difflib.get_close_matches(str(name), list(names), n=1, cutoff=at_least)
    return f"; did you mean {close[0]!r}?" if close else ""


def shown(value: object) -> str:
    """Return a value's repr; if it is long, the ends of a text, or the class of another value."""
    text = repr(value)
    if isinstance(value, str) and len(text) > _MAX_LENGTH:
        return f"{text[: _MAX_LENGTH - 20]}...{text[-20:]}"
    return text if len(text) <= _MAX_LENGTH and "\n" not in text else f"a {type(value).__name__}"


def refuse_unknown(
    function: str,
    arguments: Iterable[str],
    parameters: Iterable[str],
    where: str = "",
    passes_on: bool = False,
) -> None:
    """Refuse arguments that do not exist; `where` ends the clause, such as " for a directory".

    With `passes_on`, only near misses are refused: TransformerLens passes unknown arguments on to
    transformers, which ignores them.
    """
    parameters = list(parameters)
    for name in arguments:
        meant = did_you_mean(name, parameters, _NEAR if passes_on else 0.6)
        if name not in parameters and (meant or not passes_on):
            raise TypeError(f"{function} has no argument {name!r}{where}{meant}")


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
    elif error.args == (str(error),) and text not in str(error):
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
    """Add the remedy to an error, if it is about several devices."""
    if "same device" in str(error) or "expected device" in str(error):
        note(error, ON_MIXED_DEVICES)
