"""How a run is laid over ranks: the rank grid, state shards, pipeline schedules, and the simulation of these. Pure numbers."""
