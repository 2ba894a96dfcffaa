"""Threads that watch over ranks are out of the store before Python ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from ranks import free_port

from tl_devicefix.multihost import rendezvous
from tl_devicefix.multihost.rendezvous import Watch
from tl_devicefix.multihost.transport import Signer


class HeldStore:
    """A store that answers when it is let."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.is_asked, self.answers, self.has_answered = (threading.Event() for _ in range(3))

    def set(self, key: str, value: str) -> None:
        self.is_asked.set()
        self.answers.wait(30)
        self._store.set(key, value)
        self.has_answered.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_beat_under_way_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWERING", 60)  # however slow this machine is
    watch = Watch(f"127.0.0.1:{free_port()}", 0, 1, 60, print, Signer(b"key", ""))
    watch.store = held = HeldStore(watch.store)
    watch.begin([], lambda rank, why: None, 15)
    assert held.is_asked.wait(30)
    watch.end()
    leaving = threading.Thread(target=watch.rest)

    leaving.start()

    leaving.join(0.1)
    assert leaving.is_alive()
    held.answers.set()
    leaving.join()
    assert held.has_answered.is_set()
