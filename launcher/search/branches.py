"""A stable training of an arm, and decays to several lengths that branch from its checkpoints. Pure.

With the learning rate at its peak after warm-up, one run, the trunk, is the beginning of runs of every length: a decay from one of its
checkpoints is to the bit the run that had its schedule from the beginning (warm-up, stable, decay: Haegele et al. 2024, arXiv 2405.18392).
The lengths are equally far apart, so the trunk saves every so many steps:

    trunk      (1 - decay) x steps
    branch k   begins after k / count of the trunk, and ends after k / count of all steps
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from launcher.config.schema import Config
from trainer.shared.run.errors import ConfigError


@dataclass(frozen=True)
class Trunk:
    """The trunk of an arm, of ``count`` branches in whose last ``decay`` the rate falls. ``folder``: of its checkpoints, by seed."""

    count: int
    decay: float
    folder: str = ""

    @property
    def pieces(self) -> range:
        """Returns the numbers of the trainings of a seed: 0, the trunk, and its branches."""
        return range(self.count + 1)

    def whole(self, config: Config) -> Config:
        """Returns an arm with the schedule of its longest branch. Raises ``ConfigError`` if its steps cannot be cut so, or it has
        a schedule of its own."""
        run, optimizer = config.run, config.optimizer
        if optimizer.stable_steps or optimizer.decay_steps is not None:
            raise ConfigError("optimizer has a schedule of its own, and search.branches makes it; leave stable_steps and decay_steps out")
        every = (1 - self.decay) * run.steps / self.count
        if run.steps % self.count or abs(every - round(every)) > 1e-6 or not 0 < round(every) < run.steps / self.count:
            raise ConfigError(
                f"search.branches={self.count} of run.steps={run.steps} with search.decay={self.decay:g} begin after "
                f"{every:.4g} steps, which have to be whole; change one of them"
            )
        if optimizer.warmup_steps > round(every):
            raise ConfigError(
                f"optimizer.warmup_steps={optimizer.warmup_steps} are more than the {round(every)} after which the shortest of "
                "search.branches begins to decay; lower it, or raise run.steps"
            )
        return self._until(config, run.steps)

    def of(self, config: Config, piece: int) -> Config:
        """Returns one training of a ``whole`` arm: the trunk (0), or a branch, which alone is validated, at its end."""
        run, steps = config.run, config.run.steps * (piece or self.count) // self.count
        every, folder = self._stable(run.steps) // self.count, f"{self.folder}/seed-{run.seed}"
        if piece == 0:
            saves = dataclasses.replace(run.checkpoint, dir=folder, every=every, keep=self.count)
            stable = every * self.count
            optimizer = dataclasses.replace(config.optimizer, stable_steps=stable - config.optimizer.warmup_steps, decay_steps=stable)
            warm = min(run.warmup_steps, stable - 1)
            run = dataclasses.replace(run, steps=stable, warmup_steps=warm, eval_every=0, checkpoint=saves)
            return dataclasses.replace(config, run=run, optimizer=optimizer)
        continues = dataclasses.replace(run.checkpoint, dir=folder, every=0, at=every * piece)
        run = dataclasses.replace(run, steps=steps, eval_every=steps, checkpoint=continues)
        return self._until(dataclasses.replace(config, run=run), steps)

    def words(self, config: Config) -> list[str]:
        """Returns the overrides that make one training of an arm, besides the arm's."""
        run, optimizer, saved = config.run, config.optimizer, config.run.checkpoint
        checkpoints = [f"run.checkpoint.{name}={value}" for name in ("dir", "every", "keep", "at") if (value := getattr(saved, name))]
        schedule = [f"optimizer.{name}={getattr(optimizer, name)}" for name in ("stable_steps", "decay_steps")]
        return [f"run.steps={run.steps}", f"run.eval_every={run.eval_every}", *schedule, *checkpoints]

    def _until(self, config: Config, steps: int) -> Config:
        stable = self._stable(steps) - config.optimizer.warmup_steps
        return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, stable_steps=stable, decay_steps=steps))

    def _stable(self, steps: int) -> int:
        return round((1 - self.decay) * steps)
