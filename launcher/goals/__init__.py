"""The goals: the fastest step, the soonest loss, the best ways to serve. A goal is a folder; verbs ask it."""
