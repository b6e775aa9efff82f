"""Predictors of step times side by side on published runs, each on what it can express, with what they were told of a source kept apart."""
