"""Connections with an end to their patience: who sends a request for ever, or never reads an answer, is hung up on."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 15.0
"""Seconds in which a request must have arrived, its body too; a browser on this machine needs milliseconds."""
READING_S = 30.0
"""Seconds without a byte read by who asked, while an answer waits to be sent."""
CLOSING_S = 2.0
"""Seconds in which the last bytes must have been read when the server closes a connection."""
MAX_OPEN = 512
"""Connections at a time, idle ones too; more are hung up on at once, before they take a file descriptor for long."""


class Patient(H11Protocol):
    """A connection of the page."""

    _request: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_OPEN:
            transport.abort()
            return
        self._request = self.loop.call_later(REQUEST_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._request, self._reading):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def _look(self) -> None:
        """Hold the time of a request that has begun and not ended, and of no other."""
        is_begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not is_begun and self.conn.their_state is not h11.SEND_BODY:
            if self._request is not None:
                self._request.cancel()
            self._request = None
        elif self._request is None:
            self._request = self.loop.call_later(REQUEST_S, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self.loop.call_later(READING_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(CLOSING_S, self.transport.abort)
