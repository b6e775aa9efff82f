"""How a run is laid over ranks: the mesh of ranks, state shards, pipeline schedules, and the simulation of these. Pure numbers."""
