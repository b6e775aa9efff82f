"""Completion of prompts on all ranks of a layout: rows join and leave while others continue (continuous batching, Yu et al. 2022).

Every rank keeps the same list of rows, so only two things are exchanged: after each turn the token chosen for each row, in one sum over
all ranks, and news from rank 0 (new requests, dropped rows). The sum also tells whether there is news, so that nothing else is exchanged
in a turn without it. A row belongs to one replica; replicas take a turn together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trainer.generate.cache import KVCache
from trainer.generate.sampling import Sampling, choose
from trainer.generate.session import Session
from trainer.shared.run.errors import ConfigError


@dataclass(frozen=True)
class PromptRequest:
    """A prompt to be continued by up to ``tokens`` tokens. The seed and ``number`` determine the draws; ``name`` is for the caller."""

    number: int
    prompt: list[int]
    tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: frozenset[int] = frozenset()  # tokens at which it ends, excluded from the text
    name: int = 0
    task: int | None = None  # task whose virtual tokens precede it; None: the session's
    likeliest: int = 0  # number of likeliest tokens to report at each place, whichever is chosen
    scored: bool = False  # the prompt's own tokens are reported, too


@dataclass
class Completion:
    """The continuation of a prompt. ``log_probabilities`` are those of the model itself, before any filter; ``likeliest`` holds those of
    the likeliest tokens at each place, by token id."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    likeliest: list[dict[int, float]] = field(default_factory=list)
    read: list[tuple[float, dict[int, float]]] = field(default_factory=list)  # of a scored prompt's tokens from the second on, likewise
    ended: str = ""  # length; stop: at an end token, or a text that ends it

    @property
    def text(self) -> list[int]:
        return self.prompt + self.tokens

    def copy(self) -> Completion:
        """Returns a copy of the current state."""
        return replace(self, tokens=list(self.tokens), log_probabilities=list(self.log_probabilities), likeliest=list(self.likeliest))


@dataclass
class TextRow:
    """A request under way in a replica."""

    request: PromptRequest
    replica: int
    made: Completion

    @property
    def places(self) -> int:
        """Counts the places that its next turn reports: one, or as many as a scored prompt has tokens when it is read."""
        return len(self.made.prompt) if self.request.scored and not self.made.tokens else 1

    def add(self, token: int, log_probability: float, likeliest: dict[int, float]) -> None:
        if not self.request.tokens:  # a prompt that is only scored
            self.made.ended = "length"
            return
        if token in self.request.stop:
            self.made.ended = "stop"
            return
        self.made.tokens.append(token)
        self.made.log_probabilities.append(log_probability)
        self.made.likeliest.append(likeliest)
        if len(self.made.tokens) == self.request.tokens:
            self.made.ended = "length"


@dataclass(frozen=True)
class RequestUpdate:
    """Changes that reached rank 0 since the last turn. ``over``: nothing more will come."""

    requests: Sequence[PromptRequest] = ()
    dropped: frozenset[int] = frozenset()  # names of abandoned requests
    over: bool = False


Hear = Callable[[bool], RequestUpdate]
"""Callback of rank 0 in each turn, and after rows have ended; its argument tells whether the decoder is idle, and then it may wait for up
to a minute. A dropped row may still grow by a token."""
Tell = Callable[[TextRow], object]
"""Callback of rank 0 for every row that has grown or ended."""


