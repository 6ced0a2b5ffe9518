"""What a process of a comparison hears from the program that started it."""

from __future__ import annotations

import os
import signal
import threading
from typing import Final

READ_BYTES: Final = 64


class Orders:
    """What the parent says; this process and its children end with the parent."""

    def __init__(self) -> None:
        self.go = threading.Event()
        """Set when every learner is ready: none has to wait for the imports of another."""
        self.stop = threading.Event()
        threading.Thread(target=self._listen, name="parent", daemon=True).start()

    def _listen(self) -> None:
        """Reads the file itself: sys.stdin is locked while it waits, and a fork, as hivemind makes them, closes it."""
        events = {b"go": self.go, b"stop": self.stop}
        text = b""
        while more := os.read(0, READ_BYTES):
            *words, text = (text + more).split(b"\n")
            for word in words:
                events[word].set()
        os.killpg(os.getpgid(0), signal.SIGKILL)
