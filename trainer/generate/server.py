"""OpenAI's interface over HTTP: threads receive requests, the decoder's turns serve them.

    POST /v1/completions       a text, several, or token ids, continued (``trainer.generate.api`` has the fields)
    POST /v1/chat/completions  the answer to a conversation, for a model with a chat template
    GET  /v1/models            the served model; also /v1/models/NAME
    GET  /health               {"status": "ok"}
    GET  /stats                requests by state; seconds to the first token and per further token as percentiles

Wrong input is 400, a wrong token 401, another model or page 404, a full queue 429, a server that is about to end 503: one line each,
under ``error.message``.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from trainer.generate.api import FORMS, ApiForm
from trainer.generate.broker import IDLE_SECONDS, Event, HttpRefusal, RequestBroker, RequestState
from trainer.shared.run.errors import ConfigError

MOST_BYTES = 1 << 20
"""The longest body of a request, in bytes."""
LAST_RECEIVED = 52
"""Offset in Linux's ``struct tcp_info`` of the milliseconds since data was received (uapi/linux/tcp.h: 8 bytes, then 4-byte numbers)."""
BUSY = {429: "requests", 503: "server_error", 500: "server_error", 501: "server_error"}
"""The API's type of an error by status; every other one is the request's."""
CODES = {401: "invalid_api_key"}
PAGES = dict.fromkeys(("/v1/models", "/health", "/stats"))
FORMS_BY_PATH = {form.path: form for form in FORMS}
NAMED = re.compile(r"(\w+)[\[.=]")
"""The field that the line of a wrong request begins with."""


class HttpServer(ThreadingHTTPServer):
    """The server made by ``open_server``; ``desk`` is set before it serves. ``answering``: received requests without a complete answer."""

    request_queue_size = 512
    daemon_threads = True
    desk: RequestBroker
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


