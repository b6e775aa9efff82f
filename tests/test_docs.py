"""The documentation builds without a warning, and its generated pages say everything that they promise."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from launcher.cli.train import key_docs
from trainer.shared.records.outcome import MEANINGS, Reason

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GENERATED = {"keys.md", "failure-reasons.md", "campaign.md"}
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def hooks() -> ModuleType:
    """Imports the module that makes the generated pages."""
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nav(entries: list[dict[str, object]]) -> set[str]:
    """Lists the pages that the navigation names."""
    values = [value for entry in entries for value in entry.values()]
    return {page for value in values for page in (nav(value) if isinstance(value, list) else {str(value)})}


def broken(page: str, text: str, files: set[str]) -> list[str]:
    """Lists the links of a page, except those to other sites, that lead to no file."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    links = [link for link in LINK.findall(text) if "://" not in link]
    return [link for link in links if os.path.normpath(os.path.join(os.path.dirname(page), link)) not in files]


def test_every_reason_says_what_happened_and_what_to_do() -> None:
    assert set(MEANINGS) == set(Reason)
    assert all(happened.endswith(".") and remedy.endswith(".") for happened, remedy in MEANINGS.values())


def test_every_page_is_in_the_navigation_and_every_link_leads_to_one() -> None:
    texts = {str(path.relative_to(DOCS)): path.read_text() for path in DOCS.rglob("*.md")}
    files = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*")} | GENERATED
    assert nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]) == {*texts} | GENERATED
    assert {page: found for page, text in texts.items() if (found := broken(page, text, files))} == {}
    assert broken("how-to/a.md", "[x](../keys.md#run) [y](none.md) [z](https://a.b)", files) == ["none.md"]


def test_the_generated_pages_name_every_key_and_reason() -> None:
    made = hooks()
    text = made.keys()
    assert [key for key in key_docs() if f"| `{key}` |" not in text] == []
    assert [reason.value for reason in Reason if f"| {reason.value} |" not in made.reasons()] == []


@pytest.mark.campaign("docs")
def test_the_pages_build_without_a_warning_and_name_every_key_and_reason(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "pages")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    keys = (tmp_path / "pages/keys/index.html").read_text()
    assert [key for key in key_docs() if f"<code>{key}</code>" not in keys] == []
    reasons = (tmp_path / "pages/failure-reasons/index.html").read_text()
    assert [reason.value for reason in Reason if f"<td>{reason.value}</td>" not in reasons] == []
