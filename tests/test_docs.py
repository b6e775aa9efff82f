"""The documentation builds without a warning, and its generated pages say everything that they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from docs import pages
from launcher.cli.keys import key_docs
from trainer.shared.records.outcome import MEANINGS, Reason

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def settings() -> dict[str, Any]:
    """Reads how the documentation is built."""
    return dict(tomllib.loads((ROOT / "zensical.toml").read_text()))


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
    made = {*pages.generated()}
    files = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*")} | made
    assert nav(settings()["project"]["nav"]) == {*texts} | made
    assert {page: found for page, text in texts.items() if (found := broken(page, text, files))} == {}
    assert broken("how-to/a.md", "[x](../keys.md#run) [y](none.md) [z](https://a.b)", files) == ["none.md"]


def test_the_links_of_the_pages_beside_the_docs_lead_to_files() -> None:
    files = {str(path.relative_to(ROOT)) for path in (*ROOT.glob("*"), *DOCS.rglob("*"), *(ROOT / "examples").rglob("*"))}
    texts = {name: (ROOT / name).read_text() for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")}
    assert {page: found for page, text in texts.items() if (found := broken(page, text, files))} == {}


def test_the_generated_pages_name_every_key_and_reason() -> None:
    text = pages.keys()
    assert [key for key in key_docs() if f"| `{key}` |" not in text] == []
    assert [reason.value for reason in Reason if f"| {reason.value} |" not in pages.reasons()] == []


def test_the_pages_build_without_a_warning_and_name_every_key_and_reason(tmp_path: Path) -> None:
    pages.write(tmp_path / "build" / "pages")
    (tmp_path / "zensical.toml").write_text((ROOT / "zensical.toml").read_text())
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, "No issues found" in done.stderr) == (0, True), done.stdout + done.stderr
    keys = (tmp_path / "build/docs/keys/index.html").read_text()
    assert [key for key in key_docs() if f"<code>{key}</code>" not in keys] == []
    reasons = (tmp_path / "build/docs/failure-reasons/index.html").read_text()
    assert [reason.value for reason in Reason if f"<td>{reason.value}</td>" not in reasons] == []
