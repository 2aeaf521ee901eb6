"""The server's process: a socket, signals, and uvicorn between them and the application."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from linrope.errors import InputError


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens there. InputError if the port is taken or the address is not this machine's."""
    if not 0 <= port < 2**16:
        raise InputError(f"--port={port} must be from 0 to {2**16 - 1}; 0 takes a free one.")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None) or 0  # above 0 one of the system's, whose text names no address
        reason = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or error
        raise InputError(
            f"--host={host} --port={port}: cannot listen there ({reason}). Give another port, or 0 for a free one; as "
            "host an address of this machine, 127.0.0.1 for example."
        ) from error


class Server(uvicorn.Server):
    """uvicorn, which ends well after a signal: requests under way are finished, and `run` returns. A second one cuts
    them off, and a third does not wait for their clients.

    Args:
        app: the application.
        ready: called once signals and requests are heeded.
        cut: called by the second signal, perhaps within any other function of this thread: it takes no lock.
    """

    def __init__(self, app: Any, ready: Callable[[], object], cut: Callable[[], object]) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning", lifespan="off"))
        self.ready, self.cut, self.signals = ready, cut, 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Instead of uvicorn's, which raises the signal again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.signals += 1
        self.should_exit = True
        if self.signals > 1:
            self.cut()
        if self.signals > 2:
            self.force_exit = True
            logging.disable(logging.ERROR)  # uvicorn and asyncio have a traceback for each request that is left