class Decoder:
    """The rows of all replicas, up to ``slots`` in each. All ranks create one and call ``run`` together."""

    def __init__(self, session: Session, slots: int):
        self.session, self.slots = session, slots
        self.replicas, self.here = session.config.layout.data, session.rank.groups.at["data"]
        self.rows: list[TextRow] = []
        self.waiting: deque[PromptRequest] = deque()
        self.memory: KVCache | None = None  # cache of this replica's rows, in their order
        self.most_cached = 0  # the most bytes of keys and values so far
        self.heard: RequestUpdate | None = None  # on rank 0: news not yet sent
        self.over = False

    def run(self, hear: Hear, tell: Tell) -> None:
        """Takes turns until nothing is left to do and nothing more will come."""
        leads, news = self.session.world.rank == 0, True
        while self.rows or self.waiting or not self.over:
            if news or not (self.rows or self.waiting):
                self._learn(hear)
            grown, news = self._turn(self._admit(), hear)
            news = news or (not self.over and any(row.made.ended for row in grown))
            for row in grown if leads else ():
                tell(row)

    def _learn(self, hear: Hear) -> None:
        """Sends the news of rank 0 to all ranks."""
        world, idle = self.session.world, not self.rows and not self.waiting
        news: RequestUpdate = world.group.gather_objects((self.heard or hear(idle)) if world.rank == 0 else None)[0]
        self.heard, self.over = None, self.over or news.over
        self.waiting.extend(news.requests)
        self._drop(news.dropped)

    def _drop(self, names: frozenset[int]) -> None:
        if names:
            self.waiting = deque(request for request in self.waiting if request.name not in names)
            self._keep([row for row in self.rows if row.request.name not in names])

    def _keep(self, rows: list[TextRow]) -> None:
        """Drops all rows but these."""
        kept = [i for i, row in enumerate(self._own(self.rows)) if row in rows]
        if self.memory is not None and len(kept) < len(self._own(self.rows)):
            self.memory = self.memory.keep(torch.tensor(kept, device=self.session.world.device)) if kept else None
        self.rows = rows

    def _own(self, rows: Sequence[TextRow]) -> list[TextRow]:
        return [row for row in rows if row.replica == self.here]

    def _admit(self) -> list[TextRow]:
        """Returns rows for requests that find a slot, each in the replica with the fewest rows; those with scored prompts are last."""
        load = [sum(row.replica == replica for row in self.rows) for replica in range(self.replicas)]
        joining = []
        while self.waiting and min(load) < self.slots:
            replica = load.index(min(load))
            load[replica] += 1
            request = self.waiting.popleft()
            joining.append(TextRow(request, replica, Completion(list(request.prompt))))
        return sorted(joining, key=lambda row: row.request.scored)

    @torch.no_grad()
    def _turn(self, joining: list[TextRow], hear: Hear) -> tuple[list[TextRow], bool]:
        """Adds a token to every row, including those that join; returns all these rows, and whether rank 0 has news."""
        everyone = self.rows + joining
        if not everyone:
            return [], False
        logits = self._read(self._own(self.rows), self._own(joining))
        self.rows = everyone
        most, counts = max(row.request.likeliest for row in everyone), [row.places for row in everyone]
        told = torch.zeros(sum(counts) + 1, 2 + 2 * most, dtype=torch.float64)
        for row, block in zip(everyone, told[:-1].split(counts)):
            if row.replica == self.here and self.session.answers:
                block[:] = _answers(row, logits.pop(0), most, self.session.said(row.made.prompt, row.made.tokens))
        if self.session.world.rank == 0:
            heard = hear(False)
            told[-1, 0] = bool(heard.requests or heard.dropped or heard.over > self.over)
            self.heard = heard if told[-1, 0] else None
        told = told.to(self.session.world.device)
        self.session.world.group.all_reduce(told).wait()
        told = told.cpu()
        for row, block in zip(everyone, told[:-1].split(counts)):
            *before, (token, share, likeliest) = [_reported(place, row.request.likeliest) for place in block.tolist()]
            row.made.read += [(share, likeliest) for _, share, likeliest in before]
            row.add(token, share, likeliest)
        self._keep([row for row in everyone if not row.made.ended])
        return everyone, bool(told[-1, 0])

    def _read(self, old: list[TextRow], new: list[TextRow]) -> list[Tensor]:
        """Returns logits [places, V] of each row on the ranks of the last stage; reads one more token of old rows and the prompts of new
        ones, each scored one by itself: its logits are as many as its tokens."""
        found: list[Tensor] = []
        if old:
            assert self.memory is not None
            logits = self.session.read(self.memory, [row.made.tokens[-1:] for row in old])
            found += [] if logits is None else logits.cpu()[:, None]
        plain = [row for row in new if not row.request.scored]
        for rows in [*([plain] if plain else []), *([row] for row in new if row.request.scored)]:
            longest, every = max(len(row.made.prompt) for row in rows), rows[0].request.scored
            padding = [longest - len(row.made.prompt) for row in rows]
            fresh = self.session.begin(padding)
            texts = [[0] * spare + row.made.prompt for spare, row in zip(padding, rows)]
            logits = self.session.read(fresh, texts, [row.request.task for row in rows], every)
            found += [] if logits is None else logits.cpu().transpose(0, 1) if every else logits.cpu()[:, None]
            self.memory = fresh if self.memory is None else self.memory.joined(fresh)
        self.most_cached = max(self.most_cached, 0 if self.memory is None else self.memory.nbytes)
        return found


