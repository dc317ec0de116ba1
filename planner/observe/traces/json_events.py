"""The events of a Chrome trace, one at a time: a file of gigabytes is never in memory as a whole.

A window of text moves over the file; the standard library's decoder reads one JSON value at its front.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from planner.errors import SpecError
from planner.observe.traces.source import CHUNK_BYTES, Source

EVENTS = "traceEvents"
MAX_VALUE_CHARS = 2**25
"""The longest value beside or inside `traceEvents`; the longest seen in real traces is a call stack of 100 kB."""
MAX_KEYS = 1000
"""The most keys beside `traceEvents`; torch writes about 15."""

_SPACE = re.compile(r"[ \t\n\r]*")


class EventScanner:
    """Iterate over `events()`; then `header` holds what stands beside them."""

    def __init__(self, source: Source) -> None:
        self.header: dict[str, Any] = {}
        self.num_events = 0
        self._source = source
        self._text, self._at, self._num_dropped = "", 0, 0
        self._bytes = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        self._ended = False
        self._decode = json.JSONDecoder().raw_decode

    def events(self) -> Iterator[dict[str, Any]]:
        """Every event, a mapping; SpecError names the place of anything that is none."""
        if self._peek() == "[":  # the format's bare list
            self._at += 1
            yield from self._elements()
        else:
            self._take("{", "a trace is a mapping with `traceEvents`")
            yield from self._members()
        if self._peek():
            raise self._broken("something follows the end of the trace")

    def _members(self) -> Iterator[dict[str, Any]]:
        seen: set[str] = set()
        mark = self._peek()
        if mark == "}":
            self._at += 1
        while mark != "}":
            key = self._value()
            if not isinstance(key, str):
                raise self._broken("a key is no text")
            if key in seen:
                raise self._broken(f"{key[:60]!r} is given twice")
            seen.add(key)
            if len(seen) > MAX_KEYS:
                raise self._broken(f"has more than {MAX_KEYS:,} keys beside {EVENTS}")
            self._take(":", "a key has a colon behind it")
            if key == EVENTS:
                self._take("[", "the list of events")
                yield from self._elements()
            else:
                self.header[key] = self._value()
            mark = self._take(",}", "a comma or the end of the mapping")
        if EVENTS not in seen:
            raise self._source.broken(f"holds no `{EVENTS}`", "name a trace that torch.profiler exported")

    def _elements(self) -> Iterator[dict[str, Any]]:
        mark = self._peek()
        if mark == "]":
            self._at += 1
        while mark != "]":
            event = self._value()
            if not isinstance(event, dict):
                raise self.broken("is not an event, which is a mapping")
            yield event
            self.num_events += 1
            mark = self._take(",]", "a comma or the end of the list")

    def broken(self, problem: str) -> SpecError:
        """The error that the event caused which was read last."""
        return self._source.broken(f"{EVENTS}[{self.num_events}]: {problem}")

    def _broken(self, problem: str) -> SpecError:
        where = f"{EVENTS}[{self.num_events}], " if self.num_events else ""
        return self._source.broken(f"{where}character {self._num_dropped + self._at:,}: {problem}")

    def _peek(self) -> str:
        """The next character that is no blank, or nothing at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match  # an empty one at least
            self._at = match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._more()

    def _take(self, wanted: str, meaning: str) -> str:
        mark = self._peek()
        if not mark:
            raise self._broken("the file ends in the middle")
        if mark not in wanted:
            raise self._broken(f"{mark!r} stands where {meaning} should")
        self._at += 1
        return mark

    def _value(self) -> Any:
        """The value at the front; text is added until it is whole."""
        if not self._peek():
            raise self._broken("the file ends in the middle")
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended:
                    whole = error.pos < len(self._text) - 1 and "Unterminated" not in error.msg
                    raise self._broken(f"not JSON: {error.msg}" if whole else "the file ends in the middle") from None
            except RecursionError:
                raise self._broken("nested too deeply") from None
            except ValueError:  # an integer of thousands of digits
                raise self._broken("a number of thousands of digits") from None
            else:
                if end < len(self._text) or self._ended:  # a number may go on in the next piece
                    self._at = end
                    return value
            if len(self._text) - self._at > MAX_VALUE_CHARS:
                raise self._broken(f"not JSON, or a value of more than {MAX_VALUE_CHARS:,} characters")
            self._more()

    def _more(self) -> None:
        """Drop what was read, and read at least as much again as is left: a long value is not decoded often."""
        self._num_dropped += self._at
        rest = self._text[self._at :]
        data = self._source.read(max(CHUNK_BYTES, len(rest)))
        self._ended = not data
        self._text, self._at = rest + self._bytes.decode(data, final=self._ended), 0
