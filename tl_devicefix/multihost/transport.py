"""How commands and values get from one rank to another: what is small by queues of the store where
they met, what is large by gloo's point-to-point. All that is sent is bytes: gloo knows few dtypes.

A message is a pickle, which runs what its sender wants: so it is only read once its signature is
right. The signature is an HMAC of the message, of the queue that it is in, and of its number there;
its key is made anew for each `init_hosts`, of the ranks' token and something random that each rank
says. The bytes of large values, which nobody unpickles, are not signed.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import math
import os
import pickle
import re
import secrets
import stat
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch

VARIABLE = "TL_DEVICEFIX_TOKEN"
_FILE = Path("~/.cache/tl_devicefix/token")
_SHORTEST = 16
"""Bytes of a token; who can guess it can sign."""
SAME_TOKEN = f"set {VARIABLE} to the same on all ranks, as `openssl rand -hex 32` gives it"
SIGNATURE = hashlib.sha256().digest_size
"""Bytes by which a signed message is longer."""


class WronglySigned(RuntimeError):
    """Who sent a message has not this rank's token, or the message is another one's."""


class Signer:
    """Signs messages, and checks those that others have signed."""

    def __init__(self, key: bytes, source: str) -> None:
        self._key, self.source = key, source

    def of_session(self, everyone: Sequence[Any]) -> Signer:
        """Who signs from now on: a message of another session is wrongly signed in this one."""
        said = "\n".join(each["session"] for each in everyone)
        return Signer(self._signature(said.encode(), "session"), self.source)

    def signed(self, message: bytes, where: str) -> bytes:
        """A message with its signature before it."""
        return self._signature(message, where) + message

    def checked(self, found: bytes, where: str) -> bytes:
        """The message, whose signature is right."""
        signature, message = found[:SIGNATURE], found[SIGNATURE:]
        if not hmac.compare_digest(signature, self._signature(message, where)):
            raise WronglySigned(
                f"a message ({where}) is not signed with the token of this rank: who sent it has "
                "another one, or sent it before"
            )
        return message

    def _signature(self, message: bytes, where: str) -> bytes:
        of = hmac.new(self._key, f"{where}\n".encode(), "sha256")
        of.update(message)
        return of.digest()


def signer() -> Signer:
    """Who signs with the token of this rank: that of the environment, or of the user's file."""
    token, source = os.fsencode(os.environ.get(VARIABLE, "")).strip(), VARIABLE
    if not token:
        try:
            path = _FILE.expanduser()
        except RuntimeError:
            raise RuntimeError(
                f"this rank has no home directory, where {_FILE} would be: {SAME_TOKEN}"
            ) from None
        try:
            token, source = _token_in(path), str(path)
        except OSError as error:
            why = error.strerror or str(error)
            raise RuntimeError(f"this rank cannot have {path} ({why}): {SAME_TOKEN}") from None
    if len(token) < _SHORTEST:
        raise RuntimeError(
            f"the token of {source} has {len(token)} characters, and may be guessed: {SAME_TOKEN}"
        )
    return Signer(token, source)


def _token_in(path: Path) -> bytes:
    """The token in a file, which is made if it is not there."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.path.lexists(path):
        _make(path)
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as there:
        found = os.fstat(there.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.geteuid():
            raise RuntimeError(
                f"{path} is to have the token of all ranks, but other users may open it: "
                f"remove it, and a new one is made, or {SAME_TOKEN}"
            )
        return there.read().strip()


def _make(path: Path) -> None:
    """Make a file with a new token, which has its name once it is written."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        made = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(made, "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):  # one gives it, of ranks that come at once
            os.link(part, path)
    finally:
        part.unlink(missing_ok=True)


COMMANDS, ANSWERS, PROGRESS, VALUES, _NEVER_SENT = range(5)
"""Tags."""
_FOREVER = timedelta(days=365)
"""Nobody knows how long a rank computes, so no operation times out by itself. A wait ends with its
rank: gloo raises when a connection closes; where a host is cut off and none does, `Watch` notices
within `init_hosts(timeout=...)`, whereupon rank 0 pushes what wakes its threads, and a lender, of
which nothing could wake a thread within gloo, ends its process."""
_PART = 1 << 24
"""Bytes that are sent at once."""
_SMALL = 1 << 20
"""Bytes that a queue takes at once; the store's limit is 8 MiB."""
_LOOK = b""
"""What wakes who waits, to look whether a rank is lost."""


