"""The two forms of OpenAI's interface, completions and chat: the fields of their requests, and the form of their answers.

Every field is read, or has the value that asks for nothing (clients send defaults), or is refused by name.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from trainer.data.text import TextTokens
from trainer.generate.chat import ChatTemplate
from trainer.generate.generate import Completion, PromptRequest, check_prompts, check_texts
from trainer.generate.session import check_task
from trainer.generate.spelling import TokenSpelling
from trainer.generate.telling import TextStream
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict
from trainer.shared.run.stages import Sampling

MOST_STOPS, LONGEST_STOP = 16, 1000
"""Limits on stop texts and on their characters: they are searched for at every token, while all clients wait."""
SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "seed")
READ = (*SAMPLING, "model", "n", "max_tokens", "stop", "stream", "stream_options", "logprobs", "ignore_eos", "task")
NOTES = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Fields that do not concern the answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {"frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},)}
"""Unsupported fields, with the values that ask for nothing. Null is one of them, too."""


LONGEST_ANSWER = 1024
"""Tokens of an answer that neither its request nor the model limits."""


@dataclass(frozen=True)
class ServedModel:
    """The model that is served: its tokens, the length of its longest text, the number of tasks that it was tuned for."""

    name: str
    words: TextTokens
    seq: int
    tasks: int = 1
    template: ChatTemplate | None = None
    written: int | None = None  # tokens of the longest answer, where prompts are read by an encoder
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def spelling(self) -> TokenSpelling:
        return TokenSpelling(self.words.tokenizer)

    def begun(self, text: str) -> list[int]:
        check_texts([text])
        return self.words.begun(text)

    def room(self, prompt: Sequence[int]) -> int:
        """Returns the most tokens that an answer may have, 1 at least."""
        return max(1, self.seq - len(prompt)) if self.written is None else min(self.written, LONGEST_ANSWER)


class TokenScore(NamedTuple):
    """A token of a text, its log-probability (None: nothing precedes it), those of the likeliest tokens, and the characters before it."""

    token: int
    log_probability: float | None
    likeliest: Mapping[int, float]
    offset: int


@dataclass(frozen=True)
class ApiRequest:
    """A request that was read: ``requests`` are the choices of its answer in their order, ``choices`` of each prompt."""

    requests: list[PromptRequest]
    choices: int
    stops: list[str]
    echo: bool
    scores: bool  # the answer has log-probabilities
    stream: bool
    usage: bool  # a streamed answer ends with its usage

    def stream_of(self, request: PromptRequest, words: TextTokens) -> TextStream:
        return TextStream(words.tokenizer, self.stops, words.before(request.prompt), self.echo)

    def scored(self, made: Completion, telling: TextStream, first: int, end: int) -> list[TokenScore]:
        """Returns the tokens of a text from ``first`` to ``end``; an echoed prompt's precede those that were made."""
        before = [(made.prompt[0], None, {}), *((token, *told) for token, told in zip(made.prompt[1:], made.read))] if self.echo else []
        tokens = [*before, *zip(made.tokens, made.log_probabilities, made.likeliest)][first:end]
        return [TokenScore(*told, offset) for told, offset in zip(tokens, telling.offsets[first:end])]

    def counts(self, made: Sequence[tuple[int, int]]) -> dict[str, int]:
        """Returns the usage of an answer from the tokens of each choice's prompt and text; a prompt of several choices counts once."""
        read, written = sum(prompt for prompt, _ in made[:: self.choices]), sum(text for _, text in made)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class ApiForm(ABC):
    """A page of the interface. ``fields`` are read, ``neutral`` are those refused but for the values that ask for nothing."""

    path: str
    prefix: str
    kind: str  # of an answer, and of a piece of one
    piece: str
    fields: tuple[str, ...]
    neutral: Mapping[str, tuple[Any, ...]]

    @abstractmethod
    def prompts(self, body: Mapping[str, Any], model: ServedModel, room: int) -> list[list[int]]:
        """Returns the tokens of each prompt. ``ConfigError`` if there are none."""

    @abstractmethod
    def length(self, body: Mapping[str, Any]) -> int | None:
        """Returns the most tokens to make; None for all that fit."""

    @abstractmethod
    def likeliest(self, body: Mapping[str, Any]) -> int | None:
        """Returns the number of likeliest tokens to report at each place; None for no log-probabilities at all."""

    @abstractmethod
    def choice(self, text: str, scores: Sequence[TokenScore] | None, spelling: TokenSpelling, streamed: bool) -> dict[str, Any]:
        """Returns a choice of an answer, or a piece of one, without its index and its end."""

    def opening(self) -> dict[str, Any] | None:
        """Returns the piece that precedes a choice's text; None for none."""
        return None

    def read(self, body: Mapping[str, Any], model: ServedModel, room: int) -> ApiRequest:
        """Reads a request of at most ``room`` choices. ``ConfigError`` names the field that is wrong."""
        body = {name: value for name, value in body.items() if value is not None}
        choices = _whole(body, "n", 1, 1, room)
        for name, value in body.items():
            allowed = (*self.neutral.get(name, ()), *([choices] if name == "best_of" else []))  # no choice is left out
            if name not in (*READ, *NOTES, *self.fields) and value not in allowed:
                raise ConfigError(f"{name}={_short(value)} is not served; leave it out")
        options = _of_kind(body, "stream_options", dict, {})
        prompts, likeliest, stops = self.prompts(body, model, room), self.likeliest(body), _stops(body)
        if len(prompts) * choices > room:
            raise ConfigError(f"prompt has {len(prompts)} texts of {choices} choices each, and {room} may wait or run at once; give fewer")
        echo, most = _of_kind(body, "echo", bool, False), self.length(body)
        if echo and model.written is not None:
            raise ConfigError(
                "echo=True is not served for a model with an encoder, whose answer does not continue the prompt; leave it out"
            )
        tokens = [model.room(prompt) if most is None else most for prompt in prompts]
        if (task := body.get("task")) is not None:
            check_task(task, model.tasks, "task")
        given = {name: body[name] for name in SAMPLING if name in body}
        sampling = from_dict(Sampling, {"temperature": 1.0, "seed": secrets.randbits(32)} | given)
        check_prompts(prompts, tokens, model.seq, model.written)
        ends = frozenset[int](() if _of_kind(body, "ignore_eos", bool, False) else model.words.ends)
        told, scored = min(likeliest or 0, model.words.vocab), echo and likeliest is not None
        requests = [
            PromptRequest(at * choices + copy, prompt, length, sampling, ends, task=task, likeliest=told, scored=scored)
            for at, (prompt, length) in enumerate(zip(prompts, tokens))
            for copy in range(choices)
        ]
        usage = _of_kind(options, "include_usage", bool, False)
        return ApiRequest(requests, choices, stops, echo, likeliest is not None, _of_kind(body, "stream", bool, False), usage)

    def answer(self, number: int, model: str, choices: Sequence[Mapping[str, Any]], streamed: bool, **more: Any) -> dict[str, Any]:
        """Returns the document of an answer, or of a piece of one."""
        head = {"id": f"{self.prefix}-{number}", "object": self.piece if streamed else self.kind, "created": int(time.time())}
        return head | {"model": model, "choices": choices} | more


