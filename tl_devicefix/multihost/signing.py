"""The ranks' token, and signatures made with it.

A message between ranks is a pickle, which runs what its sender wants: so it is read only if its
signature is right. That is an HMAC of the message, and of where it stands: between which ranks, and
its number there. The key is made anew for each `init_hosts`, of the token and of something random
from each rank.
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
"""Bytes of a signature."""


class WronglySigned(RuntimeError):
    """The sender of a message has another token, or the message stands in the wrong place."""


class Signer:
    """Signs messages, and checks those that others have signed."""

    def __init__(self, key: bytes, source: str) -> None:
        self._key, self.source = key, source

    def of_session(self, hellos: Sequence[Any]) -> Signer:
        """One whose signatures are wrong in any other session."""
        sessions = "\n".join(hello["session"] for hello in hellos)
        return Signer(self.signature(sessions.encode(), "session"), self.source)

    def signature(self, message: Any, place: str) -> bytes:
        """Of bytes that stand in a place."""
        signature = hmac.new(self._key, f"{place}\n".encode(), "sha256")
        signature.update(message)
        return signature.digest()

    def check(self, signature: Any, message: Any, place: str) -> None:
        """Raise a `WronglySigned` if a signature is wrong."""
        if not hmac.compare_digest(signature, self.signature(message, place)):
            raise WronglySigned(
                f"a message ({place}) is not signed with the token of this rank: its sender has "
                "another token, or repeats an older message"
            )


def signer() -> Signer:
    """Who signs with the token of this rank: that of the environment, or of the user's file."""
    token, source = os.fsencode(os.environ.get(VARIABLE, "")).strip(), VARIABLE
    if not token:
        path = _FILE.expanduser()
        try:
            token, source = _token_in(path), str(path)
        except OSError as error:
            why = error.strerror or str(error)
            raise RuntimeError(
                f"this rank cannot open the file {path} ({why}): {SAME_TOKEN}"
            ) from None
    if len(token) < _SHORTEST:
        raise RuntimeError(
            f"the token of {source} must have {_SHORTEST} characters or more, but has "
            f"{len(token)}: {SAME_TOKEN}"
        )
    return Signer(token, source)


def _token_in(path: Path) -> bytes:
    """The token in a file, which is made if it does not exist."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.path.lexists(path):
        _make(path)
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        is_private = not status.st_mode & 0o077 and status.st_uid == os.geteuid()
        if not stat.S_ISREG(status.st_mode) or not is_private:
            raise RuntimeError(
                f"other users may open {path}, which holds the token of all ranks: "
                f"remove it, and a new one is made, or {SAME_TOKEN}"
            )
        return file.read().strip()


def _make(path: Path) -> None:
    """Make a file with a new token, which has its name once it is written."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        part.touch(0o600, exist_ok=False)
        part.write_text(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):  # another rank has made it
            os.link(part, path)
    finally:
        part.unlink(missing_ok=True)
