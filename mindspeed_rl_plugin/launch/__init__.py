"""Attaches RL to Megatron, and starts a run: inputs, model, critic, checkpoint. Also the messages of a failed run."""