def said_by_gloo(error: Exception) -> str:
    """What gloo says of a connection, without where in its source, and advice."""
    found = re.search(r"(Connection|Timed out|Broken)[^.\[]*[a-z]", str(error))
    return found[0] if found else f"{type(error).__name__}: {error}"


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """The bytes of a CPU tensor."""
    flat = values.contiguous().view(-1)
    # Of a single value, torch lets any stride pass for contiguous, but not for another dtype.
    return flat.as_strided(flat.shape, (1,), flat.storage_offset()).view(torch.uint8)


class Connection(NamedTuple):
    """All other ranks, as this one reaches them.

    Attributes:
        store: where they met.
        group: this package's own of gloo, beside which the user may have any.
        signer: signs what is unpickled.
    """

    store: Any
    group: Any
    signer: Signer

    def give(self, values: torch.Tensor, rank: int, tag: int) -> None:
        """Send bytes."""
        self.group.send([values], rank, tag).wait(_FOREVER)

    def get(self, values: torch.Tensor, rank: int, tag: int) -> None:
        """Receive bytes, as many as there are values."""
        self.group.recv([values], rank, tag).wait(_FOREVER)

    def send(self, values: torch.Tensor, rank: int, tag: int) -> None:
        """Send values."""
        for part in as_bytes(values).split(_PART) if values.numel() else ():
            self.give(part, rank, tag)

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, rank: int, tag: int
    ) -> torch.Tensor:
        """Receive values."""
        try:
            values = torch.empty(tuple(shape), dtype=dtype)
            into = values.view(-1).view(torch.uint8)
        except RuntimeError as error:
            nbytes = math.prod(shape) * dtype.itemsize
            into = torch.empty(min(nbytes, _PART), dtype=torch.uint8)
            for start in range(0, nbytes, _PART):
                self.get(into[: min(_PART, nbytes - start)], rank, tag)
            raise MemoryError(str(error)) from error
        for part in into.split(_PART) if values.numel() else ():
            self.get(part, rank, tag)
        return values

    def wait_for_loss(self, rank: int) -> None:
        """Wait for what a rank never sends."""
        self.get(torch.empty(1, dtype=torch.uint8), rank, _NEVER_SENT)


class Queue:
    """What one rank says to another: pickled objects, in order, each signed with its number."""

    def __init__(
        self,
        by: Connection,
        lender: int,
        other: int,
        tag: int,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._by, self._store, self._other, self._tag = by, by.store.clone(), other, tag
        self._name = f"said {tag} {lender}"
        self._numbers = itertools.count()
        self._store.set_timeout(_FOREVER)
        self._look = look

    def push(self, found: Any) -> None:
        """Say something."""
        told = pickle.dumps(found, protocol=5)
        if len(told) <= _SMALL:
            self._store.queue_push(self._name, self._signed(told))
            return
        self.push(_Large((len(told),)))
        large = torch.frombuffer(bytearray(self._signed(told)), dtype=torch.uint8)
        self._by.give(large, self._other, self._tag)

    def pop(self) -> Any:
        """Wait for what the other rank says."""
        found = self._unpickled(self._popped())
        if isinstance(found, _Large):
            told = torch.empty(found[0] + SIGNATURE, dtype=torch.uint8)
            self._by.get(told, self._other, self._tag)
            found = self._unpickled(bytes(told.numpy()))
        return found

    def _signed(self, told: bytes) -> bytes:
        return self._by.signer.signed(told, f"{self._name} {next(self._numbers)}")

    def _unpickled(self, told: bytes) -> Any:
        where = f"{self._name} {next(self._numbers)}"
        return pickle.loads(self._by.signer.checked(told, where))  # a rank's, whose code runs here

    def _popped(self) -> bytes:
        while True:
            told: bytes = self._store.queue_pop(self._name)
            if told != _LOOK:
                return told
            self._look()

    def wake(self, other: Queue) -> None:
        """Have who waits for another queue look, whose connection is not free."""
        self._store.queue_push(other._name, _LOOK)


class _Large(tuple[int]):
    """Bytes of what comes next by gloo."""
