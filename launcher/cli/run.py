"""``trireme run pipeline=NAME``: runs the stages of a model's life, each once for the same inputs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launcher.cli.console import Column, fitted_table, wide_console
from launcher.cli.launching import add_detach, check_detach, first_word
from launcher.cli.overrides import NamedOption, add_folder, add_set, key_of
from launcher.cli.parser import VerbParser
from launcher.named_files import check_folder
from trainer.shared.run.errors import ConfigError

if TYPE_CHECKING:
    from launcher.stages.graph import Stage
    from launcher.stages.plan import PlannedStage
    from launcher.stages.runner import Outcome

DESCRIPTION = """\
Runs the graph of conf/pipeline/NAME.yaml: prepare, train, evaluate, convert, generate. Everything is checked before the
first stage starts. A stage that was run already with the same configuration and inputs is not run again: after a failure or a kill the
same command makes the missing ones.

examples:
  trireme run pipeline=gpt_tiny
  trireme run pipeline=gpt_tiny stages.base.run.steps=200 --until base
  trireme run pipeline=gpt_tiny --dry-run
  trireme run pipeline=gpt_tiny cluster=ours sweep.dir=/runs/tiny --in-cluster REGISTRY/trireme-launcher:1
"""


def main(argv: list[str]) -> int:
    """0 when every stage is there, 1 when one failed, 2 for wrong input."""
    arguments = parser().parse_intermixed_args(argv)
    check_detach(arguments.detach, dry_run=arguments.dry_run, json=arguments.json, in_cluster=arguments.in_cluster)
    first_word()
    from launcher.stages.graph import choose, read_pipeline
    from launcher.stages.plan import plan
    from launcher.stages.runner import check_inputs_there, check_stages

    name, changes, overrides = _words(arguments.words)
    stages = read_pipeline(name, changes, arguments.config_dir)
    if arguments.in_cluster is not None:
        return _send(name, stages, overrides, arguments)
    chosen = {stage.name for stage in choose(stages, arguments.until, arguments.start, arguments.only)}
    planned = plan(stages, overrides, arguments.config_dir)
    wanted = [item for item in planned if item.stage.name in chosen]
    check_inputs_there(planned, wanted)
    check_folder(wanted[0].config.sweep.dir, "sweep.dir")
    check_stages(name, wanted)
    if not arguments.json:
        _show(planned, wanted)
    if arguments.dry_run:
        if arguments.json:
            print(json.dumps({"pipeline": name, "stages": [_plain(item, _state(item, wanted)) for item in planned]}, indent=1))
        return 0
    confirm_stages(wanted)
    outcomes = _run(name, wanted, arguments.detach)
    if arguments.json:
        print(json.dumps({"pipeline": name, "stages": [_plain(o.planned, o.status, o.detail) for o in outcomes]}, indent=1))
    else:
        for outcome in outcomes:
            _tell(outcome)
    return 1 if any(outcome.status not in ("done", "reused", "submitted") for outcome in outcomes) else 0


def _send(name: str, stages: Sequence[Stage], overrides: list[str], arguments: argparse.Namespace) -> int:
    """Has the same command run inside the cluster, which checks the rest. ``ConfigError`` if not all stages are to run there."""
    from launcher.backends.kubernetes.inside import InsideLauncher, launcher_name
    from launcher.config import compose

    config = compose(overrides, arguments.config_dir)
    for stage in stages:
        cluster = compose([*stage.overrides, *overrides], arguments.config_dir).cluster
        if not cluster.takes_launcher:
            raise ConfigError(
                f"stage {stage.name}: cluster.backend={cluster.backend} cannot be reached with --in-cluster; say cluster=kubernetes"
            )
    folders = {"sweep.dir": config.sweep.dir} | ({"--config-dir": str(arguments.config_dir)} if arguments.config_dir else {})
    flags = {"--until": arguments.until, "--from": arguments.start, "--only": arguments.only, "--config-dir": arguments.config_dir}
    words = ["run", *arguments.words, "cluster.kubeconfig=null", "cluster.context=null", *(["--json"] if arguments.json else [])]
    words += [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
    launcher = InsideLauncher(launcher_name(name, config.sweep.dir), words, config.cluster, arguments.in_cluster, folders)
    if arguments.dry_run:
        print(launcher.text, end="")
        return 0
    launcher.start()
    place = launcher.settings.namespace
    print(f"Job {launcher.name} in namespace {place} runs the pipeline: kubectl -n {place} logs -f job/{launcher.name}")
    return 0


def _run(name: str, wanted: list[PlannedStage], detach: bool) -> list[Outcome]:
    """Runs missing stages, in the background with ``detach``, and has them copied to MLflow."""
    from launcher.stages.runner import run_stages
    from launcher.sweep.at_work import Command
    from launcher.tracking import process

    settings = wanted[0].config.sweep
    command = Command(settings.dir, name, settings.notify)
    if any(item.made is None for item in wanted):
        from launcher.sweep.multirun import check_tracking_of, dir_option  # and with it the cost model

        check_tracking_of(wanted[0].config)
        if detach:
            command.detach(dir_option(settings.dir))
    mirror = process.MlflowMirror(settings.dir, name, settings.mlflow_wait_s, wanted[0].config.tracking.loggers)
    with command:
        outcomes = run_stages(name, wanted, [mirror, command])
    if any(outcome.status != "reused" for outcome in outcomes):
        mirror.finish(0 if any(outcome.status == "submitted" for outcome in outcomes) else None)
    return outcomes


def parser() -> VerbParser:
    made = VerbParser("trireme run", DESCRIPTION)
    made.add_argument("words", nargs="+", metavar="KEY=VALUE", help="pipeline=NAME; stages.STAGE.KEY=VALUE; keys of all stages")
    add_set(made)
    made.add_argument("--until", action=NamedOption, metavar="STAGE", help="only this stage and what it needs")
    made.add_argument("--from", dest="start", action=NamedOption, metavar="STAGE", help="only this stage and what needs it")
    made.add_argument("--only", action=NamedOption, metavar="STAGE", help="only this stage")
    made.add_argument("--dry-run", action="store_true", help="print the plan, start nothing")
    made.add_argument(
        "--in-cluster",
        action=NamedOption,
        metavar="IMAGE",
        help="Kubernetes: run this command as a Job of that image (deploy/Dockerfile, target launcher)",
    )
    made.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    add_detach(made)
    add_folder(made, "folder of config groups of your own, such as DIR/pipeline/NAME.yaml")
    return made


def confirm_stages(wanted: Sequence[PlannedStage]) -> None:
    """Says the predicted cost of the stages that will be made, and asks where it exceeds ``sweep.confirm_gpu_hours``."""
    from launcher.sweep.bill import added_up, confirm

    making = [item for item in wanted if item.made is None]
    bill = added_up((item.predicted_s, item.ranks, item.config.cluster.price_per_gpu_hour) for item in making)
    confirm(bill, wanted[0].config.sweep.confirm_gpu_hours, "predicted")


def _words(words: list[str]) -> tuple[str, dict[str, Any], list[str]]:
    """Returns the pipeline's name, changes of stages, and overrides of all. Raises ``ConfigError`` without a pipeline."""
    from launcher.config.compose import plain_errors

    names = [word.partition("=")[2] for word in words if key_of(word) == "pipeline"]
    if len(names) != 1:
        raise ConfigError("say which pipeline with pipeline=NAME, once; conf/pipeline/ has them")
    with plain_errors():  # invalid YAML
        changes = {key_of(word).removeprefix("stages."): _value(word) for word in words if word.startswith("stages.")}
    return names[0], changes, [word for word in words if key_of(word) != "pipeline" and not word.startswith("stages.")]


