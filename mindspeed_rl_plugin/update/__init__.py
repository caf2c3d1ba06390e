"""Optimizer steps of policy and critic: inputs of Megatron's own train_step, and metrics (`step.MegatronStep`)."""
