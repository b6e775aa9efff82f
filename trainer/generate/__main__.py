"""``python -m trainer.generate MODEL --prompt TEXT ...``: text from a checkpoint or a Hugging Face folder. Behind ``trireme generate``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.spec import ConfigError, from_dict
from trainer.spec.files import write_json
from trainer.spec.stages import Sampling

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from trainer.generate.generate import Completion

TEXTS = "completions.json"
DTYPES = ("float32", "float64", "bfloat16")


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 done, 2 wrong input (one line on stderr), 130 interrupted."""
    arguments = parser().parse_args(argv)
    try:
        completions = complete(arguments)
        if arguments.out is not None:
            _write(arguments.out, completions)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return ConfigError.exit_code
    except KeyboardInterrupt:
        return 130
    print(json.dumps(completions) if arguments.json else "\n\n".join(c["prompt"] + c["text"] for c in completions))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line; the options of ``Sampling`` have its words and defaults."""
    made = argparse.ArgumentParser(prog="trireme generate", description="Text from a checkpoint or a Hugging Face folder, in one process.")
    made.add_argument("model", type=Path, metavar="MODEL", help="a checkpoint, a folder of them, or a Hugging Face folder")
    made.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a text to be continued; may be given several times")
    made.add_argument("--prompts", type=Path, metavar="FILE", help="a file with a prompt on each line")
    made.add_argument("--tokens", type=int, default=32, help="tokens to add at most (default: %(default)s)")
    made.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="tokenizer.json, or a folder that has one (default: next to the weights)"
    )
    made.add_argument("--dtype", choices=DTYPES, default="float32", help="type of the weights (default: %(default)s)")
    made.add_argument("--out", type=Path, metavar="FOLDER", help=f"also write {TEXTS} there")
    made.add_argument("--json", action="store_true", help="one JSON document, with tokens and log-probabilities")
    for option in fields(Sampling):
        kind = type(option.default)
        name = f"--{option.name.replace('_', '-')}"
        made.add_argument(name, type=kind, default=option.default, help=f"{option.metadata['doc']} (default: %(default)s)")
    return made


def complete(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What followed each prompt, as plain data."""
    import torch

    from trainer.generate.cache import Cached
    from trainer.generate.generate import generate
    from trainer.generate.weights import load_network, tokenizer_file

    sampling = from_dict(Sampling, {f.name: getattr(arguments, f.name) for f in fields(Sampling)}, "sampling.")
    texts = _prompts(arguments)
    network, model = load_network(arguments.model, getattr(torch, arguments.dtype))
    tokenizer = _tokenizer(arguments.tokenizer or tokenizer_file(arguments.model), arguments.model)
    if tokenizer.get_vocab_size() > model.vocab:
        raise ConfigError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, and model.vocab={model.vocab}; give the model's own with --tokenizer"
        )
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    made = generate(Cached(network), prompts, arguments.tokens, model.seq, sampling, _end(tokenizer))
    return [_plain(text, completion, tokenizer) for text, completion in zip(texts, made)]


def _prompts(arguments: argparse.Namespace) -> list[str]:
    if arguments.tokens < 1:
        raise ConfigError(f"--tokens={arguments.tokens} must be 1 or more")
    texts = list(arguments.prompt)
    if arguments.prompts is not None:
        try:
            texts += [line for line in arguments.prompts.read_text(encoding="utf-8").splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--prompts={arguments.prompts} cannot be read as text: {error}; give a file with a prompt on each line"
            ) from None
    if not texts:
        raise ConfigError("there is no prompt; give one with --prompt TEXT, or a file of them with --prompts FILE")
    return texts


def _tokenizer(path: Path | None, model: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    from trainer.spec.corpus import TOKENIZER

    if path is None:
        raise ConfigError(f"{model} has no {TOKENIZER} next to its weights; name the corpus that it was trained on with --tokenizer FOLDER")
    file = path / TOKENIZER if path.is_dir() else path
    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # what the library raises for a damaged file has no type of its own
        raise ConfigError(f"the tokenizer {file} cannot be read: {error}; give a tokenizer.json with --tokenizer") from None


def _end(tokenizer: Tokenizer) -> int | None:
    """The token at which a text ends: the first special one of the vocabulary, which prepared corpora have alone."""
    special = [token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special]
    return min(special, default=None)


def _plain(text: str, made: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
    data = asdict(made)
    return {"prompt": text, "text": tokenizer.decode(made.tokens), "prompt_tokens": data.pop("prompt"), **data}


def _write(folder: Path, completions: list[dict[str, Any]]) -> None:
    try:
        write_json(folder / TEXTS, {"completions": completions})
    except OSError as error:
        raise ConfigError(f"--out={folder} cannot be written: {error.strerror}; choose another folder") from None


if __name__ == "__main__":
    sys.exit(main())
