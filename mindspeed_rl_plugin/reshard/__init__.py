"""Weights between trainer and engine: layouts, the plan that joins them, its execution, and the swap to host memory."""
