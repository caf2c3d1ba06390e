"""Engines in processes without trainers: they take prompts from the dock, and weights that trainers publish."""
