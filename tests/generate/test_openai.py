"""The official client against a served model: its calls pass, and say the same streamed, whole, alone and beside 64 others."""

from __future__ import annotations

import importlib
import json
import math
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.generate.test_serve import Server, folder
from trainer.generate.api import ChatForm, CompletionForm, ServedModel
from trainer.generate.chat import ChatTemplate
from trainer.generate.telling import HALF, open_text
from trainer.shared.run.errors import ConfigError

pytestmark = pytest.mark.slow
__all__ = ["folder"]  # a fixture

TEMPLATE = """{{ bos_token }}{% for message in messages %}
{% if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('no ' + message.role) }}{% endif %}
{{ message.role }}: {{ message.content | trim }}
{% endfor %}
{% if add_generation_prompt %}fox{% endif %}"""
ASK = {"role": "user", "content": "the quick "}
MORE = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def chatting(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = shutil.copytree(folder, tmp_path_factory.mktemp("chatting") / "m")
    (special,) = open_text(None, made, 300).tokenizer.get_added_tokens_decoder().values()
    (made / "tokenizer_config.json").write_text(json.dumps({"bos_token": special.content, "chat_template": TEMPLATE}))
    return made


@pytest.fixture(scope="module")
def server(chatting: Path) -> Iterator[Server]:
    made = Server(chatting, "--batch", "16", "--queue", "80")
    yield made
    assert made.end() == 0


@pytest.fixture(scope="module")
def openai() -> Any:
    return pytest.importorskip("openai", reason="the official client is not tried: pip install -e '.[test]'")


@pytest.fixture(scope="module")
def client(server: Server, openai: Any) -> Any:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as made:
        yield made


def text_of(chunks: Any) -> str:
    """The text of a stream's first choice, in either form."""
    found = ""
    for chunk in chunks:
        for choice in chunk.choices[:1]:
            found += (choice.delta.content if chunk.object.startswith("chat") else choice.text) or ""
    return found


def test_models_are_listed_and_found_by_name(client: Any, openai: Any) -> None:
    (only,) = client.models.list()
    assert only.id == client.models.retrieve("m").id == "m" and only.object == "model" and only.created > 1e9
    with pytest.raises(openai.NotFoundError, match="model='gpt-4' is not served; this is 'm'") as refused:
        client.models.retrieve("gpt-4")
    assert refused.value.code == "model_not_found"


def test_a_chat_is_the_completion_of_its_template(client: Any, server: Server, chatting: Path) -> None:
    messages = [{"role": "system", "content": "be lazy"}, {"role": "user", "content": [{"type": "text", "text": " the quick\n"}]}]
    words = open_text(None, chatting, 300)
    (special,) = words.tokenizer.get_added_tokens_decoder()
    prompt = [special, *words.plain("system: be lazy\nuser: the quick\nfox")]
    answer = client.chat.completions.create(model="m", messages=messages, max_completion_tokens=8, **MORE)
    plain = client.completions.create(model="m", prompt=prompt, max_tokens=8, **MORE)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == plain.choices[0].text != ""
    assert choice.finish_reason == "length" and answer.usage == plain.usage and answer.usage.prompt_tokens == len(prompt)
    again = [*messages, choice.message, ASK]  # an answer as the client has it: with fields that are null
    assert client.chat.completions.create(model="m", messages=again, max_tokens=1).usage.prompt_tokens > len(prompt)
    chunks = [
        *client.chat.completions.create(
            model="m", messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True}, **MORE
        )
    ]
    assert text_of(chunks) == choice.message.content and chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.usage for chunk in chunks] == [None] * (len(chunks) - 1) + [answer.usage] and chunks[-1].choices == []
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]


def test_a_chat_without_a_limit_ends_where_the_model_does_at_the_latest(client: Any) -> None:
    long = {"role": "user", "content": "the quick brown fox jumps over the lazy dog; " * 28}
    answer = client.chat.completions.create(model="m", messages=[long], **MORE)
    assert answer.usage.total_tokens == 512 and answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [True, False])
def test_log_probabilities_of_a_chat_are_those_of_the_tokens_of_its_text(client: Any, stream: bool) -> None:
    asked = {"model": "m", "messages": [ASK], "max_tokens": 9, "logprobs": True, "top_logprobs": 20, **MORE}
    answer = client.chat.completions.create(**asked, stream=stream)
    chunks = [*answer] if stream else [answer]
    told = [token for chunk in chunks for choice in chunk.choices if choice.logprobs for token in choice.logprobs.content]
    text = text_of(chunks) if stream else answer.choices[0].message.content
    assert bytes(byte for token in told for byte in token.bytes).decode(errors="replace") == text and len(told) == 9
    for token in told:
        assert len(token.top_logprobs) == 20 and token.logprob == token.top_logprobs[0].logprob == max(
            top.logprob for top in token.top_logprobs
        )
        assert sum(math.exp(top.logprob) for top in token.top_logprobs) <= 1