def _value(word: str) -> Any:
    """The value of an override as the file would have it; text as it was typed, where YAML reads something else."""
    from yaml import YAMLError

    from launcher.config.misread import refuse_misread_in
    from launcher.config.yaml_text import read_config_yaml
    from launcher.stages.graph import is_text_key

    key, _, text = word.partition("=")

    try:
        value = read_config_yaml(text)
    except YAMLError:
        if is_text_key(key):
            return text
        raise
    if is_text_key(key) and isinstance(value, (bool, int, float)):
        return text
    refuse_misread_in(text, key, lambda inner: is_text_key(f"{key}.{inner}".removesuffix(".")))
    return value


def _state(item: PlannedStage, wanted: list[PlannedStage]) -> str:
    return "there" if item.made is not None else "to run" if item in wanted else "left out"


def _show(planned: list[PlannedStage], wanted: list[PlannedStage]) -> None:
    from launcher.stages.predicted import RESTS_ON

    console = wide_console()
    hours = [None if item.predicted_s is None else item.predicted_s * item.ranks / 3600 for item in planned]
    columns = [
        Column("stage", [item.stage.name for item in planned]),
        Column("verb", [item.stage.verb for item in planned]),
        Column("id", [item.id for item in planned]),
        Column("takes", [", ".join(item.stage.inputs.values()) or "-" for item in planned], keep=1),
        Column("ranks", [str(item.ranks) for item in planned], right=True),
        Column(
            "predicted", ["unknown" if item.predicted_s is None else f"{item.predicted_s:.3g} s" for item in planned], keep=1, right=True
        ),
        Column("GPU-hours", ["unknown" if h is None else f"{h:.3g}" for h in hours], keep=1, right=True),
        Column("state", [_state(item, wanted) for item in planned]),
    ]
    console.print(fitted_table(columns, console.width, [""] * len(planned)))
    print(RESTS_ON)
    if None in hours:
        print("unknown: tasks, and what no hardware is named for; say hardware=h100, or hardware=mine after 'trireme doctor'")


def _tell(outcome: Outcome) -> None:
    words = f": {outcome.detail}" if outcome.detail else f" in {outcome.seconds:.1f} s" if outcome.seconds else ""
    print(f"{outcome.planned.stage.name}  {outcome.status}{words}  {outcome.planned.artifact_folder}", flush=True)


def _plain(item: PlannedStage, status: str, detail: str = "") -> dict[str, Any]:
    return {
        "name": item.stage.name, "stage": item.stage.verb, "id": item.id, "inputs": item.inputs, "status": status, "detail": detail,
        "ranks": item.ranks, "predicted_s": item.predicted_s, "folder": str(item.artifact_folder),
    }  # fmt: skip
