"""Bytes of the fullest rank, by part."""
