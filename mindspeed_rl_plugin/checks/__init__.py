"""Checks of a run's arguments before anything is built: what RL refuses, takes over, or warns about."""
