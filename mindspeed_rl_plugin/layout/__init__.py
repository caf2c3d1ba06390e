"""Which rank stores which slice of which parameter, on each side, and the plan that joins both. Pure."""
