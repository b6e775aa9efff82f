"""Brings the pages of the documentation together: those of ``docs/``, and those made from the code.

python -m docs.pages    # into build/pages, from which zensical.toml makes build/docs
"""

from __future__ import annotations

import shutil
from pathlib import Path

from launcher.cli.keys import key_docs
from tests import campaign
from trainer.shared.records.outcome import MEANINGS, Reason

DOCS = Path(__file__).parent


def write(folder: Path) -> None:
    """Writes all pages into a folder, which takes the place of what an earlier call wrote there."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for name, text in generated().items():
        (folder / name).write_text(text)


def generated() -> dict[str, str]:
    """Makes the pages that follow from the code, by file name."""
    return {"keys.md": keys(), "failure-reasons.md": reasons(), "campaign.md": campaign.page(campaign.history())}


def keys() -> str:
    """Lists every key by section, with its default and meaning."""
    lines = ["# Keys", "", "Every key of the configuration. `trireme train --keys WORD` prints those that contain a word;"]
    lines += ["`trireme train --schema` prints the JSON schema, with which editors complete and check YAML files.", ""]
    section = ""
    for key, (default, doc) in sorted(key_docs().items(), key=lambda item: (item[0].split(".")[0], "." in item[0])):
        name = key.split(".")[0]
        if name != section:
            lines += ["", f"## {name}", "", "| key | default | meaning |", "|---|---|---|"]
            section = name
        shown = "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
        lines.append(f"| `{key}` | {_cell(f'`{shown}`') if shown else ''} | {_cell(doc)} |")
    return "\n".join(lines) + "\n"


def reasons() -> str:
    """Lists every reason, what happened and what to do about it."""
    lines = [
        "# Failure reasons",
        "",
        "Why a trial failed, was stopped or pruned: the same words on every backend, in `trireme rank`, MLflow and the report.",
        "",
    ]
    lines += ["| reason | what happened | what to do | tried again |", "|---|---|---|---|"]
    for reason in Reason:
        happened, remedy = MEANINGS[reason]
        lines.append(f"| {reason.value} | {_cell(happened)} | {_cell(remedy)} | {'yes' if reason.retryable else 'no'} |")
    lines += ["", "*Tried again*: up to `sweep.retries` further attempts, because the fault lies with the machine and not with the trial."]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Escapes text so that it cannot end a table's cell or open an HTML tag."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


if __name__ == "__main__":
    write(DOCS.parent / "build" / "pages")
