"""Waiting for what may never answer, as of a host that is cut off: C would wait for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from typing import ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")


class Unanswered(RuntimeError):
    """Nobody answered in time."""


def within(
    seconds: float, do: Callable[_Given, _Found], *given: _Given.args, **named: _Given.kwargs
) -> _Found:
    """Do something in a thread, as nobody but Python hears of an interrupt, and wait for it.

    Args:
        seconds: for which to wait at most; what is done is left to itself then.
        do: what to do; with what it is given.

    Raises:
        Unanswered: if it takes longer.
        Exception: what it raises.
    """
    done: futures.Future[_Found] = futures.Future()

    def work() -> None:
        try:
            done.set_result(do(*given, **named))
        except Exception as error:  # noqa: BLE001  # it is raised by who waits
            done.set_exception(error)

    name = getattr(do, "__name__", "asks")
    threading.Thread(target=work, daemon=True, name=name).start()
    try:
        return done.result(seconds)
    except futures.TimeoutError:
        raise Unanswered(f"no answer within {seconds:g} s") from None
