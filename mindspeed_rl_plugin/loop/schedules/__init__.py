"""Schedules: in which order the stages of a rollout work, and which of them at the same time."""
