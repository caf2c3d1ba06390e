"""The value model of PPO: the policy's architecture with one number a position in the place of the logits."""
