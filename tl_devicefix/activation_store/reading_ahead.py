"""The thread that reads groups of rows before they are handed out."""

from __future__ import annotations

import os
import queue
import threading
import weakref

import torch

from tl_devicefix.activation_store.token_order import Plan
from tl_devicefix.activation_store.token_rows import Memory, Rows


class Reader:
    """A thread that reads groups from one on, one ahead of what is handed out.

    Args:
        rows: which are read.
        plan: in which groups.
        epoch: of the first group.
        group: its number.
        epochs: how many there are; None for ever.
    """

    def __init__(self, rows: Rows, plan: Plan, epoch: int, group: int, epochs: int | None) -> None:
        self._rows, self._plan = rows, plan
        self._memory = Memory(min(plan.largest_group, rows.count) * rows.bytes)
        self._read: queue.SimpleQueue[torch.Tensor | BaseException] = queue.SimpleQueue()
        self._ahead = threading.Semaphore(1)
        self._over = threading.Event()
        self._process = os.getpid()
        self._thread = threading.Thread(
            target=self._work, args=(epoch, group, epochs), name="harvest reader", daemon=True
        )
        self._thread.start()
        # As the process ends, too: a thread that comes back from torch then aborts it.
        self._finalize = weakref.finalize(
            self, _end, self._process, self._over, self._ahead, self._thread
        )

    def next(self) -> torch.Tensor:
        """The rows of the next group, in the order in which they are handed out.

        Now the one after it is read.

        Raises:
            Exception: what went wrong in reading.
        """
        read = self._read.get()
        self._ahead.release()
        if isinstance(read, BaseException):
            raise read
        return read

    @property
    def is_of_this_process(self) -> bool:
        """Whether the thread is here: a process that is forked gets none."""
        return self._process == os.getpid()

    def close(self) -> None:
        """End the thread."""
        self._finalize()

    def _work(self, epoch: int, group: int, epochs: int | None) -> None:
        try:
            while epochs is None or epoch < epochs:
                for number, blocks in enumerate(self._plan.groups(epoch)):
                    if number < group:
                        continue
                    self._ahead.acquire()
                    if self._over.is_set():
                        return
                    places = self._plan.places(epoch, number)
                    self._read.put(self._rows.read(blocks, places, self._memory))
                epoch, group = epoch + 1, 0
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            self._read.put(error)


def _end(
    process: int, over: threading.Event, ahead: threading.Semaphore, thread: threading.Thread
) -> None:
    if process != os.getpid():  # it was forked, and has no such thread
        return
    over.set()
    ahead.release()
    if threading.current_thread() is not thread:  # which may collect garbage
        thread.join()
