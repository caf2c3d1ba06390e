"""Weights between trainer and engine: layouts, the plan that joins them, its transfer, and the offload to the host."""
