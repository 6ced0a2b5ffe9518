"""What a process of a comparison hears from the program that started it."""

from __future__ import annotations

import os
import signal
import sys
import threading


class Orders:
    """What the parent says; this process and its children end with the parent."""

    def __init__(self) -> None:
        self.go = threading.Event()
        """Set when every learner is ready: none has to wait for the imports of another."""
        self.stop = threading.Event()
        threading.Thread(target=self._listen, name="parent", daemon=True).start()

    def _listen(self) -> None:
        events = {"go": self.go, "stop": self.stop}
        for line in sys.stdin:
            events[line.strip()].set()
        os.killpg(os.getpgid(0), signal.SIGKILL)