def open_server(host: str, port: int, secret: str | None) -> HttpServer:
    """Returns a bound server that does not serve yet. ``ConfigError`` if the address is unavailable, or public without a token."""
    if secret is None and host not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(f"--host={host} can be reached by others; give --token-file FILE with a secret that clients send as bearer token")
    try:
        server = HttpServer((host, port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host={host} --port={port} cannot be served: {reason}; choose another port, or 0 for any") from None
    server.secret = secret
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
        self._guarded(self._get)

    def do_POST(self) -> None:
        self._guarded(self._complete)

    def _get(self) -> None:
        desk = self.server.desk
        model = {"id": desk.model.name, "object": "model", "created": desk.model.created, "owned_by": "trireme"}
        answers: dict[str, Callable[[], Mapping[str, Any]]] = {
            "/v1/models": lambda: {"object": "list", "data": [model]},
            f"/v1/models/{desk.model.name}": lambda: model,
            "/health": lambda: {"status": "ok"},
            "/stats": desk.stats,
        }
        self._json(200, self._at(answers, FORMS_BY_PATH, "POST")())

    def _at(self, here: Mapping[str, Any], others: Mapping[str, Any], method: str) -> Any:
        """Returns the page at the path of the request. ``HttpRefusal`` if nothing is, or it is for another ``method``."""
        path = unquote(urlsplit(self.path).path)
        if path in here:
            return here[path]
        if path in others:
            raise HttpRefusal(405, f"{path} is for {method}; use that")
        if path.startswith("/v1/models/"):
            raise self._unserved(path.removeprefix("/v1/models/"))
        raise HttpRefusal(404, f"no such page; there are {', '.join([*PAGES, *FORMS_BY_PATH])}")

    def _unserved(self, model: Any) -> HttpRefusal:
        return HttpRefusal(404, f"model={repr(model)[:60]} is not served; this is {self.server.desk.model.name!r}", "model_not_found")

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
            self._json(refused.status, fault(refused.status, str(refused), refused.code))
        except ConfigError as error:
            self._json(400, fault(400, str(error)))

    def _complete(self) -> None:
        form: ApiForm = self._at(FORMS_BY_PATH, PAGES, "GET")
        try:
            body = json.loads(self.rfile.read(body_bytes(self.headers.get("Content-Length", ""))))
        except (ValueError, RecursionError):
            raise HttpRefusal(400, "the body is not JSON") from None
        if not isinstance(body, dict):
            raise HttpRefusal(400, "the body is not a JSON object")
        desk, whole = self.server.desk, False
        if body.get("model") not in (None, desk.model.name):
            raise self._unserved(body["model"])
        states = desk.ask(form, body)
        for state in states:
            state.arrived = self.heard
        try:
            (self._stream if states[0].asked.stream else self._whole)(form, states)
            whole = True
        finally:
            for state in states:
                desk.close(state, whole)

    def _whole(self, form: ApiForm, states: Sequence[RequestState]) -> None:
        how: dict[int, tuple[str, int]] = {}
        while len(how) < len(states):
            state, _, ended, count = self._event(states)
            how |= {state.index: (ended, count)} if ended else {}
        choices = [self._choice(form, state, state.telling.text, how[state.index][0], (0, how[state.index][1]), False) for state in states]
        self._json(200, self._document(form, states, choices, False, usage=self._usage(states)))

    def _stream(self, form: ApiForm, states: Sequence[RequestState]) -> None:
        event = self._event(states)
        self._send(200, "Content-Type: text/event-stream")
        usage = {"usage": None} if states[0].asked.usage else {}
        if (opening := form.opening()) is not None:
            for state in states:
                self._say(self._document(form, states, [{"index": state.index, **opening, "finish_reason": None}], True, **usage))
        sent, before, left = [list[float]() for _ in states], [0] * len(states), len(states)
        while True:
            state, piece, ended, count = event
            if piece or ended:
                choice = self._choice(form, state, piece, ended, (before[state.index], count), True)
                self._say(self._document(form, states, [choice], True, **usage))
                sent[state.index].append(time.monotonic())
                before[state.index] = count
            left -= bool(ended)
            if not left:
                break
            event = self._event(states)
        for state in states:
            state.first, state.last = sent[state.index][0], sent[state.index][-1]
        if usage:
            self._say(self._document(form, states, [], True, usage=self._usage(states)))
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, states: Sequence[RequestState]) -> Event:
        """Waits for the next event; ``ConnectionError`` if the client disconnects meanwhile."""
        while True:
            if time.monotonic() > self.looked + IDLE_SECONDS:
                self._look()
            with contextlib.suppress(queue.Empty):
                return states[0].events.get(timeout=IDLE_SECONDS)

    def _look(self) -> None:
        self.looked, there = time.monotonic(), select.poll()  # select() is limited to descriptors below 1024
        there.register(self.connection, select.POLLIN)
        if there.poll(0) and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionAbortedError

    def _say(self, data: Mapping[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

    def _document(
        self, form: ApiForm, states: Sequence[RequestState], choices: Sequence[Mapping[str, Any]], streamed: bool, **more: Any
    ) -> dict[str, Any]:
        return form.answer(states[0].request.name, self.server.desk.model.name, choices, streamed, **more)

    def _choice(self, form: ApiForm, state: RequestState, text: str, ended: str, at: tuple[int, int], streamed: bool) -> dict[str, Any]:
        """Returns a choice of the answer, or a piece of one: a text, made of the tokens ``at`` first to end."""
        told = form.choice(text, state.scores(*at), self.server.desk.model.spelling, streamed)
        return {"index": state.index, **told, "finish_reason": ended or None}

    def _usage(self, states: Sequence[RequestState]) -> dict[str, int]:
        return states[0].asked.counts([(len(state.request.prompt), len(state.made.tokens)) for state in states])

    def _json(self, status: int, data: Mapping[str, Any]) -> None:
        content = json.dumps(data).encode()
        self._send(status, f"Content-Type: application/json\r\nContent-Length: {len(content)}", content)

    def _send(self, status: int, headers: str, content: bytes = b"") -> None:
        """Sends head and content in one write: a killed server sends a short answer whole or not at all."""
        first = f"{self.protocol_version} {status} {HTTPStatus(status).phrase}"
        own = f"Server: {self.version_string()}\r\nDate: {self.date_time_string()}\r\nConnection: close"
        self.wfile.write(f"{first}\r\n{own}\r\n{headers}\r\n\r\n".encode("ascii") + content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuses a request that is not HTTP, or of an unknown method, in the form of all other refusals."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self._json(code, fault(code, message or HTTPStatus(code).phrase))

    def log_message(self, *_: Any) -> None:
        """Logs nothing: requests are counted instead."""


def fault(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """Returns the API's document of an error."""
    named = NAMED.match(message)
    kind, word = BUSY.get(status, "invalid_request_error"), code or CODES.get(status)
    return {"error": {"message": message, "type": kind, "param": named[1] if named and kind not in BUSY.values() else None, "code": word}}
