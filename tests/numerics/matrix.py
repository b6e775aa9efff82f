"""Holds cases against one process.

    python tests/numerics/matrix.py '{"layout": {"tensor": 2}, "model": {}, "precision": "fp64"}'

runs one case by hand.
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.farm import Farm, Finished, free_port
from trainer.data.prepare import prepare
from trainer.launch.rank_env import RankEnv
from trainer.models.experts import Choice, MixtureOfExperts
from trainer.shared.run.read import from_dict
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import (
    DataConfig,
    TrainConfig,
)
from trainer.shared.run.tuning import text_model
from trainer.tensor.dropout import Noise
from trainer.tensor.experts import ExpertDispatcher, own_part
from trainer.tensor.region import places

if TYPE_CHECKING:
    from tests.whole_parameters import Saved
    from trainer.comm.collectives import World
    from trainer.step import Engine
from tests.numerics.cases import EXAMPLES, VOCAB, Case

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
ROUNDINGS = 4
"""Times what one process differs from itself: a layout adds up in yet another order."""
SHAKES = (1, 2, 3)
"""Seeds of the weights that are off by a unit in the last place, to see what a model makes of rounding."""
CHOICES = "chosen experts"
"""The rows of ``ChosenExperts`` of all ranks."""


def trained(env: RankEnv, out: str | Path, configs: list[dict[str, Any]], shaken: Sequence[int] = ()) -> None:
    """Run in every rank: train each of ``configs``, and leave losses, norms and this rank's part of the final parameters in ``out``. Each has
    a world of its own, which takes a tenth of what a step takes: torch names groups by how many a rank has made, and layouts give ranks
    different numbers of them."""
    from trainer.comm.collectives import World

    port = env.port
    for number, config in enumerate(configs):
        print(json.dumps(config), flush=True)  # the last one in the log is the one that failed
        world = World(env.rank, env.world_size, torch.device("cpu"), env.address, port, 60.0)
        found, port = _trained(world, resolve(from_dict(TrainConfig, config), env.world_size), shaken[number] if shaken else 0)
        torch.save(found, Path(out) / f"{number}.{env.rank}.pt")
        world.close()


def _trained(
    world: World, run: ResolvedTrainConfig, shaken: int
) -> tuple[tuple[torch.Tensor, torch.Tensor, list[Saved], list[torch.Tensor]], int]:
    """Losses and norms of all steps, parts of parameters, and the experts that tokens have had."""
    from tests.whole_parameters import parts
    from trainer.data import open_dataset
    from trainer.step import Engine

    dataset = open_dataset(run.data, text_model(run.model, run.tune), run.run.seed)
    engine = Engine(run, world, dataset)
    if shaken:
        _shake(engine, torch.Generator().manual_seed(shaken))
    choices = ChosenExperts(engine)
    frozen = [piece.weight.clone() for piece in engine.rank.shards if not piece.record.trainable]
    results = []
    for choices.step in range(run.run.steps):
        results.append(engine.step(choices.step))
    still = [piece.weight for piece in engine.rank.shards if not piece.record.trainable]
    assert all(map(torch.equal, frozen, still)), "what is frozen has changed"
    losses = torch.tensor([r.loss for r in results], dtype=torch.float64)
    norms = torch.tensor([r.grad_norm for r in results], dtype=torch.float64)
    found = losses, norms, [*parts(engine.rank), *_load(engine)], choices.rows
    return found, engine.rank.groups.world.gather_objects(free_port())[0]  # nobody leaves a world that another one still uses


def _shake(engine: Engine, draws: torch.Generator) -> None:
    """Moves each parameter by a unit in its last place, up or down."""
    for chunk in engine.rank.pipeline.chunks:
        for parameter in chunk.model.parameters():
            up = torch.randint(0, 2, parameter.shape, generator=draws).to(parameter.dtype) * 2 - 1
            parameter.data.mul_(1 + up * torch.finfo(parameter.dtype).eps)


class ChosenExperts:
    """The experts that routers of this rank choose: rows of step, block, sequence, position, and the experts in order."""

    def __init__(self, engine: Engine):
        self.rank, self.step, self.rows = engine.rank, 0, list[torch.Tensor]()
        for chunk in engine.rank.pipeline.chunks:
            for name, layer in chunk.model.named_modules():
                if isinstance(layer, MixtureOfExperts):
                    layer.balanced = self._noted(layer, int(name.split(".")[1]), chunk.noise)  # type: ignore[method-assign]

    def _noted(self, layer: MixtureOfExperts, block: int, noise: Noise) -> Callable[[Choice, torch.Tensor], Choice]:
        balanced, region, dispatcher = layer.balanced, self.rank.region, layer.dispatcher

        def note(choice: Choice, x: torch.Tensor) -> Choice:
            length, batch = x.shape[:2]
            index = torch.arange(length * batch)
            if isinstance(dispatcher, ExpertDispatcher) and dispatcher.splits:
                index = index[own_part(len(index), region.group)]
            where = noise.key.first_row + index % batch, places(region.runs(length), x.device)[index // batch]
            common = (torch.full_like(index, number) for number in (self.step, block))
            self.rows.append(torch.cat((torch.stack((*common, *where), 1), choice.experts.sort(-1).values), 1))
            return balanced(choice, x)

        return note


def _load(engine: Engine) -> list[Saved]:
    """The tokens of each expert of each block in the last step, as a parameter: all ranks know them."""
    if engine.rank.balance is None:
        return []
    load = engine.rank.balance.load
    shape = tuple(load.shape)
    return [("tokens of experts", shape, tuple((0, n) for n in shape), shape, 0, load.flatten())]


def train_all(farm: Farm, ranks: int, configs: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Losses, norms and final parameters of each of ``configs``, which the same ranks train one after the other."""
    done = farm.call(trained, ranks, configs=configs)
    return [_whole(done, number) for number in range(len(configs))]


