"""Queue of plan requests: one at a time goes to the planning process, with a time limit; answers are cached."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from meshwright.environment import environment_offline
from meshwright.errors import MeshwrightError
from meshwright.serve.errors import Busy
from meshwright.serve.request import PlanRequest

LIMIT = 60.0
"""Seconds that a request may take, including the start of a new process."""
WAITING = 64
"""Requests that may wait for their turn."""
KEPT_BYTES = 32 << 20
"""Size of the answer cache."""
LONGEST_LINE = 64 << 20
WORKER = "meshwright.serve.worker"


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int
    body: bytes


class Answers:
    """Cache of answers with a limit in bytes; the least recently used goes first."""

    def __init__(self, most: int = KEPT_BYTES) -> None:
        self._most, self._size = most, 0
        self._kept: OrderedDict[PlanRequest, Answer] = OrderedDict()

    def get(self, request: PlanRequest) -> Answer | None:
        if request in self._kept:
            self._kept.move_to_end(request)
        return self._kept.get(request)

    def put(self, request: PlanRequest, answer: Answer) -> None:
        self._kept[request] = answer
        self._size += len(answer.body)
        while self._size > self._most:
            self._size -= len(self._kept.popitem(last=False)[1].body)


class PlannerQueue:
    """Takes requests from any number of visitors."""

    def __init__(self, *, limit: float = LIMIT, waiting: int = WAITING) -> None:
        self._limit, self._most = limit, waiting
        self._waiting = 0
        self._turn = asyncio.Lock()
        self._answers = Answers()
        self._process: asyncio.subprocess.Process | None = None

    async def open(self) -> None:
        """Start the process early, so that the first visitor does not wait for its imports."""
        self._process = await _start()

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self._process = None

    async def ask(self, request: PlanRequest, is_gone: Callable[[], Awaitable[bool]]) -> Answer:
        """The answer to a request; a visitor who left before their turn gets none."""
        if found := self._answers.get(request):
            return found
        if self._waiting >= self._most:
            raise Busy(f"{self._most} requests are already waiting for the planner; try again in a few seconds.")
        self._waiting += 1
        try:
            async with self._turn:
                if found := self._answers.get(request):
                    return found
                if await is_gone():
                    raise Busy("The visitor left before the planner reached the request.")
                return await self._plan(request)
        finally:
            self._waiting -= 1

    async def _plan(self, request: PlanRequest) -> Answer:
        try:
            async with asyncio.timeout(self._limit):
                line = await self._exchange(json.dumps(request.to_json()))
        except TimeoutError as error:
            await self.close()
            raise Busy(
                f"Planning {request.job} on {request.cluster} took longer than {self._limit:.0f} s and was stopped; "
                "try fewer devices or a smaller batch, or use `meshwright plan`, which has no time limit."
            ) from error
        answer = _read(line)
        if answer.status < 500:
            self._answers.put(request, answer)
        return answer

    async def _exchange(self, line: str) -> bytes:
        """Send one line to the process and read one back; the next request restarts a process that died."""
        if self._process is None or self._process.returncode is not None:
            self._process = await _start()
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            await self._process.stdin.drain()
            found = await self._process.stdout.readline()
        except (ConnectionError, ValueError):  # a broken pipe, or a line over the limit
            found = b""
        if not found.endswith(b"\n"):
            await self.close()
            raise Busy("The planning process ended before it answered; try again, or see the server's output.")
        return found


def _read(line: bytes) -> Answer:
    """Convert the process's line to the visitor's answer."""
    value = json.loads(line)
    if "answer" in value:
        return Answer(status=200, body=json.dumps(value["answer"]).encode())
    return Answer(status=value["status"], body=error_body(value["error"]))


def error_body(error: MeshwrightError | str) -> bytes:
    """An error as JSON, in ASCII, because a message may quote anything."""
    return json.dumps({"error": str(error)}).encode()


async def _start() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", WORKER),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LONGEST_LINE,
        env=environment_offline(),  # a config may name a file of the hub
    )
