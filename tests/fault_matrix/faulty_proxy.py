"""A proxy in front of a server that can fail in all the usual ways."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final

REFUSE, RESET, HANG, FORWARD = "refuse", "reset", "hang", "forward"
STATUSES: Final = {"500": "500 Internal Server Error", "401": "401 Unauthorized"}


class Proxy:
    """Listens on a separate port and treats every connection according to `mode`.

    Modes: `forward`, `refuse` (nothing listens), `reset` (RST after the request), `hang` (no answer), `500`, `401`.
    """

    def __init__(self, upstream: int) -> None:
        self.mode = FORWARD
        self._upstream = upstream
        self._listener = _listening(0)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()

    def become(self, mode: str) -> None:
        """Change the mode, and open or close the listener."""
        if mode == REFUSE and self.mode != REFUSE:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        elif self.mode == REFUSE and mode != REFUSE:
            self._listener = _listening(self.port)
            threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()
        self.mode = mode

    def _serve(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            answers: dict[str, Callable[[socket.socket], None]] = {RESET: _reset, HANG: _hang, FORWARD: self._forward}
            answers.get(self.mode, self._refuse_politely)(connection)

    def _refuse_politely(self, connection: socket.socket) -> None:
        connection.recv(1 << 16)
        body = b"You cannot do this, on purpose."
        head = f"HTTP/1.1 {STATUSES[self.mode]}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(f"{head}Connection: close\r\n\r\n".encode() + body)

    def _forward(self, connection: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self._upstream), timeout=30) as server:
            back = threading.Thread(target=_pump, args=(server, connection), daemon=True)
            back.start()
            _pump(connection, server)
            back.join(30)


def _listening(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(64)
    return listener


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def _reset(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _hang(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass
