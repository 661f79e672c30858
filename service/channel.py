"""How a worker and its supervisor talk: lines of JSON over a pair of sockets, each way."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

#: What the other end says: a word, and fields beside it.
Fields = dict[str, Any]
#: Answers what the other end asks; an exception is told to it as ``error``.
Handler = Callable[[str, Fields], Awaitable[Fields | None]]

#: Bytes of the longest line: counts have some 30 KiB, 100,000 tokens some 16 MiB.
_LONGEST = 2**24
_log = logging.getLogger(__name__)


class Gone(ConnectionError):
    """The other end has closed, as its process ended."""


class Channel:
    """One end. Either may ask, and answers need not come in order."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler
    ) -> None:
        self._reader, self._writer, self._handler = reader, writer, handler
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Fields]] = {}
        self._serving: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, end: socket.socket, handler: Handler) -> Channel:
        reader, writer = await asyncio.open_connection(sock=end, limit=_LONGEST)
        return cls(reader, writer, handler)

    def tell(self, word: str, **fields: Any) -> None:
        """Say something that needs no answer; lost if the other end has gone."""
        self._write({"do": word, **fields})

    async def ask(self, word: str, **fields: Any) -> Fields:
        """Say something, and wait for the answer.

        Raises:
            Gone: the other end closed before it answered.
        """
        if self._reader.at_eof() or self._writer.is_closing():
            raise Gone(word)
        number = next(self._numbers)
        answer: asyncio.Future[Fields] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._write({"do": word, "number": number, **fields})
        try:
            return await answer
        finally:
            del self._waiting[number]

    async def listen(self) -> None:
        """Handle what the other end says, until it closes."""
        try:
            while line := await self._reader.readline():
                message = json.loads(line)
                if "do" in message:
                    task = asyncio.create_task(self._serve(message))
                    self._serving.add(task)
                    task.add_done_callback(self._serving.discard)
                elif (answer := self._waiting.get(message.pop("number"))) and not answer.done():
                    answer.set_result(message)
        except ConnectionError:
            pass
        finally:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(Gone("the process ended"))
            self._writer.close()

    async def _serve(self, message: Fields) -> None:
        word, number = message.pop("do"), message.pop("number", None)
        try:
            answer = await self._handler(word, message) or {}
        except Exception as error:
            _log.exception("%s failed", word)
            answer = {"error": str(error)}
        if number is not None:
            self._write({"number": number, **answer})

    def _write(self, message: Fields) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")
