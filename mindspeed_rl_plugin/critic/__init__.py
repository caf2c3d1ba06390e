"""The value model of PPO: the policy's architecture with one number per position in the place of the logits."""
