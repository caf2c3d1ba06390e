"""Schedules: in which order, and at the same time as what, the stages of a rollout work."""
