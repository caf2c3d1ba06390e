"""The rollout engine: its interface, the implementation with vLLM, and the config.json that vLLM reads."""