class CompletionForm(ApiForm):
    path, prefix, kind, piece = "/v1/completions", "cmpl", "text_completion", "text_completion"
    fields = ("prompt", "echo")
    neutral = NEUTRAL | {"suffix": ("",)}
    most_likeliest = 5

    def prompts(self, body: Mapping[str, Any], model: ServedModel, room: int) -> list[list[int]]:
        given: Any = body.get("prompt")
        several = isinstance(given, list) and any(isinstance(one, (str, list)) for one in given)
        prompts: list[Any] = given if several else [given]
        if len(prompts) > room:
            raise ConfigError(f"prompt has {len(prompts)} texts, and {room} may wait or run at once; give fewer")
        return [self._tokens(one, model) for one in prompts]

    def _tokens(self, prompt: Any, model: ServedModel) -> list[int]:
        vocab = model.words.vocab
        if isinstance(prompt, str):
            return model.begun(prompt)
        if isinstance(prompt, list) and all(_is_whole(token) and 0 <= token < vocab for token in prompt):
            return prompt
        raise ConfigError(f"prompt={_short(prompt)} is neither text nor tokens below {vocab}; give such, or a list of them")

    def length(self, body: Mapping[str, Any]) -> int | None:
        return _whole(body, "max_tokens", 16, 0 if body.get("echo") is True else 1)  # 0: the prompt is scored alone

    def likeliest(self, body: Mapping[str, Any]) -> int | None:
        return None if body.get("logprobs", False) is False else _whole(body, "logprobs", 0, 0, self.most_likeliest)

    def choice(self, text: str, scores: Sequence[TokenScore] | None, spelling: TokenSpelling, streamed: bool) -> dict[str, Any]:
        told = None
        if scores is not None:
            words = [spelling.word(score.token) for score in scores]
            told = {"tokens": words, "token_ids": [score.token for score in scores], "token_logprobs": [s.log_probability for s in scores]}
            told |= {"top_logprobs": [self._top(score, spelling) for score in scores], "text_offset": [score.offset for score in scores]}
        return {"text": text, "logprobs": told}

    def _top(self, score: TokenScore, spelling: TokenSpelling) -> dict[str, float] | None:
        """Returns log-probabilities by word, the token's own among them: of words that are spelt alike, the likelier one's."""
        if score.log_probability is None:
            return None
        ordered = sorted(score.likeliest.items(), key=lambda one: one[1])
        return {spelling.word(token): share for token, share in ordered} | {spelling.word(score.token): score.log_probability}


