"""The documentation builds without a warning, and its generated pages say everything that they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli.train import key_docs
from trainer.spec.outcome import MEANINGS, Reason

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def test_every_reason_says_what_happened_and_what_to_do() -> None:
    assert set(MEANINGS) == set(Reason)
    assert all(happened.endswith(".") and remedy.endswith(".") for happened, remedy in MEANINGS.values())


def test_the_pages_build_without_a_warning_and_name_every_key_and_reason(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "pages")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    keys = (tmp_path / "pages/keys/index.html").read_text()
    assert [key for key in key_docs() if f"<code>{key}</code>" not in keys] == []
    reasons = (tmp_path / "pages/failure-reasons/index.html").read_text()
    assert [reason.value for reason in Reason if f"<td>{reason.value}</td>" not in reasons] == []
