"""Only who has the ranks' token is heard: a message is unpickled once its signature is right."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import free_port

from tl_devicefix.multihost import rendezvous, transport
from tl_devicefix.multihost.rendezvous import Watch
from tl_devicefix.multihost.transport import Connection, Queue, Signer, WronglySigned, signer

SESSION = [{"session": "of rank 0"}, {"session": "of rank 1"}]
RAN: list[str] = []


class Malicious:
    """A pickle that runs code where it is read."""

    def __init__(self, size: int = 0) -> None:
        self._size = size

    def __reduce__(self) -> Any:
        return RAN.append, ("x" * self._size,)


class Loop:
    """What is sent by gloo comes back."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def send(self, values: list[torch.Tensor], rank: int, tag: int) -> Loop:
        self.sent.append(values[0].clone())
        return self

    def recv(self, values: list[torch.Tensor], rank: int, tag: int) -> Loop:
        values[0].copy_(self.sent.pop(0))
        return self

    def wait(self, timeout: Any) -> None:
        pass


Ends = tuple[Any, Any]


@pytest.fixture
def ends() -> Callable[..., Ends]:
    """The two ends of a queue, by a store and connections of their own."""
    RAN.clear()
    store = dist.HashStore()
    loop = Loop()

    def of(key: bytes = b"shared", session: Any = SESSION) -> Ends:
        by = Connection(store, loop, Signer(key, "").of_session(session))
        return Queue(by, 1, 1, 0), Queue(by, 1, 0, 0)

    return of


SIZES = pytest.mark.parametrize("size", [0, 2 * transport._SMALL], ids=["by the store", "by gloo"])


@SIZES
def test_a_message_arrives(ends: Callable[..., Ends], size: int) -> None:
    giving, taking = ends()

    for each in ("first" * size, ["second"]):
        giving.push(each)
        assert taking.pop() == each


@SIZES
def test_what_another_token_signed_is_not_unpickled(ends: Callable[..., Ends], size: int) -> None:
    ends(b"another")[0].push(Malicious(size))

    with pytest.raises(WronglySigned, match=r"is not signed with the token of this rank"):
        ends()[1].pop()

    assert RAN == []


def test_what_nobody_signed_is_not_unpickled(ends: Callable[..., Ends]) -> None:
    giving, taking = ends()
    giving._store.queue_push(giving._name, pickle.dumps(Malicious()))

    with pytest.raises(WronglySigned):
        taking.pop()

    assert RAN == []


def test_large_bytes_that_were_exchanged_are_not_unpickled(ends: Callable[..., Ends]) -> None:
    giving, taking = ends()
    giving.push("x" * 2 * transport._SMALL)
    (sent,) = giving._by.group.sent
    forged = torch.frombuffer(bytearray(pickle.dumps(Malicious())), dtype=torch.uint8)
    sent[-len(forged) :] = forged

    with pytest.raises(WronglySigned):
        taking.pop()


def test_a_message_that_comes_again_is_refused(ends: Callable[..., Ends]) -> None:
    giving, taking = ends()
    giving.push("once")
    signed = giving._store.queue_pop(giving._name)
    for _ in range(2):
        giving._store.queue_push(giving._name, signed)

    assert taking.pop() == "once"
    with pytest.raises(WronglySigned):
        taking.pop()


def test_a_message_of_another_session_is_refused(ends: Callable[..., Ends]) -> None:
    ends(session=[SESSION[0], {"session": "of another one"}])[0].push("then")

    with pytest.raises(WronglySigned):
        ends()[1].pop()


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], list[str]]:
    """What ranks say that meet with these tokens."""
    monkeypatch.setattr(rendezvous, "_why_not_reached", lambda *of: None)  # tests have no network

    def meet(watch: Watch, rank: int) -> str:
        try:
            return str(watch.meet({"rank": rank}))
        except RuntimeError as error:
            return str(error)

    def met(tokens: list[str]) -> list[str]:
        master, ranks = f"127.0.0.1:{free_port()}", range(len(tokens))
        signers = [Signer(each.encode(), f"rank {rank}'s file") for rank, each in enumerate(tokens)]
        watches = [Watch(master, rank, len(tokens), 20, len, signers[rank]) for rank in ranks]
        with ThreadPoolExecutor(len(tokens)) as threads:
            return list(threads.map(meet, watches, ranks))

    return met


def test_ranks_with_one_token_meet(met: Any) -> None:
    assert met(["one", "one"]) == ["[{'rank': 0}, {'rank': 1}]"] * 2


def test_each_rank_refuses_where_one_has_another_token(met: Any) -> None:
    first, second, third = met(["secret", "secret", "other"])

    set_it = "set TL_DEVICEFIX_TOKEN to the same on all ranks, as `openssl rand -hex 32` gives it"
    assert first == (
        f"rank 2 has another token than rank 0, which has that of rank 0's file: {set_it}"
    )
    assert second.startswith("rank 2 has another token than rank 1, ")
    assert third.startswith("rank 0 has another token than rank 2, ")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's, who has no token yet."""
    monkeypatch.delenv("TL_DEVICEFIX_TOKEN")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def says(of: Signer) -> bytes:
    return of.signed(b"message", "where")


def test_the_first_rank_makes_a_token_and_others_have_it(home: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: says(signer()), range(8)))

    path = home / ".cache/tl_devicefix/token"
    assert set(found) == {says(Signer(path.read_bytes(), ""))}
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_text()) == 64


def test_another_user_s_token_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signer()
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)

    with pytest.raises(RuntimeError, match=r"token of all ranks, but other users may open it"):
        signer()


def test_the_environment_comes_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TL_DEVICEFIX_TOKEN", "0123456789abcdef")

    assert says(signer()) == says(Signer(b"0123456789abcdef", ""))
    assert not (home / ".cache").exists()


def open_to_others(path: Path) -> None:
    path.write_text("secret" * 8)
    path.chmod(0o640)


def a_link(path: Path) -> None:
    (path.parent / "another").write_text("secret" * 8)
    (path.parent / "another").chmod(0o600)
    path.symlink_to("another")


def too_short(path: Path) -> None:
    path.write_text("secret")
    path.chmod(0o600)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (open_to_others, r"is to have the token of all ranks, but other users may open it: remove"),
        (a_link, r"this rank cannot have .*/token \(.*symbolic"),
        (Path.mkdir, r"this rank cannot have .*/token \(|other users may open it"),
        (too_short, r"/token has 6 characters, and may be guessed"),
    ],
)
def test_a_token_that_is_not_this_user_s_alone(home: Path, make: Any, why: str) -> None:
    path = home / ".cache/tl_devicefix/token"
    path.parent.mkdir(parents=True)
    make(path)

    with pytest.raises(RuntimeError, match=why + r".*set TL_DEVICEFIX_TOKEN to the same") as error:
        signer()

    assert "secret" not in str(error.value)


def test_no_home_to_have_a_token_in(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as of a user without any

    with pytest.raises(RuntimeError, match=r"^this rank has no home .*: set TL_DEVICEFIX_TOKEN "):
        signer()
