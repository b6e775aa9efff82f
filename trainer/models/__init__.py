"""The networks, written plainly for one process."""
