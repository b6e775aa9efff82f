"""Executes a pipeline schedule, with recomputation and compilation of blocks."""
