"""The policy update: what Megatron's own train_step is given, and what the step measured: `step.PolicyStep`."""
