"""Text: cached keys and values, rows that join and leave, sampling."""

from __future__ import annotations

from tests.planted.defect import Defect

CACHE, SAMPLING = "trainer/generate/cache.py", "trainer/generate/sampling.py"
OFFICIAL = "tests/generate/test_openai.py"
TEXTS = "tests/generate/test_generate.py tests/generate/test_layouts.py"

DEFECTS = [
    Defect(
        "positions count the padding",
        CACHE,
        "return (columns[:, None] - self.padding).clamp(min=0)",
        "return columns[:, None] + 0 * self.padding",
        TEXTS,
    ),
    Defect(
        "padding is attended to",
        CACHE,
        "self.hidden = (key > query[:, None]) | (key < self.padding[:, None, None])",
        "self.hidden = (key > query[:, None]) | (key < 0 * self.padding[:, None, None])",
        TEXTS,
    ),
    Defect(
        "rows that stay keep the wrong columns",
        CACHE,
        "t[rows, :, spare : self.read]",
        "t[rows, :, : self.read - spare]",
        TEXTS,
    ),
    Defect(
        "all requests draw the same numbers",
        SAMPLING,
        "uniform(sampling.seed, request, len(text))",
        "uniform(sampling.seed, 0, len(text))",
        TEXTS,
    ),
    Defect(
        "a penalty makes unlikely tokens likelier",
        SAMPLING,
        "torch.where(values > 0, values / penalty, values * penalty)",
        "values / penalty",
        "tests/generate/test_penalty.py",
    ),
    Defect(
        "every tensor rank answers",
        "trainer/generate/session.py",
        'return at["pipeline"] == layout.pipeline - 1 and at["tensor"] == 0',
        'return at["pipeline"] == layout.pipeline - 1',
        TEXTS,
    ),
    Defect(
        "a decoder looks at the padding of its prompt",
        "trainer/generate/answering.py",
        "return (columns >= self.prompt.padding[:, None])[:, None, None]",
        "return (columns >= 0 * self.prompt.padding[:, None])[:, None, None]",
        "tests/generate/test_answers.py -k log_probabilities",
    ),
    Defect(
        "rows that leave take the prompts of others with them",
        "trainer/generate/answering.py",
        "prompt=self.prompt.keep(rows)",
        "prompt=self.prompt.keep(rows.flip(0))",
        "tests/generate/test_answers.py -k each_alone",
    ),
    Defect(
        "the scores of a prompt are one token late",
        "trainer/generate/generate.py",
        "tokens = [*row.made.prompt[1 : row.places], chosen]",
        "tokens = [*row.made.prompt[: row.places - 1], chosen]",
        OFFICIAL,
    ),
    Defect(
        "all choices of a prompt are the same draw",
        "trainer/generate/api.py",
        "PromptRequest(at * choices + copy, prompt",
        "PromptRequest(at * choices, prompt",
        OFFICIAL,
    ),
    Defect(
        "a cut text keeps the tokens of its stop",
        "trainer/generate/telling.py",
        "len(self.offsets) if ended and not self.stopped else",
        "len(self.offsets) if ended or self.stopped else",
        OFFICIAL,
    ),
    Defect(
        "a chat begins twice",
        "trainer/generate/api.py",
        "return [model.words.plain(text)]",
        "return [model.words.begin + model.words.plain(text)]",
        "tests/convert/test_text_borders.py",
    ),
    Defect(
        "scored prompts are mixed among the others",
        "trainer/generate/generate.py",
        "return sorted(joining, key=lambda row: row.request.scored)",
        "return joining",
        TEXTS,
    ),
    Defect(
        "every rank imports torch's compiler at its start",
        "trainer/models/attention.py",
        "from torch.nn.attention import SDPBackend, sdpa_kernel\n",
        "import torch.nn.attention.bias\nfrom torch.nn.attention import SDPBackend, sdpa_kernel\n",
        "tests/backends/test_local.py -k compiler",
    ),
    Defect(
        "a token behind others sees the first ones alone",
        "trainer/models/attention.py",
        "return band(keys - queries, queries, keys, keys, device)",
        "return band(0, queries, keys, keys, device)",
        "tests/trainer/test_attention.py -k last_query",
    ),
]
