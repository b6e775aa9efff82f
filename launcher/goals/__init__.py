"""The goals: the fastest training, the best ways to serve. A goal is a folder; ``plan``, ``search`` and ``validate`` ask it."""
