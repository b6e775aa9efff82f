"""Completions over HTTP, in the form of OpenAI's ``/v1/completions``: threads receive requests, the decoder's turns serve them.

    POST /v1/completions   prompt (texts or token ids), max_tokens, temperature, top_p, seed, stop, stream, logprobs; also
                           top_k, repetition_penalty, ignore_eos, task
    GET  /v1/models        the served model
    GET  /health           {"status": "ok"}
    GET  /stats            requests by state; seconds to the first token and per further token as percentiles

Wrong input is 400, a wrong token 401, another model 404, a full queue 429, a server that is about to end 503: one line each, under
``error.message``.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import queue
import secrets
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trainer.data.text import TextTokens
from trainer.generate.generate import Completion, PromptRequest, RequestUpdate, TextRow, check_prompts, check_texts
from trainer.generate.session import check_task
from trainer.generate.telling import TextStream
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict
from trainer.shared.run.stages import Sampling

MOST_BYTES = 1 << 20
"""The longest body of a request, in bytes."""
MOST_STOPS, LONGEST_STOP = 16, 1000
"""Limits on stop texts and on their characters: they are searched for at every token, while all clients wait."""
REMEMBERED = 4096
"""The number of requests in the percentiles."""
LAST_RECEIVED = 52
"""Offset in Linux's ``struct tcp_info`` of the milliseconds since data was received (uapi/linux/tcp.h: 8 bytes, then 4-byte numbers)."""
IDLE_SECONDS = 0.5
"""The wait of an idle turn for requests, and the interval at which a thread checks that its client is still connected."""
SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "seed")
KNOWN = (*SAMPLING, "model", "prompt", "max_tokens", "stop", "stream", "logprobs", "ignore_eos", "task", "stream_options", "user")
NEUTRAL = {"n": 1, "best_of": 1, "echo": False, "suffix": "", "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}}
"""Unsupported parameters, with the neutral values that clients may send anyway. Null is neutral, too."""
MOST_LIKELIEST = 5


@dataclass
class RequestState:
    """A prompt under way, the one at ``index`` of its request: its text so far, the events for its thread, and the times of its arrival and
    of its first and last token; in a streamed answer, the times at which these were sent."""

    request: PromptRequest
    telling: TextStream
    index: int
    events: queue.SimpleQueue[Event]  # of all prompts of the request
    arrived: float = field(default_factory=time.monotonic)
    first: float = 0.0
    last: float = 0.0
    made: Completion = field(default_factory=lambda: Completion([]))


Event = tuple[RequestState, str, str, int]
"""A prompt, a piece of its text, the way in which the text ended (empty: it continues), and its tokens so far."""


class HttpRefusal(Exception):
    """A refused request: status and one line."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class RequestBroker:
    """The exchange between the threads of clients and the decoder on rank 0. ``room``: the most prompts that wait or run at once;
    ``tasks``: the number of tasks that the model was tuned for; ``seq`` and ``written``: the most tokens (``check_prompts``)."""

    def __init__(
        self,
        words: TextTokens,
        seq: int,
        room: int,
        stopped: Callable[[], bool],
        tasks: int = 1,
        written: int | None = None,
    ):
        self.words, self.lengths, self.room, self.stopped, self.tasks = words, (seq, written), room, stopped, tasks
        self.names = itertools.count()
        self.changed = threading.Condition()
        self.closed = False  # the decoder takes no more requests
        self.new: list[PromptRequest] = []
        self.left: set[int] = set()  # names of abandoned requests
        self.open: dict[int, RequestState] = {}
        self.counts = {"completed": 0, "dropped": 0, "refused": 0}
        self.times: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)  # seconds to the first token, per further token

    # called by the decoder

    def hear(self, idle: bool) -> RequestUpdate:
        with self.changed:
            if idle and not self.new and not self.stopped():
                self.changed.wait(IDLE_SECONDS)
            (new, self.new), (left, self.left) = (self.new, []), (self.left, set())
            self.closed = self.stopped()
            return RequestUpdate(new, frozenset(left), over=self.closed)

    def tell(self, row: TextRow) -> None:
        with self.changed:
            asked = self.open.get(row.request.name)
        if asked is None or asked.telling.stopped:
            return
        asked.last = time.monotonic()
        asked.first = asked.first or asked.last
        piece = asked.telling.hear(row.made.tokens, bool(row.made.ended))
        asked.made = row.made.copy()
        ended = "stop" if asked.telling.stopped else row.made.ended
        if ended and not row.made.ended:
            with self.changed:
                self.left.add(row.request.name)
        asked.events.put((asked, piece, ended, len(asked.made.tokens)))

    # called by the threads of clients

    def ask(self, body: Mapping[str, Any]) -> list[RequestState]:
        """Accepts a request and returns its prompts. ``HttpRefusal`` if there is no room, ``ConfigError`` if it is wrong."""
        requests, stops = self._parsed({name: value for name, value in body.items() if value is not None})
        with self.changed:
            if self.closed or self.stopped():
                raise HttpRefusal(503, "the server is about to end; ask another one")
            if len(self.open) + len(requests) > self.room:
                self.counts["refused"] += 1
                raise HttpRefusal(429, f"{len(self.open)} requests wait or run already; ask again later")
            events = queue.SimpleQueue[Event]()
            tellings = [TextStream(self.words.tokenizer, stops, self.words.before(request.prompt)) for request in requests]
            asked = [RequestState(request, telling, index, events) for index, (request, telling) in enumerate(zip(requests, tellings))]
            self.open |= {each.request.name: each for each in asked}
            self.new += requests
            self.changed.notify()
        return asked

    def close(self, asked: RequestState, whole: bool) -> None:
        """Closes a prompt whose client has the ``whole`` answer or is gone."""
        with self.changed:
            del self.open[asked.request.name]
            self.counts["completed" if whole else "dropped"] += 1
            if not whole:
                self.left.add(asked.request.name)
            elif asked.first:
                further = (asked.last - asked.first) / max(1, len(asked.made.tokens) - 1)
                self.times.append((asked.first - asked.arrived, further))

    def _parsed(self, body: Mapping[str, Any]) -> tuple[list[PromptRequest], list[str]]:
        for name, value in body.items():
            if name not in KNOWN and (name not in NEUTRAL or value != NEUTRAL[name]):
                raise ConfigError(f"{name}={repr(value)[:60]} is not served; leave it out")
        prompts, tokens, stops = self._prompts(body.get("prompt")), body.get("max_tokens", 16), body.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        for name, kind in (("stream", bool), ("stream_options", dict)):
            if name in body and not isinstance(body[name], kind):
                raise ConfigError(f"{name}={repr(body[name])[:60]} is not a {'truth value' if kind is bool else 'JSON object'}")
        if not _is_whole(tokens) or tokens < 1:
            raise ConfigError(f"max_tokens={tokens!r} must be a whole number of 1 or more")
        likeliest = 0 if (told := body.get("logprobs", False)) is False else told
        if not _is_whole(likeliest) or not 0 <= likeliest <= MOST_LIKELIEST:
            raise ConfigError(f"logprobs={repr(told)[:60]} must be a whole number from 0 to {MOST_LIKELIEST}")
        if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ConfigError(f"stop={repr(stops)[:60]} must be a text, or a list of texts")
        if len(stops) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in stops):
            raise ConfigError(f"stop has too much; give {MOST_STOPS} texts at most, of {LONGEST_STOP} characters at most")
        check_texts(stops)
        if (task := body.get("task")) is not None:
            check_task(task, self.tasks, "task")
        given = {name: body[name] for name in SAMPLING if name in body}
        sampling = from_dict(Sampling, {"temperature": 1.0, "seed": secrets.randbits(32)} | given)
        check_prompts(prompts, [tokens] * len(prompts), *self.lengths)
        ends = frozenset[int](() if body.get("ignore_eos") else self.words.ends)
        requests = [
            PromptRequest(number, prompt, tokens, sampling, ends, next(self.names), task, likeliest)
            for number, prompt in enumerate(prompts)
        ]
        return requests, stops

    def _prompts(self, given: Any) -> list[list[int]]:
        """Returns the tokens of each prompt; ``given`` is a text, a list of token ids, or a list of these."""
        several = isinstance(given, list) and any(isinstance(one, (str, list)) for one in given)
        prompts = [self._tokens(one) for one in (given if several else [given])]
        if len(prompts) > self.room:
            raise ConfigError(f"prompt has {len(prompts)} texts, and {self.room} may wait or run at once; give fewer")
        return prompts

    def _tokens(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            check_texts([prompt])
            return self.words.begun(prompt)
        if isinstance(prompt, list) and all(_is_whole(token) and 0 <= token < self.words.vocab for token in prompt):
            return prompt
        raise ConfigError(f"prompt={repr(prompt)[:60]} is neither text nor tokens below {self.words.vocab}; give such, or a list of them")

    def stats(self) -> dict[str, Any]:
        with self.changed:
            started = sum(bool(asked.first) for asked in self.open.values())
            states = {"running": started, "waiting": len(self.open) - started, **self.counts}
            times = list(zip(*self.times)) or [(), ()]
        names = ("seconds_to_first_token", "seconds_per_further_token")
        return states | {name: percentiles(values) for name, values in zip(names, times)}


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def percentiles(values: tuple[float, ...]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{share}": ordered[-(-share * len(ordered) // 100) - 1] for share in (50, 90, 99)} if ordered else {}


class HttpServer(ThreadingHTTPServer):
    """The server made by ``open_server``; ``desk`` is set before it serves. ``answering``: received requests without a complete answer."""

    request_queue_size = 512
    daemon_threads = True
    desk: RequestBroker
    model = ""
    secret: str | None = None
    answering = 0

    def __init__(self, address: tuple[str, int]):
        super().__init__(address, Handler)
        self.counted = threading.Lock()

    @contextlib.contextmanager
    def answer(self) -> Iterator[None]:
        with self.counted:
            self.answering += 1
        try:
            yield
        finally:
            with self.counted:
                self.answering -= 1


def open_server(host: str, port: int, model: str, secret: str | None) -> HttpServer:
    """Returns a bound server that does not serve yet. ``ConfigError`` if the address is unavailable, or public without a token."""
    if secret is None and host not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(f"--host={host} can be reached by others; give --token-file FILE with a secret that clients send as bearer token")
    try:
        server = HttpServer((host, port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host={host} --port={port} cannot be served: {reason}; choose another port, or 0 for any") from None
    server.model, server.secret = model, secret
    return server


def since_data(connection: socket.socket) -> float:
    """Returns the seconds since the connection last received data: a request's wait for its thread. 0 if the system does not report it."""
    if not hasattr(socket, "TCP_INFO"):
        return 0.0
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_RECEIVED + 4)
    return int.from_bytes(told[LAST_RECEIVED:], sys.byteorder) / 1e3


