"""Collectives: groups of ranks, what is sent between them, and the time that it takes."""
