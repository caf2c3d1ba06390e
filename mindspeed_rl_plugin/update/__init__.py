"""The policy update: the inputs of Megatron's own train_step, and the metrics of the step (`step.PolicyStep`)."""
