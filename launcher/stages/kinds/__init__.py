"""The kinds of stages, by the verb in a pipeline file. A kind is one class; its ranks' half is another (``trainer.stages``)."""

from launcher.stages.kinds.convert import ConvertStage
from launcher.stages.kinds.evaluate import EvaluateStage
from launcher.stages.kinds.generate import GenerateStage
from launcher.stages.kinds.prepare import PrepareStage
from launcher.stages.kinds.train import TrainStage, TuneStage
from launcher.stages.stage import Stage

_ALL: tuple[type[Stage], ...] = (PrepareStage, TrainStage, TuneStage, EvaluateStage, ConvertStage, GenerateStage)
KINDS = {kind.verb: kind for kind in _ALL}
