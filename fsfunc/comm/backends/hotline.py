"""How ranks speak to one another where their collectives no longer do.

Each process listens at a port of its own; the addresses are told once, as a mesh is
made. It is nobody's in particular, so no rank's end silences the others, and it tells
apart who has ended (nothing listens any more) from who is stopped (none answers).
What is not said with the word of this process is not heard.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["GONE", "SILENT", "Hotline"]

GONE = "has ended without a word: its process was killed, or has returned"
SILENT = "does not answer: its process is stopped, or out of reach"
_LONGEST = 1 << 16  # bytes of a message

Message = dict[str, Any]


class Hotline:
    """This process's end of it.

    Args:
        answer: what to say to a message; called by whoever calls ``serve``.

    Raises:
        OSError: nobody may listen here.
    """

    def __init__(self, answer: Callable[[Message], Message]):
        self.answer, self.word = answer, uuid.uuid4().hex
        family, host = _own_host()
        self.listener = socket.create_server((host, 0), family=family, backlog=1024)
        host, port = self.listener.getsockname()[:2]
        self.address = f"{host}:{port}:{self.word}"
        self.others: Mapping[int, str] = {}  # the addresses by rank

    def serve(self, seconds: float) -> None:
        """Waits for one message, that long, and answers it."""
        self.listener.settimeout(seconds)
        try:
            connection, _ = self.listener.accept()
        except OSError:  # nobody came
            return
        with connection:
            try:
                connection.settimeout(1.0)
                text = b""
                while not text.endswith(b"\n") and len(text) < _LONGEST:
                    text += connection.recv(_LONGEST) or b"\n"
                message = _message(text)
                if message.pop("word", "") == self.word:
                    connection.sendall(_text(self.answer(message)))
            except (OSError, ValueError):
                pass  # who asked has gone, or was no rank

    def ask(
        self, ranks: Iterable[int], message: Message, limit: float
    ) -> dict[int, Message]:
        """What each rank answers within ``limit`` seconds, or what kept it from it."""
        until, found = time.monotonic() + limit, dict[int, Message]()
        with selectors.DefaultSelector() as calls:
            for rank in ranks:
                if rank in self.others:
                    call = _Call(self.others[rank], message)
                    calls.register(call.socket, selectors.EVENT_WRITE, (rank, call))
            while calls.get_map() and (left := until - time.monotonic()) > 0:
                for key, _ in calls.select(left):
                    rank, call = key.data
                    if (answer := call.goes_on()) is not None:
                        found[rank] = answer
                        calls.unregister(call.socket)
                        call.socket.close()
                    elif not call.unsaid:
                        calls.modify(call.socket, selectors.EVENT_READ, key.data)
            for key in list(calls.get_map().values()):
                rank, call = key.data
                found[rank] = {"state": SILENT}
                call.socket.close()
        return found

    def wake(self) -> None:
        """Ends a ``serve`` that waits."""
        host, port, _ = self.address.rsplit(":", 2)
        try:
            socket.create_connection((host, int(port)), 1.0).close()
        except OSError:
            pass

    def close(self) -> None:
        self.listener.close()


class _Call:
    """One rank that is asked: what is not said yet, and what was heard."""

    def __init__(self, address: str, message: Message):
        host, port, word = address.rsplit(":", 2)
        self.socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.socket.setblocking(False)
        self.socket.connect_ex((host, int(port)))
        self.unsaid, self.heard = _text(message | {"word": word}), b""

    def goes_on(self) -> Message | None:
        """Speaks or hears, whichever is next; the answer, once it is there."""
        try:
            if self.unsaid:
                self.unsaid = self.unsaid[self.socket.send(self.unsaid) :]
                return None
            more = self.socket.recv(_LONGEST)
        except ConnectionError:
            return {"state": GONE}
        except OSError:
            return {"state": SILENT}
        self.heard += more
        if not more:
            return {"state": GONE}
        return _message(self.heard) if self.heard.endswith(b"\n") else None


def _text(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _message(text: bytes) -> Message:
    found = json.loads(text)
    return found if isinstance(found, dict) else {}


def _own_host() -> tuple[Any, str]:
    """This machine as the machine where ranks meet sees it: (family, address)."""
    meeting = os.environ.get("MASTER_ADDR", "localhost")
    found = socket.getaddrinfo(meeting, 9, type=socket.SOCK_DGRAM)
    family, kind, _, _, address = min(found, key=lambda way: way[0] != socket.AF_INET)
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: only chooses the way
        return family, probe.getsockname()[0]
