"""Ctrl-C while something runs that must not stop half-way."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Lets Ctrl-C wait until the body is done, which then raises `KeyboardInterrupt`.

    For what an interrupt leaves unusable, such as the writing of files by other libraries. A second Ctrl-C
    does not wait. Python sends signals to the main thread alone: in others nothing has to wait.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, Any]] = []

    def wait(*arguments: Any):
        came.append(arguments)
        if len(came) > 1:
            handler(*came.pop())

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])
