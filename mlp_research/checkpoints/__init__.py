"""Checkpoints: what is saved of a run's state, and what says that it is whole."""
