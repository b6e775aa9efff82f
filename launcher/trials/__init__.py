"""A trial on disk: its record, its files, its lock, its identity and how it ended."""