class ChatForm(ApiForm):
    path, prefix, kind, piece = "/v1/chat/completions", "chatcmpl", "chat.completion", "chat.completion.chunk"
    fields = ("messages", "max_completion_tokens", "top_logprobs")
    neutral = NEUTRAL | {
        "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
        "parallel_tool_calls": (True, False), "response_format": ({"type": "text"},), "modalities": (["text"],), "store": (False,),
        "service_tier": ("auto", "default"), "verbosity": ("medium",),
    }  # fmt: skip
    most_likeliest = 20

    def prompts(self, body: Mapping[str, Any], model: ServedModel, room: int) -> list[list[int]]:
        if model.template is None:
            raise ConfigError(
                f"{model.name} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json, next to its weights "
                f"or its tokenizer); put its own there, or ask {CompletionForm.path}"
            )
        given = body.get("messages")
        if not isinstance(given, list) or not given:
            raise ConfigError(f"messages={_short(given)} must be a list of one message or more")
        text = model.template.text([_message(one, f"messages[{at}]") for at, one in enumerate(given)])
        check_texts([text])
        return [model.words.plain(text)]  # the template writes the beginning of a text itself

    def length(self, body: Mapping[str, Any]) -> int | None:
        name = next((name for name in ("max_completion_tokens", "max_tokens") if name in body), None)
        return None if name is None else _whole(body, name, 1, 1)

    def likeliest(self, body: Mapping[str, Any]) -> int | None:
        count = _whole(body, "top_logprobs", 0, 0, self.most_likeliest)
        if not _of_kind(body, "logprobs", bool, False):
            if count:
                raise ConfigError(f"top_logprobs={count} needs logprobs=true; set it, or leave out top_logprobs")
            return None
        return count

    def choice(self, text: str, scores: Sequence[TokenScore] | None, spelling: TokenSpelling, streamed: bool) -> dict[str, Any]:
        told = None
        if scores is not None:
            told = {"content": [_scored(score, spelling) for score in scores], "refusal": None}
        message = ({"content": text} if text else {}) if streamed else {"role": "assistant", "content": text, "refusal": None}
        return {"delta" if streamed else "message": message, "logprobs": told}

    def opening(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}


FORMS: tuple[ApiForm, ...] = (CompletionForm(), ChatForm())


def _scored(score: TokenScore, spelling: TokenSpelling) -> dict[str, Any]:
    """Returns a token of an answer in the form of chat, with the likeliest ones."""

    def one(token: int, share: float | None) -> dict[str, Any]:
        return {"token": spelling.word(token), "logprob": share, "bytes": spelling.bytes(token)}

    return one(score.token, score.log_probability) | {"top_logprobs": [one(*other) for other in score.likeliest.items()]}


def _message(given: Any, name: str) -> dict[str, Any]:
    """Returns a message for the template: its content as one text. Clients send an answer back with fields that are null."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise ConfigError(f"{name}={_short(given)} must be a JSON object with a role and a content")
    content = given.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
        content = None if None in parts or not all(isinstance(part, str) for part in parts) else "".join(map(str, parts))
    if not isinstance(content, str):
        raise ConfigError(f"{name}.content={_short(given.get('content'))} must be text, or a list of parts of type text")
    return {key: value for key, value in given.items() if value is not None} | {"content": content}


def _stops(body: Mapping[str, Any]) -> list[str]:
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ConfigError(f"stop={_short(stops)} must be a text, or a list of texts")
    if len(stops) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in stops):
        raise ConfigError(f"stop has too much; give {MOST_STOPS} texts at most, of {LONGEST_STOP} characters at most")
    check_texts(stops)
    return stops


KINDS = {bool: "a truth value", dict: "a JSON object"}


def _of_kind(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    if not isinstance(value := body.get(name, default), kind):
        raise ConfigError(f"{name}={_short(value)} is not {KINDS[kind]}")
    return value


def _whole(body: Mapping[str, Any], name: str, default: int, least: int, most: int | None = None) -> int:
    """Returns the whole number under ``name``. ``ConfigError`` unless it is one, from ``least`` to ``most``."""
    value = body.get(name, default)
    if not _is_whole(value) or value < least or (most is not None and value > most):
        allowed = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name}={_short(value)} must be a whole number {allowed}")
    return int(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: Any) -> str:
    return repr(value)[:60]
