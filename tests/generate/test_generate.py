"""Generated text is what the whole network says token by token, and what transformers says of the exported folder; and it depends on
neither the batch nor on what else is asked."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.config.hardware import shipped_hardware
from launcher.config.trainers import engine
from launcher.cost.inference import SERVING_DTYPE, InferenceCase
from launcher.cost.inputs.device import Device
from launcher.cost.inputs.shape import Shape
from tests.convert.test_logits import MODELS, checkpoint, ours
from tests.huggingface import MARKS, transformers
from trainer.convert import export_weights
from trainer.generate.cache import COLUMNS
from trainer.generate.generate import Completion, Decoder, PromptRequest, RequestUpdate, check_prompts, generate
from trainer.generate.ranks import alone
from trainer.generate.sampling import Sampling, choose, uniform
from trainer.generate.session import Session
from trainer.generate.weights import open_weights
from trainer.models.transformer import Transformer
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError

pytestmark = MARKS

PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8], [60, 0, 60]]
COMPARED = ("gpt", "llama grouped tied", "deepseek_v3")
"""Of the others the gate compares whole forwards: with transformers in tests/convert, and with text here."""
SAMPLED = Sampling(temperature=0.9, top_k=30, top_p=0.9, repetition_penalty=1.2, seed=11)


def network(name: str) -> Transformer:
    return ours(resolve_model(MODELS[name]), seed=4).double()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    models = {name: resolve_model(model) for name, model in MODELS.items()}
    return {name: checkpoint(ours(model, seed=4), model, root / name) for name, model in models.items()}


def completed(
    folder: Path, prompts: list[list[int]], sampling: Sampling, tokens: int = 6, stop: int | None = None,
    slots: int = 64, precision: str = "fp64", numbers: list[int] | None = None,
) -> list[Completion]:  # fmt: skip
    ends = frozenset() if stop is None else frozenset([stop])
    requests = [PromptRequest(n, prompt, tokens, sampling, ends, n) for n, prompt in zip(numbers or range(len(prompts)), prompts)]
    with alone(folder, precision) as (config, world):
        return generate(Session(config, world, open_weights(folder).load), requests, slots)


def by_whole_forwards(name: str, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
    plain, text, likelihood = network(name), list(prompt), []
    for _ in range(tokens):
        with torch.no_grad():
            shares = plain(torch.tensor(text)[:, None])[-1, 0].log_softmax(-1)
        text.append(int(shares.argmax()))
        likelihood.append(float(shares.max()))
    return text[len(prompt) :], likelihood


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_that_of_the_whole_forward_token_by_token(name: str, checkpoints: dict[str, Path]) -> None:
    for prompt, made in zip(PROMPTS, completed(checkpoints[name], PROMPTS, Sampling())):
        tokens, likelihood = by_whole_forwards(name, prompt, 6)
        assert made.tokens == tokens
        assert made.log_probabilities == pytest.approx(likelihood, abs=1e-9)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in COMPARED else pytest.mark.campaign("generate")) for name in MODELS]
)
def test_greedy_text_and_log_probabilities_are_those_of_transformers_on_the_exported_folder(
    name: str, tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    root = checkpoints[name]
    export_weights(root, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    for source in (root, tmp_path / "hf"):
        for prompt, made in zip(PROMPTS, completed(source, PROMPTS, Sampling(), precision="fp32")):
            ids = torch.tensor([prompt])
            answer = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
            assert made.text == answer.sequences[0].tolist()
            shares = [float(row[0].log_softmax(-1).max()) for row in answer.logits]
            assert made.log_probabilities == pytest.approx(shares, abs=1e-5)


@pytest.mark.parametrize("name", ["llama grouped tied", "deepseek_v3"])
def test_a_cache_has_the_bytes_that_the_cost_model_gives_it(name: str, checkpoints: dict[str, Path]) -> None:
    """Of latents: rank + rotary numbers of a token and block, once."""
    with alone(checkpoints[name], "fp32") as (config, world):
        session = Session(config, world, open_weights(checkpoints[name]).load)
        memory = session.begin([0, 2])
        session.read(memory, [[0, 1, 2, 3], [0, 0, 4, 5]])
    layouts = np.array([(1, 1, 1, 2)], SERVING_DTYPE)
    asked = InferenceCase(
        Shape.of(config.model), layouts, 4, 2, Device.of(shipped_hardware()["cpu"], 1), engine("trireme"), "fp32", kv="fp32"
    )
    assert memory.nbytes == 2 * COLUMNS * config.model.layers * int(asked.kv_per_token[0])


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["gpt", "llama grouped tied", "bloom odd heads"])
def test_rows_are_completed_as_each_alone_whoever_joins_and_leaves_meanwhile(
    name: str, sampling: Sampling, checkpoints: dict[str, Path]
) -> None:
    alone = [
        completed(checkpoints[name], [prompt], sampling, stop=3, numbers=[number])[0] for number, prompt in enumerate(PROMPTS)
    ]  # the number of a prompt decides what is drawn for it
    for slots in (64, 2, 3):
        for one, made in zip(alone, completed(checkpoints[name], PROMPTS, sampling, stop=3, slots=slots)):
            assert (made.tokens, made.ended) == (one.tokens, one.ended)
            assert made.log_probabilities == pytest.approx(one.log_probabilities, abs=1e-9)


@pytest.mark.parametrize(("turn", "exchanges"), [(0, 1), (3, 2)])
def test_ranks_exchange_news_only_in_turns_that_have_some(turn: int, exchanges: int, checkpoints: dict[str, Path]) -> None:
    """One request at once; another one, and that it is the last, in a later turn."""
    told, made = [], []
    requests = [PromptRequest(number, prompt, 6, name=number) for number, prompt in enumerate(PROMPTS[:2])]
    heard = (
        [RequestUpdate(requests[:1]), *[RequestUpdate()] * (turn - 1), RequestUpdate(requests[1:], over=True)]
        if turn
        else [RequestUpdate(requests, over=True)]
    )
    news = iter(heard)
    with alone(checkpoints["gpt"], "fp64") as (config, world):
        gather = world.group.gather_objects
        world.group.gather_objects = lambda value: told.append(value) or gather(value)  # type: ignore[method-assign,func-returns-value]
        session = Session(config, world, open_weights(checkpoints["gpt"]).load)
        told.clear()
        Decoder(session, 4).run(lambda idle: next(news, RequestUpdate()), lambda row: made.append(row.made) if row.made.ended else None)
    assert len(told) == exchanges and [one.tokens for one in made] == [
        one.tokens for one in completed(checkpoints["gpt"], PROMPTS[:2], Sampling())
    ]


def test_a_seed_gives_the_same_text_again_and_another_seed_another(checkpoints: dict[str, Path]) -> None:
    texts = [[c.tokens for c in completed(checkpoints["gpt"], PROMPTS, Sampling(temperature=3.0, seed=s), 8)] for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_row_ends_at_the_end_token_and_the_others_go_on(checkpoints: dict[str, Path]) -> None:
    sampling = Sampling(temperature=3.0, seed=5)
    free = completed(checkpoints["gpt"], PROMPTS, sampling)
    stop = next(token for token in free[0].tokens[1:] if token not in free[1].tokens)
    for whole, made in zip(free, completed(checkpoints["gpt"], PROMPTS, sampling, stop=stop)):
        cut = whole.tokens.index(stop) if stop in whole.tokens else None
        assert made.tokens == whole.tokens[:cut] and made.ended == ("length" if cut is None else "stop")


@given(st.integers(0, 6), st.integers(1, 5), st.lists(st.floats(-1, 1), min_size=8, max_size=8), st.floats(0.1, 1.0), st.integers(1, 8))
@settings(max_examples=100)
def test_what_rounding_alone_tells_apart_is_chosen_alike(first: int, more: int, noise: list[float], p: float, k: int) -> None:
    logits = torch.tensor([0.5, 2.0, -1.0, 1.5, 0.0, 1.0, -2.0, 0.25])
    logits[min(7, first + more)] = logits[first]  # a tie
    other = (logits.double() + 2e-7 * torch.tensor(noise, dtype=torch.float64)).float()
    for sampling in (Sampling(), Sampling(temperature=0.7, top_k=k)):
        assert choose(logits, [1], sampling, 3) == choose(other, [1], sampling, 3)


@given(st.lists(st.integers(-4000, 4000).map(lambda n: n / 1000), min_size=8, max_size=8), st.integers(1, 8), st.floats(0.05, 1.0))
@settings(max_examples=100)
def test_what_top_k_and_top_p_leave_out_is_never_drawn(logits: list[float], k: int, p: float) -> None:
    row = torch.tensor(logits, dtype=torch.float64)
    drawn = [choose(row, [0], Sampling(temperature=1.0, top_k=k, top_p=p), number) for number in range(50)]
    least = sorted(logits, reverse=True)[k - 1]
    likely = torch.softmax(torch.tensor([x if x >= least else -1e9 for x in logits], dtype=torch.float64), 0)
    for token in drawn:
        assert logits[token] >= least - 1e-12
        assert float(likely[likely > likely[token]].sum()) < p + 1e-9


def test_draws_follow_the_probabilities() -> None:
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    count = 20_000
    drawn = [choose(shares.log(), [0], Sampling(temperature=1.0), number) for number in range(count)]
    found = torch.bincount(torch.tensor(drawn), minlength=4).double() / count
    assert torch.allclose(found, shares, atol=0.015)  # four standard deviations
    assert len({uniform(1, request, position) for request in range(50) for position in range(50)}) == 2500


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "prompt 0 is empty"),
        (
            [[1], [1] * 15],
            "prompt 1 has 15 tokens, and 6 more do not fit into model.seq=16; ask for 1 or fewer, or shorten it to 10 or fewer",
        ),
    ],
)
def test_a_prompt_that_cannot_be_completed_is_refused(prompts: list[list[int]], message: str, checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="prompt") as error:
        completed(checkpoints["gpt"], prompts, Sampling())
    assert message in str(error.value)


@pytest.mark.parametrize(("length", "more"), [(15, 6), (16, 1), (300, 8), (1, 16), (2, 300), (16, 16), (300, 300)])
def test_what_is_proposed_for_a_text_that_is_too_long_is_taken(length: int, more: int) -> None:
    with pytest.raises(ConfigError) as error:
        check_prompts([[1] * length], [more], 16)
    found = {words: [int(number) for number in re.findall(words + r" (\d+)", str(error.value))] for words in ("ask for", "to", "may be")}
    proposed = [(length, new) for new in found["ask for"]] + [(left, more) for left in found["to"]] + [(n - 1, 1) for n in found["may be"]]
    assert proposed and all(new >= 1 for _, new in proposed)
    for left, new in proposed:
        check_prompts([[1] * left], [new], 16)


@pytest.mark.parametrize("value", [1e-320, 1e-300, 1e-31, 1e-29, 1e300])
def test_values_that_overflow_choose_as_their_neighbours_do(value: float) -> None:
    row = torch.tensor([1.0, 3.0, 2.0, -1.0], dtype=torch.float32)
    if value < 1:
        assert {choose(row, [0], Sampling(temperature=value), number) for number in range(20)} == {1}
    for temperature in (0.0, 1e-29, 1.0):
        penalised = Sampling(temperature=temperature, repetition_penalty=value)
        chosen = {choose(row, [0, 2], penalised, number) for number in range(20)}
        assert chosen == {2} if value < 1 else len(chosen) > 1 if temperature == 1 else chosen == {1}
