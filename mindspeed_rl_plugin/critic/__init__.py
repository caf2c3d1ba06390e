"""The value model of PPO: the policy's architecture with one number per position instead of logits."""
