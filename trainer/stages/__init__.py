"""Stages of a pipeline where they run: what makes an artifact whole, and the rank's half of each kind of stage."""