def _answers(row: TextRow, logits: Tensor, most: int, text: list[int]) -> Tensor:
    """Returns the report on each place of a row from its logits [places, V]: the tokens of a prompt that is read, and the
    one chosen behind ``text``."""
    chosen = choose(logits[-1], text, row.request.sampling, row.request.number)
    tokens = [*row.made.prompt[1 : row.places], chosen]
    return torch.stack([_report(token, place, most) for token, place in zip(tokens, logits)])


def _report(token: int, logits: Tensor, most: int) -> Tensor:
    """Returns a token, its log-probability, the ``most`` likeliest tokens and theirs, [2 + 2 most], from logits [V]."""
    shares = torch.log_softmax(logits.double(), -1)
    top = shares.topk(most)
    return torch.cat([torch.tensor([token], dtype=torch.float64), shares[token, None], top.indices.double(), top.values])


def _reported(place: Sequence[float], likeliest: int) -> tuple[int, float, dict[int, float]]:
    """Reads what ``_report`` returned: as many of the likeliest tokens as are asked for."""
    token, share, *others = place
    most = len(others) // 2
    return int(token), share, {int(other): value for other, value in zip(others[:likeliest], others[most:])}


def generate(session: Session, requests: Sequence[PromptRequest], slots: int = 64, tell: Tell = lambda row: None) -> list[Completion]:
    """Completes all ``requests``; returns the completions in order, on rank 0. ``ConfigError`` for a prompt that cannot be completed."""
    check_prompts([request.prompt for request in requests], [request.tokens for request in requests], session.seq, session.written)
    made: dict[int, Completion] = {}
    news = iter([RequestUpdate(requests, over=True)])

    def note(row: TextRow) -> None:
        made[row.request.number] = row.made
        tell(row)

    Decoder(session, slots).run(lambda idle: next(news, RequestUpdate()), note)
    return [made[request.number] for request in requests] if session.world.rank == 0 else []


def check_texts(texts: Sequence[str]) -> None:
    """Raises ``ConfigError`` for a text that tokenizers cannot read: bytes that were not UTF-8, or a lone surrogate."""
    for text in texts:
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ConfigError(f"{text[:40]!r} is not UTF-8 text")


def check_prompts(prompts: Sequence[list[int]], tokens: Sequence[int], seq: int, written: int | None = None) -> None:
    """Raises ``ConfigError`` for a prompt that cannot be completed in a text of ``seq`` tokens; or be read in so many, with an answer of
    ``written`` at most."""
    for number, (prompt, more) in enumerate(zip(prompts, tokens)):
        if not prompt:
            raise ConfigError(f"prompt {number} is empty; give it at least one token")
        if written is not None and (len(prompt) > seq or more > written):
            raise ConfigError(
                f"prompt {number} has {len(prompt)} tokens for an answer of {more}, and model.seq={seq} may be read and "
                f"model.decoder_seq={written} be written; shorten it, or ask for fewer"
            )
        if written is None and len(prompt) + more > seq:
            fewer = [f"ask for {seq - len(prompt)} or fewer"] if len(prompt) < seq else []
            shorter = [f"shorten it to {seq - more} or fewer"] if more < seq else []
            remedy = ", or ".join(fewer + shorter) or f"both together may be {seq}"
            raise ConfigError(f"prompt {number} has {len(prompt)} tokens, and {more} more do not fit into model.seq={seq}; {remedy}")
