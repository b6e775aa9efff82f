"""Answers of an encoder and its decoder are what transformers generates, token by token, under every layout and in every batch."""

from __future__ import annotations

import io
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.convert.test_logits import checkpoint
from tests.convert.test_t5 import SMALL, VOCAB, random_network
from tests.farm import Farm
from tests.generate.test_serve import Server
from tests.huggingface import MARKS, transformers
from trainer.convert import export_weights
from trainer.data.spans import sentinels
from trainer.generate.answering import AnswerSession, open_session
from trainer.generate.generate import Completion, PromptRequest, check_prompts, generate
from trainer.generate.job import complete
from trainer.generate.ranks import alone, world_of
from trainer.generate.sampling import Sampling
from trainer.generate.telling import open_text
from trainer.generate.weights import open_weights
from trainer.launch.rank_env import RankEnv
from trainer.shared.corpora.index import TOKENIZER
from trainer.shared.parallel.boundary import PairTokens
from trainer.shared.records.named_tokens import GENERATION
from trainer.shared.run.command_lines import GenerateCommand
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import DataConfig, LayoutConfig, RunConfig, TrainConfig

pytestmark = MARKS

PROMPTS = [[5, 9, 2], [7], [*range(1, 20)], [30, 0, 30], [3, 3]]
START, TOKENS = 4, 24  # of these, the last stand beyond the exact distances
SAMPLED = Sampling(temperature=0.9, top_k=30, top_p=0.9, repetition_penalty=1.2, seed=11)
MODELS = SMALL | {"learned": replace(SMALL["1.1"], positions="learned", decoder_seq=TOKENS)}


class Words:
    """As much of a tokenizer as a session needs."""

    start = START


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, models = tmp_path_factory.mktemp("models"), {}
    for name, given in MODELS.items():
        model = resolve_model(replace(given, heads=4, layers=4))
        models[name] = checkpoint(random_network(model, 5), model, root / name)
    return models


def requests(sampling: Sampling, tokens: int, stop: int | None = None) -> list[PromptRequest]:
    ends = frozenset() if stop is None else frozenset([stop])
    return [PromptRequest(number, prompt, tokens, sampling, ends, number) for number, prompt in enumerate(PROMPTS)]


def answered(folder: Path, sampling: Sampling, tokens: int = TOKENS, stop: int | None = None, slots: int = 64) -> list[Completion]:
    with alone(folder, "fp64") as (config, world):
        session = open_session(config, world, open_weights(folder), Words())  # type: ignore[arg-type]
        return generate(session, requests(sampling, tokens, stop), slots)


@pytest.mark.parametrize("name", SMALL)
def test_greedy_answers_are_those_of_transformers_token_by_token(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    export_weights(folders[name], tmp_path / "hf")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf").double().eval()
    for source in (folders[name], tmp_path / "hf"):
        made = answered(source, Sampling())
        for prompt, one in zip(PROMPTS, made):
            ids = torch.tensor([prompt])
            answer = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0,
                decoder_start_token_id=START, num_beams=1,
            )  # fmt: skip
            assert [START, *one.tokens] == answer[0].tolist()
        assert len({tuple(one.tokens) for one in made}) > 1


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_those_of_the_whole_network(name: str, folders: dict[str, Path]) -> None:
    found = open_weights(folders[name])
    whole = random_network(found.model, 5).double()
    for prompt, made in zip(PROMPTS, answered(folders[name], Sampling())):
        text = torch.tensor([START, *made.tokens])
        with torch.no_grad():
            shares = whole(PairTokens(torch.tensor(prompt)[:, None], text[:-1, None]))[:, 0].log_softmax(-1)
        assert made.log_probabilities == pytest.approx(shares.gather(1, text[1:, None])[:, 0].tolist(), abs=1e-9)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_rows_are_answered_as_each_alone_whoever_joins_and_leaves_meanwhile(sampling: Sampling, folders: dict[str, Path]) -> None:
    first = answered(folders["1.1"], sampling, slots=1)
    stop = first[0].tokens[3]
    alone = answered(folders["1.1"], sampling, stop=stop, slots=1)
    assert {one.ended for one in alone} > {"stop"}
    for slots in (64, 2, 3):
        for one, made in zip(alone, answered(folders["1.1"], sampling, stop=stop, slots=slots)):
            assert (made.tokens, made.ended) == (one.tokens, one.ended)
            assert made.log_probabilities == pytest.approx(one.log_probabilities, abs=1e-9)


