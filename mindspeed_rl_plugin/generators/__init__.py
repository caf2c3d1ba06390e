"""Engines outside of the trainers: processes that take prompts from the dock, and weights that trainers publish."""