class Failed(Exception):
    """Ranks of a case that ended before they were through with it, or that differ."""


class Matrix:
    """Runs cases, and remembers what one process makes of each model. ``plainer``: a case that fails is made plain before it is shown."""

    def __init__(self, farm: Farm, plainer: bool = True):
        self.farm, self.text, self.plainer = farm, farm.folder(), plainer
        self.references: dict[str, dict[str, torch.Tensor]] = {}
        self.flipped = [0, 0]  # tokens with other experts than in one process, of all
        (self.text / "examples.jsonl").write_text("\n".join(map(json.dumps, EXAMPLES)))
        (self.text / "text.txt").write_text(" ".join(map(json.dumps, EXAMPLES)))
        prepare(DataConfig(source=str(self.text / "text.txt"), path=str(self.text / "corpus"), vocab=VOCAB))

    def run(self, cases: Sequence[Case]) -> list[dict[str, torch.Tensor] | Failed]:
        """What becomes of each of ``cases``, which take as many ranks as each other. After one that fails the others have ranks anew."""
        found: list[dict[str, torch.Tensor] | Failed] = []
        while len(found) < len(cases):
            left, out = cases[len(found) :], self.farm.folder()
            call = self.farm.write_call(
                out, trained, configs=[case.config(self.text) for case in left], shaken=[case.shaken for case in left]
            )
            done = self.farm.wait(self.farm.start(call, left[0].ranks, out))
            for number, case in enumerate(left):
                if not all((out / f"{number}.{rank}.pt").exists() for rank in range(case.ranks)):
                    found.append(Failed(f"exit codes {done.codes}\n{done.logs[-3000:]}"))
                    break
                try:
                    found.append(_whole(done, number))
                except AssertionError as error:
                    found.append(Failed(str(error)))
        return found

    def trained(self, cases: Sequence[Case]) -> list[dict[str, torch.Tensor]]:
        """The same of cases that must not fail."""
        found = self.run(cases)
        for one in found:
            if isinstance(one, Failed):
                raise one
        return [one for one in found if isinstance(one, dict)]

    def remember(self, cases: Sequence[Case]) -> None:
        """The references of all ``cases`` by one process."""
        wanted = {str(case.alone): case.alone for case in cases}
        if missing := [one for name, one in wanted.items() if name not in self.references]:
            self.references |= zip(map(str, missing), self.trained(missing))

    def reference(self, case: Case) -> dict[str, torch.Tensor]:
        self.remember([case])
        return self.references[str(case.alone)]

    def faults(self, cases: Sequence[Case]) -> list[str | None]:
        """What is wrong with each of ``cases``, which take as many ranks as each other: what differs most from one process, and by how much,
        relative to its largest element."""
        self.remember(cases)
        return [self._fault(case, found) for case, found in zip(cases, self.run(cases))]

    def _fault(self, case: Case, found: dict[str, torch.Tensor] | Failed) -> str | None:
        expected = self.reference(case)
        if isinstance(found, Failed):
            return str(found)
        if expected.keys() != found.keys():
            return f"other parameters: {expected.keys() ^ found.keys()}"
        flipped = _flipped(found, expected)
        self.flipped = [total + count for total, count in zip(self.flipped, flipped)]
        if flipped[0]:  # another model from here on
            return f"{flipped[0]} of {flipped[1]} tokens have other experts" if case.precision == "fp64" else None
        name, difference = _worst(found, expected)
        if difference <= TOLERANCE[case.precision]:
            return None
        allowed = max(TOLERANCE[case.precision], ROUNDINGS * self.rounding(case))
        return f"{name} differs by {difference:.1e}, allowed is {allowed:.0e}" if difference > allowed else None

    def rounding(self, case: Case) -> float:
        """How much one process differs from itself where it adds up in another order, with smaller micro-batches, and where weights are off
        by what they cannot be told from. A norm over few elements makes twenty times as much of it in every step, one over the few of a
        latent hundreds of times."""
        sizes = [size for size in (1, 2, 3, case.batch // 2) if 0 < size < case.batch and case.batch % size == 0]
        orders = [replace(case.alone, layout={"micro_batch": size}) for size in sorted(set(sizes))]
        others = self.trained([*orders, *(replace(case.alone, shaken=seed) for seed in SHAKES)])
        alike = [other for other in others if not _flipped(other, self.reference(case))[0]]
        return max((_worst(other, self.reference(case))[1] for other in alike), default=0.0)

    def fault(self, case: Case) -> str | None:
        return self.faults([case])[0]

    def check(self, cases: Sequence[Case]) -> None:
        """``AssertionError`` with every case that fails and how to run it; the first one as plain as it still fails."""
        faults = [(case, fault) for case, fault in zip(cases, self.faults(cases) if cases else []) if fault]
        shown = [self.shrunk(case) if self.plainer and number == 0 else case for number, (case, _) in enumerate(faults)]
        assert not faults, "\n".join(f"{fault}\npython tests/numerics/matrix.py '{case}'" for case, (_, fault) in zip(shown, faults))

    def shrunk(self, case: Case) -> Case:
        """A failing case as plain as it gets: every setting that is not needed for the failure is left out."""
        for part in ("run", "tune", "layout", "model", "data"):
            for name in list(getattr(case, part)):
                plainer = copy.deepcopy(case)
                del getattr(plainer, part)[name]
                if plainer.valid and plainer.alone.valid and self._fails(plainer):
                    case = plainer
        return case

    def _fails(self, case: Case) -> bool:
        """False where one process fails as well."""
        try:
            return self.fault(case) is not None
        except Failed:
            return False


def _whole(done: Finished, number: int) -> dict[str, torch.Tensor]:
    """What all ranks left of a case. The loss and the norm are the same on each."""
    from tests.whole_parameters import joined

    ranks = [torch.load(done.directory / f"{number}.{rank}.pt") for rank in done.codes]
    losses, norms, *_ = ranks[0]
    assert all(torch.equal(losses, other) and torch.equal(norms, again) for other, again, *_ in ranks), "ranks differ in losses or norms"
    choices = [rows for _, _, _, found in ranks for rows in found]
    chosen = {CHOICES: torch.cat(choices).unique(dim=0)} if choices else {}
    return {"losses": losses, "norms": norms} | joined(parts for _, _, parts, _ in ranks) | chosen


def _flipped(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[int, int]:
    """The tokens, of all steps and blocks, whose experts are others, and all there are."""
    if CHOICES not in expected:
        return 0, 0
    assert found[CHOICES].shape == expected[CHOICES].shape, "routers have had other tokens"
    return len(torch.cat((found[CHOICES], expected[CHOICES])).unique(dim=0)) - len(expected[CHOICES]), len(expected[CHOICES])


def _worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[str, float]:
    """What differs most, and by how much."""
    values = ((name, _difference(found[name], value)) for name, value in expected.items() if name != CHOICES)
    return max(values, key=lambda pair: pair[1])


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    if not torch.isfinite(found).all():
        return float("inf")
    return float(
        (found - expected).abs().max() / expected.abs().max().clamp_min(1e-4)
    )  # of less, rounding is most: a key norm's bias has no gradient


def main() -> int:
    case = Case(**json.loads(sys.argv[1]))
    farm = Farm(Path(tempfile.mkdtemp()))
    fault = Matrix(farm).fault(case)
    farm.close()
    print(fault or "as one process")
    return int(fault is not None)


if __name__ == "__main__":
    sys.exit(importlib.import_module("tests.numerics.matrix").main())  # ranks find functions by the name of their module
