"""What a layout means, as data without torch: the rank grid, who owns which slice, and the pipeline schedules."""

from trainer.layout.balance import blocks_per_chunk, head_weight
from trainer.layout.grid import Coordinates, Grid
from trainer.layout.schedule import Action, Kind, Schedule, build, in_flight
from trainer.layout.shards import Bucket, Factors, Level, Piece, Slot, plan_buckets
from trainer.layout.simulate import Deadlock, Span, Times, idle_fraction, makespan, simulate
from trainer.layout.validate import ScheduleError, validate

__all__ = [
    "Action",
    "Bucket",
    "Coordinates",
    "Deadlock",
    "Factors",
    "Grid",
    "Kind",
    "Level",
    "Piece",
    "Schedule",
    "ScheduleError",
    "Slot",
    "Span",
    "Times",
    "blocks_per_chunk",
    "build",
    "head_weight",
    "idle_fraction",
    "in_flight",
    "makespan",
    "plan_buckets",
    "simulate",
    "validate",
]
