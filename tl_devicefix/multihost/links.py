"""Whether two ranks that lend hear each other, which rank 0 does not see: it may hear both.

Each says in its signs of life how many parts it has begun to give each other one. Who waits for a
part that was begun long ago, and does not come, tells rank 0.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator

from tl_devicefix.multihost.late import Late


class Links:
    """Parts that a rank gives other ranks, and gets from them.

    Attributes:
        awaited: the rank for which it waits now, if it does.
    """

    def __init__(self) -> None:
        self.awaited: int | None = None
        self._begun: Counter[int] = Counter()
        self._got: Counter[int] = Counter()
        self._late = Late()

    def begin(self, rank: int) -> None:
        """A part goes to a rank from now on."""
        self._begun[rank] += 1

    @contextlib.contextmanager
    def getting(self, rank: int) -> Iterator[None]:
        """Within it, the process waits for a part of a rank."""
        self.awaited = rank
        try:
            yield
            self._got[rank] += 1
        finally:
            self.awaited = None

    def begun(self) -> str:
        """How many parts were begun for each rank, for it to read: see `waits_in_vain`."""
        return json.dumps(dict(self._begun))

    def waits_in_vain(self, rank: int, said: str, own: int, limit: float) -> bool:
        """Whether a part was begun that has not come for long. Ask again and again.

        Args:
            rank: the one that is awaited.
            said: what that says, as `begun` gives it; or nothing yet.
            own: this rank.
            limit: seconds that a part may take.
        """
        got, begun = self._got[rank], json.loads(said or "{}").get(str(own), 0)
        late = self._late.look((rank, got, begun > got))
        return begun > got and late > limit


LINKS = Links()
"""Those of this process, which is one rank."""
