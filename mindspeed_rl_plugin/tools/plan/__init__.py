"""`plan`: computes a reshard's memory and time, a rollout's bytes, and times of schedules, without an accelerator."""
