"""Weights and training state: moved from trainer to engine, and to the host and back. Weights also published and
pulled."""