def body_bytes(length: str) -> int:
    """Parses a Content-Length. ``HttpRefusal`` unless it is a number within ``MOST_BYTES``."""
    if not (length.isascii() and length.isdigit()):
        raise HttpRefusal(400, "the Content-Length of the body must be a whole number")
    digits = length.lstrip("0") or "0"
    if len(digits) > len(str(MOST_BYTES)) or int(digits) > MOST_BYTES:
        raise HttpRefusal(413, f"the body must have a length of {MOST_BYTES} bytes at most")
    return int(digits)


class Handler(BaseHTTPRequestHandler):
    """The handler of a client's request."""

    server: HttpServer
    protocol_version = "HTTP/1.1"
    timeout = 60
    heard = looked = 0.0

    def parse_request(self) -> bool:
        self.heard = time.monotonic() - since_data(self.connection)
        return super().parse_request()

    def do_GET(self) -> None:
        desk = self.server.desk
        models = {"object": "list", "data": [{"id": self.server.model, "object": "model", "owned_by": "trireme"}]}
        answers: dict[str, Callable[[], Mapping[str, Any]]] = {
            "/v1/models": lambda: models,
            "/health": lambda: {"status": "ok"},
            "/stats": desk.stats,
        }
        self._guarded(lambda: self._json(200, answers[self.path]()) if self.path in answers else self._json(404, fault("no such page")))

    def do_POST(self) -> None:
        self._guarded(self._complete)

    def _guarded(self, act: Callable[[], object]) -> None:
        self.close_connection = True
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        with self.server.answer(), contextlib.suppress(OSError):  # the client is gone
            self._answered(act, given)

    def _answered(self, act: Callable[[], object], given: str) -> None:
        try:
            if self.server.secret is not None and not hmac.compare_digest(given.encode(), self.server.secret.encode()):
                raise HttpRefusal(401, "the bearer token is missing or wrong")
            act()
        except HttpRefusal as refused:
            self._json(refused.status, fault(str(refused)))
        except ConfigError as error:
            self._json(400, fault(str(error)))

    def _complete(self) -> None:
        if self.path != "/v1/completions":
            raise HttpRefusal(404, "no such page")
        try:
            body = json.loads(self.rfile.read(body_bytes(self.headers.get("Content-Length", ""))))
        except (ValueError, RecursionError):
            raise HttpRefusal(400, "the body is not JSON") from None
        if not isinstance(body, dict):
            raise HttpRefusal(400, "the body is not a JSON object")
        if body.get("model") not in (None, self.server.model):
            raise HttpRefusal(404, f"model={repr(body['model'])[:60]} is not served; this is {self.server.model!r}")
        asked, whole = self.server.desk.ask(body), False
        for each in asked:
            each.arrived = self.heard
        try:
            (self._stream if body.get("stream") else self._whole)(asked, body)
            whole = True
        finally:
            for each in asked:
                self.server.desk.close(each, whole)

    def _whole(self, asked: Sequence[RequestState], body: Mapping[str, Any]) -> None:
        how: dict[int, str] = {}
        while len(how) < len(asked):
            each, _, ended, _ = self._event(asked)
            how |= {each.index: ended} if ended else {}
        choices = [self._choice(each, body, each.telling.text, how[each.index]) for each in asked]
        self._json(200, self._answer(asked, choices, usage=True))

    def _stream(self, asked: Sequence[RequestState], body: Mapping[str, Any]) -> None:
        event = self._event(asked)
        self._send(200, "Content-Type: text/event-stream")
        sent, before, left = [list[float]() for _ in asked], [0] * len(asked), len(asked)
        while True:
            each, piece, ended, count = event
            if piece or ended:
                self._say(self._answer(asked, [self._choice(each, body, piece, ended, before[each.index], count)]))
                sent[each.index].append(time.monotonic())
                before[each.index] = count
            left -= bool(ended)
            if not left:
                break
            event = self._event(asked)
        for each in asked:
            each.first, each.last = sent[each.index][0], sent[each.index][-1]
        if (body.get("stream_options") or {}).get("include_usage"):
            self._say(self._answer(asked, [], usage=True))
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, asked: Sequence[RequestState]) -> Event:
        """Waits for the next event; ``ConnectionError`` if the client disconnects meanwhile."""
        while True:
            if time.monotonic() > self.looked + IDLE_SECONDS:
                self._look()
            with contextlib.suppress(queue.Empty):
                return asked[0].events.get(timeout=IDLE_SECONDS)

    def _look(self) -> None:
        self.looked, there = time.monotonic(), select.poll()  # select() is limited to descriptors below 1024
        there.register(self.connection, select.POLLIN)
        if there.poll(0) and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionAbortedError

    def _say(self, data: Mapping[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

    def _answer(self, asked: Sequence[RequestState], choices: list[dict[str, Any]], usage: bool = False) -> dict[str, Any]:
        data = {"id": f"cmpl-{asked[0].request.name}", "object": "text_completion", "created": int(time.time()), "model": self.server.model}
        read, made = sum(len(each.request.prompt) for each in asked), sum(len(each.made.tokens) for each in asked)
        counts = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
        return data | {"choices": choices} | ({"usage": counts} if usage else {})

    def _choice(
        self, asked: RequestState, body: Mapping[str, Any], text: str, ended: str, first: int = 0, end: int | None = None
    ) -> dict[str, Any]:
        """Returns a choice of the answer: a text, made of the tokens from ``first`` to ``end``."""
        told = None
        if not any(body.get("logprobs") is nothing for nothing in (None, False)):  # 0: only of the chosen tokens
            tokens, shares = asked.made.tokens[first:end], asked.made.log_probabilities[first:end]
            words, others = self._words(tokens), asked.made.likeliest[first:end]
            top = [dict(zip(self._words(other), other.values())) | {word: share} for other, word, share in zip(others, words, shares)]
            told = {"tokens": words, "token_ids": tokens, "token_logprobs": shares, "top_logprobs": top}
        return {"index": asked.index, "text": text, "logprobs": told, "finish_reason": ended or None}

    def _words(self, tokens: Iterable[int]) -> list[str]:
        return [self.server.desk.words.tokenizer.decode([token]) for token in tokens]

    def _json(self, status: int, data: Mapping[str, Any]) -> None:
        content = json.dumps(data).encode()
        self._send(status, f"Content-Type: application/json\r\nContent-Length: {len(content)}", content)

    def _send(self, status: int, headers: str, content: bytes = b"") -> None:
        """Sends head and content in one write: a killed server sends a short answer whole or not at all."""
        first = f"{self.protocol_version} {status} {HTTPStatus(status).phrase}"
        own = f"Server: {self.version_string()}\r\nDate: {self.date_time_string()}\r\nConnection: close"
        self.wfile.write(f"{first}\r\n{own}\r\n{headers}\r\n\r\n".encode("ascii") + content)

    def log_message(self, *_: Any) -> None:
        """Logs nothing: requests are counted instead."""


def fault(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}
