"""The token that all ranks have, by which each signs its messages and checks those of others.

A message is a pickle, which runs what its sender wants: so it is only read once its signature is
right. The signature is an HMAC of the message, of the queue that it is in, and of its number there;
its key is made anew for each `init_hosts`, of something random that each rank says.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    """Signs messages, and checks those that others have signed.

    Args:
        key: which all have, and nobody else.
        source: where it is from, for errors.
    """

    def __init__(self, key: bytes, source: str) -> None:
        self._key, self.source = key, source

    def of_session(self, everyone: Sequence[Any]) -> Signer:
        """Who signs from now on: a message of another session is wrongly signed in this one.

        Args:
            everyone: what each rank said of itself, with something random.
        """
        said = "\n".join(each["session"] for each in everyone)
        return Signer(self._signature(said.encode(), "session"), self.source)

    def signed(self, message: bytes, where: str) -> bytes:
        """A message with its signature before it.

        Args:
            message: to sign.
            where: what it is, so that it is nothing else: the queue, and its number there.
        """
        return self._signature(message, where) + message

    def checked(self, found: bytes, where: str) -> bytes:
        """The message, whose signature is right.

        Args:
            found: what `signed` gave.
            where: what it is to be.

        Raises:
            WronglySigned: if it is not.
        """
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
    """Who signs with the token of this rank: that of the environment, or of the user's file.

    Raises:
        RuntimeError: if there is none that only this user can read.
    """
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
    """The token in a file, which is made if it is not there.

    Raises:
        OSError: if it cannot be made or read.
        RuntimeError: if others can read it or own it, or it is no file.
    """
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