def test_offsets_are_where_the_tokens_of_a_text_begin_and_a_cut_text_has_no_more_of_them(client: Any) -> None:
    asked = {"model": "m", "prompt": "the quick", "max_tokens": 30, "logprobs": 2, **MORE}
    (whole,) = client.completions.create(**asked).choices
    told = whole.logprobs
    for word, start, end in zip(told.tokens, told.text_offset, [*told.text_offset[1:], len(whole.text)], strict=True):
        assert whole.text[start:end].endswith(word) or HALF in word  # parts of a character wait for the last of them
    stop = whole.text[9:12]
    (cut,) = client.completions.create(**asked, stop=[stop]).choices
    pieces = [chunk.choices[0] for chunk in client.completions.create(**asked, stop=[stop], stream=True)]
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish_reason == "stop"
    assert cut.logprobs.text_offset == [offset for offset in told.text_offset if offset < len(cut.text)]
    assert [token for piece in pieces for token in piece.logprobs.tokens] == cut.logprobs.tokens
    assert "".join(piece.text for piece in pieces) == cut.text


def test_an_echoed_prompt_has_the_scores_that_its_tokens_had_when_they_were_made(client: Any, chatting: Path) -> None:
    """One path reads the prompt at once, the other made its tokens one by one; beside prompts of other lengths."""
    start = open_text(None, chatting, 300).plain("the quick")
    (made,) = client.completions.create(model="m", prompt=start, max_tokens=6, logprobs=3, **MORE).choices
    ids = made.logprobs.model_extra["token_ids"]
    for most in (0, 2):
        answer = client.completions.create(model="m", prompt=[start + ids, start], max_tokens=most, logprobs=3, echo=True, **MORE)
        echoed, other = answer.choices
        assert echoed.text[: len("the quick" + made.text)] == "the quick" + made.text and other.text.startswith("the quick")
        told = echoed.logprobs
        assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
        assert told.token_logprobs[len(start) : len(start) + 6] == pytest.approx(made.logprobs.token_logprobs, abs=1e-9)
        assert [*told.top_logprobs[len(start)]] == [*made.logprobs.top_logprobs[0]]
        assert told.text_offset[len(start)] == len("the quick") and len(told.tokens) == len(start) + 6 + most
        assert answer.usage.completion_tokens == 2 * most
    streamed = text_of(client.completions.create(model="m", prompt="the quick", max_tokens=6, echo=True, stream=True, **MORE))
    assert streamed == "the quick" + made.text
    (cut,) = client.completions.create(model="m", prompt="the quick", max_tokens=6, echo=True, stop="quick", **MORE).choices
    assert cut.text == streamed, "a stop text is looked for in the completion"


def test_several_choices_of_several_prompts_are_drawn_apart_and_each_again_by_its_seed(client: Any) -> None:
    asked = {
        "model": "m",
        "prompt": ["the", "fox"],
        "n": 3,
        "max_tokens": 8,
        "temperature": 1.0,
        "seed": 5,
        "extra_body": {"ignore_eos": True},
    }
    answer = client.completions.create(**asked)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == list(range(6)) and len(set(texts)) == 6
    assert [choice.text for choice in client.completions.create(**asked).choices] == texts
    assert answer.usage.completion_tokens == 48 and answer.usage.prompt_tokens == sum(
        client.completions.create(model="m", prompt=prompt, max_tokens=1).usage.prompt_tokens for prompt in ("the", "fox")
    )
    chat = client.chat.completions.create(model="m", messages=[ASK], n=3, max_tokens=8, seed=5, extra_body={"ignore_eos": True})
    assert len({choice.message.content for choice in chat.choices}) == 3


