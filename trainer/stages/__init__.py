"""Stages of a pipeline where they run: complete artifacts, and the rank's half of each kind of stage."""
