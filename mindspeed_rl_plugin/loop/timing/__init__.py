"""A discrete-event model of a run: predicts seconds and idle shares by a virtual clock, from costs of single steps."""
