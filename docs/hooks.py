"""Pages that are made from the code when the documentation is built: the key reference, failure reasons, the newest campaign."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files

from launcher.cli.train import key_docs
from tests import campaign
from trainer.shared.records.outcome import MEANINGS, Reason


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages before links are checked."""
    for name, text in (("keys.md", keys()), ("failure-reasons.md", reasons()), ("campaign.md", campaign.page(campaign.history()))):
        files.append(File.generated(config, name, content=text))
    return files


def keys() -> str:
    """Every key by section, with its default and meaning."""
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
    """Every reason with what it means and what to do about it."""
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
    """Text that cannot end a table's cell or open an HTML tag."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
