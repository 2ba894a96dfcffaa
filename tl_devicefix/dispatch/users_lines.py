"""Which line of the user's own a call comes from, through this package and other libraries."""

from __future__ import annotations

from types import FrameType

_NOT_THE_USERS = {
    *("torch", "transformer_lens", "tl_devicefix", "transformers", "accelerate"),
    *("einops", "fancy_einsum", "jaxtyping", "contextlib", "functools"),
}


def line_of_user(frame: FrameType | None) -> str:
    """The innermost line that is not of these libraries: "script.py:12"."""
    frames = _frames_to_user(frame)
    found = frames[-1] if frames else frame
    return "?" if found is None else f"{found.f_code.co_filename}:{found.f_lineno}"


def stacklevel_of_user(frame: FrameType) -> int:
    """The `stacklevel` that has a warning from this frame point at that line."""
    return len(_frames_to_user(frame)) or 1


def _frames_to_user(frame: FrameType | None) -> list[FrameType]:
    """The frames from this one out to the user's innermost; none if no frame is the user's."""
    frames = []
    while frame is not None:
        frames.append(frame)
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_THE_USERS:
            return frames
        frame = frame.f_back
    return []
