"""`ForwardWatcher`: waits for the device, so that the device thread can wait for jobs at the same time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from executor_service.backends.base import PendingForward
from executor_service.fatal import die


class ForwardWatcher:
    """A thread that waits for one forward at a time. All methods: device thread."""

    def __init__(self, on_done: Callable[[], None]) -> None:
        self._on_done = on_done  # called on the watcher's thread
        self._to_watch: queue.SimpleQueue[PendingForward | None] = queue.SimpleQueue()
        self._watched: PendingForward | None = None  # the last one
        self._done: PendingForward | None = None  # the last one; written by the watcher's thread
        self._thread = threading.Thread(target=self._run, name="forwards", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the forward that it waits for."""
        self._to_watch.put(None)

    def watch(self, forward: PendingForward) -> None:
        """Begin to wait for a forward; does nothing if it is watched already."""
        if forward is not self._watched:
            self._watched = forward
            self._to_watch.put(forward)

    def is_waiting_for(self, forward: PendingForward) -> bool:
        """Whether the forward is watched and not known to be done."""
        return forward is self._watched and forward is not self._done

    def is_done(self, forward: PendingForward) -> bool:
        """Whether the forward is the last that the watcher saw done."""
        return forward is self._done

    def _run(self) -> None:
        try:
            while (forward := self._to_watch.get()) is not None:
                forward.wait()
                self._done = forward
                self._on_done()
        except BaseException as error:
            die(error)
