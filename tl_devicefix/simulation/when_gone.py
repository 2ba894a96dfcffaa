"""What is noted when an object is gone, by C alone: an interrupt has no place to fall into.

An exception in a ``__del__``, or in a callback in Python, is printed and lost, and an interrupt is
one that may come anywhere.
"""

from __future__ import annotations

import weakref
from typing import Any


class Gone(weakref.ref[Any]):
    """A reference to an object, which is given to a function when that is gone.

    It is made of the object and of a function in C that calls nothing, as a deque's ``append``.
    Something else has to hold it until then. It is equal to none but itself.
    """

    __slots__ = ()

    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __ne__ = object.__ne__