def test_an_encoder_reads_a_prompt_once_and_its_keys_and_values_are_made_once(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: dict[str, int] = {}
    with alone(folders["1.1"], "fp64") as (config, world):
        session = open_session(config, world, open_weights(folders["1.1"]), Words())  # type: ignore[arg-type]
        assert isinstance(session, AnswerSession)
        part: Any = session.pipeline.chunks[0].model
        layers = {"encoder": part.part.blocks["0"], "keys": part.part.blocks["2"].cross.cross.kv, "decoder": part.part.blocks["2"].mlp}
        for name, layer in layers.items():
            layer.register_forward_hook(lambda *_, name=name: counts.update({name: counts.get(name, 0) + 1}))
        generate(session, requests(Sampling(), 6), 64)
    assert counts == {"encoder": 1, "keys": 1, "decoder": 6}


def answer(env: RankEnv, out: Path, models: dict[str, str], layouts: list[list[int]]) -> None:
    """Answers of all models under each layout (tensor, pipeline, data)."""
    answers: dict[str, Any] = {}
    run = RunConfig(task="generate", steps=1, warmup_steps=0, global_batch=4, precision="fp64")
    first = TrainConfig(run=run, data=DataConfig(kind="synthetic"), layout=LayoutConfig(data=env.world_size))
    with world_of(resolve(first, env.world_size), env) as world:
        for name, layout in itertools.product(models, layouts):
            weights = open_weights(Path(models[name]))
            own = replace(first, model=weights.model, layout=LayoutConfig(**dict(zip(("tensor", "pipeline", "data"), layout))))
            session = open_session(resolve(own, env.world_size), world, weights, Words())  # type: ignore[arg-type]
            for kind, sampling in {"greedy": Sampling(), "sampled": SAMPLED}.items():
                made = generate(session, requests(sampling, 8), 2)
                answers[f"{name} {kind} {layout}"] = [(one.tokens, one.log_probabilities) for one in made]
    if env.rank == 0:
        (out / "answers.json").write_text(json.dumps(answers))


def test_answers_are_the_same_under_tensor_pipeline_and_replicated_ranks(farm: Farm, folders: dict[str, Path]) -> None:
    folders = {name: folders[name] for name in ("1.0", "learned")}
    layouts, compared = [[2, 1, 1], [1, 2, 1], [1, 1, 2]], 0
    alone = {
        (name, kind): answered(folders[name], sampling, 8, slots=1)
        for name in folders
        for kind, sampling in {"greedy": Sampling(), "sampled": SAMPLED}.items()
    }
    done = farm.call(answer, 2, models={name: str(folder) for name, folder in folders.items()}, layouts=layouts)
    for key, made in json.loads((done.directory / "answers.json").read_text()).items():
        name, kind, _ = key.split(" ", 2)
        for one, (tokens, shares) in zip(alone[name, kind], made):
            assert tokens == one.tokens, key
            assert shares == pytest.approx(one.log_probabilities, abs=1e-10), key
            compared += 1
    assert compared == len(layouts) * len(folders) * 2 * len(PROMPTS)


def test_learned_positions_limit_prompts_and_answers_and_relative_ones_do_not(folders: dict[str, Path]) -> None:
    lengths = open_weights(folders["learned"]).lengths
    check_prompts([[1] * 24], [TOKENS], *lengths)
    for prompt, tokens in ((25, 1), (1, TOKENS + 1)):
        with pytest.raises(ConfigError, match=rf"prompt 0 has {prompt} tokens for an answer of {tokens}, and model.seq=24 may be read"):
            check_prompts([[1] * prompt], [tokens], *lengths)
    check_prompts([[1] * 2500], [4000], *open_weights(folders["1.1"]).lengths)


def test_requests_are_not_timed_and_the_message_says_so() -> None:
    run = RunConfig(task="inference", steps=1, warmup_steps=0)
    with pytest.raises(ConfigError, match=r"run\.task=inference is not offered for model\.family=t5, which has an encoder"):
        resolve(TrainConfig(model=SMALL["1.1"], data=DataConfig(kind="synthetic"), run=run), 1)


def words(folder: Path) -> None:
    """Writes a Unigram tokenizer with sentinels, and which of its tokens fill and end a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()  # type: ignore[assignment]
    named = ["<pad>", "</s>", "<unk>"]
    text = ["the cat reads a tale", "a dog hears the tale", "cats and dogs read the same tales"]
    made.train_from_iterator(text, trainers.UnigramTrainer(vocab_size=34, special_tokens=named, unk_token="<unk>", show_progress=False))
    made.add_special_tokens([AddedToken(f"<extra_id_{number}>", special=True) for number in range(3)])
    made.save(str(folder / TOKENIZER))
    (folder / GENERATION).write_text(json.dumps({"pad_token_id": 0, "eos_token_id": 1}))


def test_a_text_is_read_with_its_end_and_answered_behind_the_token_that_fills_texts(folders: dict[str, Path]) -> None:
    folder = folders["1.1"]
    words(folder)
    tokenizer = open_text(None, folder, VOCAB, pairs=True)
    prompts, shown = ["the cat", "a dog reads the tale"], io.StringIO()
    with alone(folder, "fp64") as (config, world):
        command = GenerateCommand(str(folder), tokens=9)
        made = complete(command, prompts, config, world, shown)
        session = open_session(config, world, open_weights(folder), tokenizer)
        ids = [[*tokenizer.tokenizer.encode(prompt).ids, 1] for prompt in prompts]
        known = generate(session, [PromptRequest(n, prompt, 9, stop=frozenset([1])) for n, prompt in enumerate(ids)])
    assert isinstance(session, AnswerSession) and session.start == 0
    for one, answer in zip(made, known):
        assert (one["prompt_tokens"], one["tokens"]) == (answer.prompt, answer.tokens)
        assert one["text"] == tokenizer.tokenizer.decode(answer.tokens)
    assert shown.getvalue() == "\n\n".join(f"{prompt}\n{one['text']}" for prompt, one in zip(prompts, made)) + "\n"
    numbers = [tokenizer.tokenizer.token_to_id(f"<extra_id_{number}>") for number in range(3)]
    assert sentinels(folder, 99)[:3] == numbers and None not in numbers


def test_a_server_answers_each_client_as_its_prompt_alone_is_answered_streamed_or_not(folders: dict[str, Path]) -> None:
    folder, prompts = folders["1.1"], ["the cat", "a dog reads the tale", "tales", "cats and dogs"]
    words(folder)
    with alone(folder, "fp64") as (config, world):
        made = complete(GenerateCommand(str(folder), tokens=9), prompts, config, world, io.StringIO())
    server = Server(folder, "--batch", "2")  # fewer slots than clients: a slot gets another prompt's encoder output
    bodies = [{"prompt": prompt, "max_tokens": 9, "temperature": 0} for prompt in prompts]
    try:
        with ThreadPoolExecutor(2 * len(bodies)) as clients:
            whole, streamed = clients.map(server.ask, bodies), clients.map(server.stream, bodies)
            answers = [(status, answer["choices"][0]["text"]) for status, answer in whole]
            assert answers == [(200, one["text"]) for one in made]
            assert [text for text, *_ in streamed] == [one["text"] for one in made]
        assert server.stats()["running"] == server.stats()["waiting"] == 0
    finally:
        assert server.end() == 0
