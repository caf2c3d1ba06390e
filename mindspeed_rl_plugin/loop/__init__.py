"""Runs the stages: the loop, its schedules, the plan of a rollout, and resume."""
