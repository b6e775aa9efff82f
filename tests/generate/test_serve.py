"""Completions over HTTP: nothing lost or mixed up between clients, free slots when they leave, and an end that finishes what runs."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.convert.test_logits import SMALL, checkpoint, ours
from trainer.data.prepare import prepare
from trainer.generate.generate import PromptRequest, generate
from trainer.generate.job import complete
from trainer.generate.ranks import alone
from trainer.generate.sampling import Sampling
from trainer.generate.session import Session
from trainer.generate.telling import open_text
from trainer.generate.weights import open_weights
from trainer.shared.run.command_lines import GenerateCommand
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.schema import DataConfig, ModelConfig

pytestmark = pytest.mark.slow

PROMPTS = [f"{'the quick brown fox '[: n % 17 + 1]}" for n in range(12)]
SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    (root / "a.txt").write_text("the quick brown fox jumps over the lazy dog; über größe\n" * 100)
    prepare(DataConfig(source=str(root / "a.txt"), path=str(root / "corpus"), vocab=300), False)
    model = resolve_model(ModelConfig(family="llama", **(SMALL | {"vocab": 300, "seq": 512})))  # type: ignore[arg-type]
    made = checkpoint(ours(model, seed=4), model, root / "c")
    shutil.copy(root / "corpus" / "tokenizer.json", made)
    return made


class Server:
    """A served model, in a process of its own."""

    def __init__(self, folder: Path, *words: str):
        command = ["-m", "trainer.generate.serve", folder, "--port", "0", "--dtype", "float64", *words]
        self.process = warm.Process(*command, stdout=warm.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline().rpartition(":")[2].partition("/")[0])

    def send(self, body: dict[str, Any], **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        return connection.getresponse()

    def ask_page(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request(method, path, json.dumps(body or {}))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def ask(self, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
        answer = self.send(body, **headers)
        return answer.status, json.loads(answer.read())

    def stream(self, body: dict[str, Any]) -> tuple[str, str, int]:
        """Text, how it ended, and the number of events."""
        answer = self.send(body | {"stream": True})
        events = [line[6:] for line in answer.read().decode().split("\n\n") if line]
        assert answer.getheader("Content-Type") == "text/event-stream" and events.pop() == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events]
        return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"], len(choices)

    def stats(self) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("GET", "/stats")
        return dict(json.loads(connection.getresponse().read()))

    def until(self, true: Callable[[dict[str, Any]], bool]) -> None:
        deadline = time.monotonic() + 300
        while not true(self.stats()):
            assert time.monotonic() < deadline, self.stats()
            time.sleep(0.05)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(300)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    made = Server(folder, "--batch", "4", "--queue", "28")
    yield made
    assert made.end() == 0


def by_itself(folder: Path, prompt: str, seed: int, tokens: int) -> str:
    words = open_text(None, folder, 300)
    request = PromptRequest(0, words.begun(prompt), tokens, Sampling(**SAMPLED, seed=seed), frozenset(words.ends))
    with alone(folder, "fp64") as (config, world):
        (made,) = generate(Session(config, world, open_weights(folder).load), [request])
    return str(words.tokenizer.decode(made.tokens))


def test_each_of_many_clients_gets_the_text_of_its_own_prompt_streamed_or_not(server: Server, folder: Path) -> None:
    bodies = [{"prompt": prompt, "max_tokens": 5 + n % 10, "seed": n, **SAMPLED} for n, prompt in enumerate(PROMPTS)]
    with ThreadPoolExecutor(len(bodies)) as clients:
        whole = list(clients.map(server.ask, bodies))
        streamed = list(clients.map(server.stream, bodies))
    for n, ((status, answer), (text, ended, events)) in enumerate(zip(whole, streamed)):
        assert status == 200 and (text, ended) == (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"])
        assert events > 1
        if n % 6 == 0:
            assert text == by_itself(folder, PROMPTS[n], n, 5 + n % 10)
    assert server.stats()["running"] == server.stats()["waiting"] == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(server: Server, stream: bool) -> None:
    before = server.stats()["dropped"]
    body = json.dumps({"prompt": "the", "max_tokens": 500, "ignore_eos": True, "stream": stream}).encode()
    gone = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(4)]
    for client in gone:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    server.until(lambda stats: stats["running"] == 4)
    for client in gone:
        client.close()
    server.until(lambda stats: stats["dropped"] == before + 4 and stats["running"] == 0)
    assert server.ask({"prompt": "fox", "max_tokens": 3})[0] == 200


def test_a_stop_text_ends_a_completion_and_is_no_part_of_it(server: Server) -> None:
    body = {"prompt": "the quick", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    text = server.ask(body)[1]["choices"][0]["text"]
    stop = text[8:11]
    assert server.stream(body | {"stop": stop})[:2] == (text[: text.index(stop)], "stop")


def test_a_stop_text_ends_a_completion_of_the_command_with_its_last_token(folder: Path) -> None:
    """Beside one that goes on: the row is dropped a turn later, and what it grew by until then is no part of the answer."""

    def completions(*stops: str) -> list[dict[str, Any]]:
        command = GenerateCommand(model=str(folder), prompts=["the quick", "fox"], tokens=20, stop=[*stops])
        with alone(folder, "fp64") as (config, world):
            return complete(command, command.prompts, config, world, None)

    whole, other = completions()
    stop = whole["text"][8:11]
    cut, beside = completions(stop)
    assert cut["ended"] == "stop" and cut["text"] == whole["text"][: whole["text"].index(stop)] and len(cut["tokens"]) < 20
    assert cut["tokens"] == whole["tokens"][: len(cut["tokens"])] and len(cut["log_probabilities"]) == len(cut["tokens"])
    tokenizer = open_text(None, folder, 300).tokenizer
    assert stop in tokenizer.decode(cut["tokens"]) and stop not in tokenizer.decode(cut["tokens"][:-1])
    assert stop in other["text"] or beside["tokens"] == other["tokens"]


def test_log_probabilities_are_those_of_the_tokens(server: Server) -> None:
    (choice,) = server.ask({"prompt": "the", "max_tokens": 4, "temperature": 0, "logprobs": 1})[1]["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["tokens"]) <= 4
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"]) and "".join(choice["logprobs"]["tokens"]) == choice["text"]


def test_streamed_pieces_have_the_log_probabilities_of_the_whole_answer(server: Server) -> None:
    body = {"prompt": "the", "max_tokens": 9, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    (whole,) = server.ask(body)[1]["choices"]
    events = server.send(body | {"stream": True}).read().decode().split("\n\n")
    pieces = [json.loads(event[6:])["choices"][0]["logprobs"] for event in events if event[6:7] == "{"]
    assert {name: [each for piece in pieces for each in piece[name]] for name in whole["logprobs"]} == whole["logprobs"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"prompt": "a" * 600, "max_tokens": 1}, 400, "more do not fit into model.seq=512; shorten it to 511 or fewer"),
        ({"prompt": ""}, 400, "prompt 0 is empty"),
        ({}, 400, "prompt=None is neither text nor tokens below 300"),
        ({"prompt": [[0, 300]]}, 400, "prompt=[0, 300] is neither text nor tokens below 300; give such, or a list of them"),
        ({"prompt": ["a", 1]}, 400, "prompt=1 is neither text"),
        ({"prompt": [0, True]}, 400, "prompt=[0, True] is neither text"),
        ({"prompt": []}, 400, "prompt 0 is empty"),
        ({"prompt": ["a", ""]}, 400, "prompt 1 is empty"),
        ({"prompt": ["a"] * 33}, 400, "prompt has 33 texts, and 32 may wait or run at once; give fewer"),
        ({"prompt": "a", "model": "gpt-4"}, 404, "model='gpt-4' is not served; this is 'c'"),
        ({"prompt": "a", "logprobs": 6}, 400, "logprobs=6 must be a whole number from 0 to 5"),
        ({"prompt": "a", "logprobs": True}, 400, "logprobs=True must be a whole number from 0 to 5"),
        ({"prompt": "a", "echo": 1}, 400, "echo=1 is not a truth value"),
        ({"prompt": "a", "presence_penalty": 0.5}, 400, "presence_penalty=0.5 is not served; leave it out"),
        ({"prompt": "a", "logit_bias": {"5": 1}}, 400, "logit_bias={'5': 1} is not served; leave it out"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature=-1"),
        ({"prompt": "a", "temperature": 10**400}, 400, "temperature is too large a number; give one below 1e308"),
        ({"prompt": "a", "n": 33}, 400, "n=33 must be a whole number from 1 to 32"),
        ({"prompt": "a", "n": 2, "best_of": 3}, 400, "best_of=3 is not served; leave it out"),
        ({"prompt": ["a", "b"], "n": 17}, 400, "prompt has 2 texts of 17 choices each, and 32 may wait or run at once; give fewer"),
        ({"prompt": "a", "messages": []}, 400, "messages=[] is not served; leave it out"),
        ({"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}}, 400, "include_usage=1 is not a truth value"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens=0 must be a whole number of 1 or more"),
        ({"prompt": "a", "max_tokens": True}, 400, "max_tokens=True must be a whole number of 1 or more"),
        ({"prompt": "\ud800"}, 400, "'\\ud800' is not UTF-8 text"),
        ({"prompt": "a", "stop": "\ud800"}, 400, "is not UTF-8 text"),
        ({"prompt": "a", "stream": "no"}, 400, "stream='no' is not a truth value"),
        ({"prompt": "a", "stream": True, "stream_options": 3}, 400, "stream_options=3 is not a JSON object"),
        ({"prompt": "a", "stop": ["x"] * 17}, 400, "stop has too much; give 16 texts at most, of 1000 characters at most"),
        ({"prompt": "a", "stop": "x" * 1001}, 400, "stop has too much; give 16 texts at most, of 1000 characters at most"),
        ({"prompt": "a", "task": 1}, 400, "task=1: the model was not tuned for several tasks; leave it out"),
        ({"prompt": "a", "task": ["x" * 500]}, 400, "the model was not tuned for several tasks; leave it out"),
    ],
)
def test_wrong_requests_are_one_line(server: Server, body: dict[str, Any], status: int, message: str) -> None:
    found, answer = server.ask(body)
    assert found == status and message in answer["error"]["message"] and "\n" not in answer["error"]["message"]


GREEDY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


def test_null_and_the_defaults_that_clients_send_ask_for_nothing(server: Server) -> None:
    plain = server.ask({"prompt": "the", **GREEDY})[1]["choices"]
    names = ("n", "top_p", "seed", "stop", "stream", "stream_options", "logprobs", "task", "model", "user", "suffix", "what_comes_next")
    sent = {"echo": False, "suffix": "", "frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "stop": [], "stream": False}
    for more in (dict.fromkeys(names), sent | {"n": 1, "best_of": 1, "top_p": 1, "logprobs": None, "user": "u", "model": "c"}):
        status, answer = server.ask({"prompt": "the", **GREEDY, **more})
        assert status == 200 and answer["choices"] == plain
    assert server.ask({"prompt": "the", "max_tokens": None, "temperature": None})[0] == 200


def test_several_prompts_in_texts_or_tokens_are_each_completed_as_alone(server: Server, folder: Path) -> None:
    prompts = ["the quick", "fox", "lazy dog"]
    alone = [server.ask({"prompt": prompt, **GREEDY})[1] for prompt in prompts]
    texts = [answer["choices"][0]["text"] for answer in alone]
    tokens = [open_text(None, folder, 300).plain(prompt) for prompt in prompts]
    for several in (prompts, tokens):
        status, answer = server.ask({"prompt": several, **GREEDY})
        assert status == 200 and [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(texts))
        assert answer["usage"] == {name: sum(one["usage"][name] for one in alone) for name in answer["usage"]}
    events = server.send({"prompt": prompts, "stream": True, **GREEDY}).read().decode().split("\n\n")
    pieces = [json.loads(event[6:])["choices"][0] for event in events if event[6:7] == "{"]
    assert ["".join(piece["text"] for piece in pieces if piece["index"] == index) for index in range(3)] == texts
    assert sorted(piece["index"] for piece in pieces if piece["finish_reason"]) == [0, 1, 2]
    assert server.ask({"prompt": tokens[1], **GREEDY})[1]["choices"][0]["text"] == texts[1]
    server.until(lambda stats: stats["running"] == stats["waiting"] == 0)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_of_the_likeliest_tokens_are_told_as_asked_for(server: Server, count: int) -> None:
    """Beside one that asks for none, and whichever token is chosen; greedily it is the likeliest."""
    body = {"prompt": "the", **GREEDY, "logprobs": count}
    with ThreadPoolExecutor(2) as clients:
        (_, answer), _ = clients.map(server.ask, [body, {"prompt": "fox", **GREEDY}])
    told = answer["choices"][0]["logprobs"]
    for word, share, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert len(top) <= max(1, count) and top[word] == max(top.values()) == pytest.approx(share)
    assert any(len(top) == max(1, count) for top in told["top_logprobs"]), "words of several tokens that are written alike are one"


@pytest.mark.parametrize(
    ("length", "body", "status"),
    [
        *((b"20000", b"[" * 20000, b"400"), (b"2", b"\xff\xff", b"400"), (b"\xb2", b"{}", b"400"), (b"-2", b"{}", b"400")),
        *(
            (b"9" * 6000, b"{}", b"413"),
            (b"0" * 20 + b"9" * 9, b"{}", b"413"),
            (b"1048577", b"{}", b"413"),
            (b"0" * 6000 + b"2", b"[]", b"400"),
        ),
    ],
)
def test_bodies_that_are_none_are_refused_in_words(server: Server, length: bytes, body: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: " + length + b"\r\n\r\n" + body)
        assert client.recv(12) == b"HTTP/1.1 " + status


def test_a_full_queue_refuses_and_sigterm_finishes_what_runs_and_takes_nothing_new(folder: Path) -> None:
    server = Server(folder, "--batch", "1", "--queue", "2")
    body = {"prompt": "the", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    answers: list[tuple[int, dict[str, Any]]] = []
    threads = [threading.Thread(target=lambda: answers.append(server.ask(body))) for _ in range(3)]
    for thread in threads:
        thread.start()
    server.until(lambda stats: stats["running"] + stats["waiting"] == 3)
    status, answer = server.ask(body)
    said = {"message": "3 requests wait or run already; ask again later", "type": "requests", "param": None, "code": "rate_limit_exceeded"}
    assert status == 429 and answer == {"error": said}
    server.process.send_signal(signal.SIGTERM)
    late = []
    with pytest.raises(OSError):  # refused in whole answers as long as it is there
        while True:
            late.append(server.ask(body)[0])
    for thread in threads:
        thread.join()
    assert server.process.wait(300) == 0 and late and set(late) <= {429, 503}
    assert [(status, answer["usage"]["completion_tokens"]) for status, answer in answers] == [(200, 120)] * 3


def test_a_short_answer_is_sent_at_once_so_that_no_client_gets_half_of_one_from_a_server_that_ends(server: Server) -> None:
    for _ in range(200):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert client.recv(1 << 16).endswith(b'\r\n\r\n{"status": "ok"}')


def test_a_token_is_asked_for_and_an_open_address_needs_one(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    server = Server(folder, "--host", "127.0.0.1", "--token-file", str(tmp_path / "token"))
    assert server.ask({"prompt": "a"})[0] == server.ask({"prompt": "a"}, Authorization="Bearer sesame")[0] == 401
    assert server.ask({"prompt": "a", "max_tokens": 1}, Authorization="Bearer secret")[0] == 200
    assert server.end() == 0


def test_an_address_that_cannot_be_had_is_one_line(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words, message in (
            (["--port", port], "Address already in use; choose another port"),
            (["--host", "0.0.0.0"], "give --token-file"),
        ):
            done = warm.run("-m", "trainer.generate.serve", folder, *words)
            assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
