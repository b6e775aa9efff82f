"""Seconds of a step, by part."""