def test_64_clients_at_once_get_what_each_gets_alone(server: Server, openai: Any) -> None:
    """Each has its own connections, half of them stream, half of them chat."""

    def ask(number: int) -> str:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
            asked = {"model": "m", "max_tokens": 6, "seed": number, "stream": number % 2 == 1, "extra_body": {"ignore_eos": True}}
            text = "the quick brown fox jumps"[: 3 + number // 3]
            if number % 4 < 2:
                answer = client.chat.completions.create(messages=[{"role": "user", "content": text}], **asked)
            else:
                answer = client.completions.create(prompt=text, **asked)
            if asked["stream"]:
                return text_of(answer)
            return str(answer.choices[0].message.content if number % 4 < 2 else answer.choices[0].text)

    with ThreadPoolExecutor(64) as clients:
        together = [*clients.map(ask, range(64))]
    assert all(together) and len(set(together)) > 32
    assert together[::7] == [ask(number) for number in range(0, 64, 7)]
    server.until(lambda stats: stats["running"] == stats["waiting"] == 0)


@pytest.mark.parametrize(
    ("asked", "error", "message", "param"),
    [
        ({"messages": []}, "BadRequestError", "messages=[] must be a list of one message or more", "messages"),
        ({"messages": [{"content": "a"}]}, "BadRequestError", "messages[0]={'content': 'a'} must be a JSON object with a role", "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "BadRequestError", "messages[0].content=None must be text", "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "BadRequestError",
            "must be text, or a list of parts of type text",
            "messages",
        ),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            "BadRequestError",
            "messages do not fit the chat template of the model: no tool",
            None,
        ),
        ({"messages": [ASK], "tools": [{"type": "function"}]}, "BadRequestError", "is not served; leave it out", "tools"),
        ({"messages": [ASK], "top_logprobs": 2}, "BadRequestError", "top_logprobs=2 needs logprobs=true", "top_logprobs"),
        (
            {"messages": [ASK], "logprobs": True, "top_logprobs": 21},
            "BadRequestError",
            "top_logprobs=21 must be a whole number from 0 to 20",
            "top_logprobs",
        ),
        ({"messages": [ASK], "max_tokens": 0}, "BadRequestError", "max_tokens=0 must be a whole number of 1 or more", "max_tokens"),
        ({"messages": [{"role": "user", "content": "fox " * 600}]}, "BadRequestError", "more do not fit into model.seq=512", None),
        ({"messages": [ASK], "model": "gpt-4"}, "NotFoundError", "model='gpt-4' is not served; this is 'm'", "model"),
    ],
)
def test_wrong_chats_are_the_clients_own_errors_with_the_field(
    client: Any, openai: Any, asked: dict[str, Any], error: str, message: str, param: str | None
) -> None:
    with pytest.raises(getattr(openai, error)) as refused:
        client.chat.completions.create(**{"model": "m", **asked})
    said = refused.value.body
    assert message in said["message"] and "\n" not in said["message"] and (said["type"], said["param"]) == ("invalid_request_error", param)


def test_defaults_of_the_interface_ask_for_nothing_in_a_chat(client: Any) -> None:
    asked = {"model": "m", "messages": [ASK], "max_tokens": 5, **MORE}
    sent = {
        "n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": None, "logprobs": False, "top_logprobs": None, "stop": None,
        "response_format": {"type": "text"}, "tools": None, "tool_choice": "none", "parallel_tool_calls": True, "user": "u", "metadata": {"a": "b"},
        "store": False, "service_tier": "auto", "stream": False, "top_p": 1, "modalities": ["text"],
    }  # fmt: skip
    assert client.chat.completions.create(**asked, **sent).choices == client.chat.completions.create(**asked).choices


def test_pages_and_methods_that_are_none_are_refused_in_the_same_form(server: Server) -> None:
    for method, path, status, message in (
        ("GET", "/v1/chat/completions", 405, "/v1/chat/completions is for POST; use that"),
        ("POST", "/v1/models", 405, "/v1/models is for GET; use that"),
        ("GET", "/v2", 404, "no such page; there are /v1/models"),
        ("DELETE", "/v1/models", 501, "Unsupported method ('DELETE')"),
    ):
        found, answer = server.ask_page(method, path)
        assert (found, answer["error"]["param"]) == (status, None) and answer["error"]["message"].startswith(message)
    assert server.ask_page("GET", "/v1/models?limit=1")[0] == 200


def test_a_model_without_a_template_says_so_and_still_completes(folder: Path) -> None:
    model = ServedModel("c", open_text(None, folder, 300), 512)
    with pytest.raises(ConfigError, match=r"c has no chat template \(chat_template.jinja, or .* or ask /v1/completions"):
        ChatForm().read({"messages": [ASK]}, model, 8)
    assert len(CompletionForm().read({"prompt": "the", "n": 2}, model, 8).requests) == 2


CHATS = [[ASK], [{"role": "system", "content": "ünï <b>"}, ASK, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]]


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        "{% for m in messages %}\n    {% if loop.first %}{% continue %}{% endif %}\n{{ m | tojson }}\n{% endfor %}",
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ tools is none }}{{ eos_token }}",
        "{{ strftime_now('%Y') }}{{ messages[-1].content.strip() }}{{ messages | tojson(indent=2) }}",
    ],
)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.xdist_group("huggingface")
def test_a_template_makes_the_text_that_transformers_makes_of_it(template: str, chat: list[dict[str, str]]) -> None:
    utils = importlib.import_module("transformers.utils.chat_template_utils")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (expected,), _ = utils.render_jinja_template([chat], chat_template=template, add_generation_prompt=True, **special)
    assert ChatTemplate(template, special).text(chat) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages.append(1) }}", "messages do not fit the chat template of the model: access to attribute 'append'"),
        ("{{ ''.__class__.__mro__ }}", "is unsafe"),
        ("{{ 1 / 0 }}", "messages do not fit the chat template of the model: division by zero"),
        ("{% for %}", "the chat template of the model cannot be read: Expected an expression"),
    ],
)
def test_a_template_can_neither_reach_out_nor_break_the_server(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")) as refused:
        ChatTemplate(template, {}).text([ASK])
    assert "\n" not in str(refused.value)
