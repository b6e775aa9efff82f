"""Collectives: groups of ranks, messages between them, and their time."""
