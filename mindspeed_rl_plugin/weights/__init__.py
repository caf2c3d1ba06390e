"""Weights and training state: moved from trainer to engine, and to the host and back. A trainer can also publish its
weights, and engines pull them."""
