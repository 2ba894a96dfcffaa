"""Only who has the ranks' token is heard: a message is unpickled once its signature is right."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from tl_devicefix.multihost.signing import SIGNATURE, Signer, WronglySigned, signer
from tl_devicefix.multihost.transport import Connection, Transport

SESSION = [{"session": "of rank 0"}, {"session": "of rank 1"}]
RAN: list[str] = []


class Malicious:
    """A pickle that runs code where it is read."""

    def __reduce__(self) -> Any:
        return RAN.append, ("",)


Ends = tuple[Connection, Connection]


@pytest.fixture
def ends() -> Iterator[Callable[..., Ends]]:
    """The two ends of a connection: the first one's key, or session, may be another."""
    RAN.clear()
    sockets: list[socket.socket] = []

    def of(key: bytes = b"shared", session: Any = SESSION) -> Ends:
        sockets.extend(socket.socketpair())
        signers = Signer(key, "").of_session(session), Signer(b"shared", "").of_session(SESSION)
        first, second = map(Connection, sockets[-2:], signers, ("0 1", "1 0"), ("1 0", "0 1"))
        return first, second

    yield of
    for item in sockets:
        item.close()


def test_why_rank_0_has_ended_is_heard_though_its_connection_is_closed(
    ends: Callable[..., Ends],
) -> None:
    rank_0, connection = ends()
    Transport({}, {1: rank_0}).tell_loss("rank 2 is lost")
    rank_0.close()

    heard: SimpleQueue[Any] = SimpleQueue()
    Transport({}, {0: connection}).watch(lambda *lost: heard.put(lost), timeout=60.0)
    assert heard.get(timeout=60) == (None, "rank 2 is lost")


@pytest.mark.parametrize("size", [1, 20_000])
def test_a_message_arrives(ends: Callable[..., Ends], size: int) -> None:
    giving, taking = ends()

    for message in ("first" * size, ["second"]):
        giving.send(message)
        assert taking.receive() == message


@pytest.mark.parametrize("other", [{"key": b"another"}, {"session": [*SESSION, SESSION[0]]}])
def test_what_another_token_or_session_signed_is_not_unpickled(
    other: dict[str, Any], ends: Callable[..., Ends]
) -> None:
    giving, taking = ends(**other)
    giving.send(Malicious())

    with pytest.raises(WronglySigned, match=r"is not signed with the token of this rank"):
        taking.receive()

    assert RAN == []


def sent_by(giving: Connection, taking: Connection, *messages: Any) -> bytes:
    """The bytes of what one end sends, which the other one does not get."""
    for message in messages:
        giving.send(message)
    return taking.sock.recv(1 << 16)


def forged(sent: bytes) -> bytes:
    """Another message in the place of the one that was signed."""
    message = pickle.dumps(Malicious())
    return len(message).to_bytes(8, "big") + sent[8 : 8 + SIGNATURE] + message


@pytest.mark.parametrize("change", [forged, lambda sent: sent + sent], ids=["forged", "again"])
def test_what_somebody_changes_on_its_way_is_not_unpickled(
    change: Callable[[bytes], bytes], ends: Callable[..., Ends]
) -> None:
    giving, taking = ends()
    giving.sock.sendall(change(sent_by(giving, taking, "once")))

    def receive_twice() -> None:
        for _ in range(2):
            assert taking.receive() == "once"

    with pytest.raises(WronglySigned):
        receive_twice()

    assert RAN == []


def test_small_values_are_signed(ends: Callable[..., Ends]) -> None:
    giving, taking = ends()
    giving.send_values(torch.arange(3))
    sent = bytearray(taking.sock.recv(1 << 16))
    sent[-1] += 1
    giving.sock.sendall(sent)

    with pytest.raises(WronglySigned):
        taking.receive_values((3,), torch.int64)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's, who has no token yet."""
    monkeypatch.delenv("TL_DEVICEFIX_TOKEN")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def says(of: Signer) -> bytes:
    return of.signature(b"message", "where")


def test_the_first_rank_makes_a_token_and_others_have_it(home: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        result = list(threads.map(lambda _: says(signer()), range(8)))

    path = home / ".cache/tl_devicefix/token"
    assert set(result) == {says(Signer(path.read_bytes(), ""))}
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_text()) == 64


def test_another_user_s_token_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signer()
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)

    with pytest.raises(
        RuntimeError, match=r"other users may open .*, which holds the token of all"
    ):
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
        (
            open_to_others,
            r"other users may open .*/token, which holds the token of all ranks: remove",
        ),
        (a_link, r"this rank cannot open the file .*/token \(.*symbolic"),
        (Path.mkdir, r"this rank cannot open the file .*/token \(|other users may open "),
        (too_short, r"/token must have 16 characters or more, but has 6"),
    ],
)
def test_a_token_that_is_not_this_user_s_alone(home: Path, make: Any, why: str) -> None:
    path = home / ".cache/tl_devicefix/token"
    path.parent.mkdir(parents=True)
    make(path)

    with pytest.raises(RuntimeError, match=why + r".*set TL_DEVICEFIX_TOKEN to the same") as error:
        signer()

    assert "secret" not in str(error.value)
