"""The rollout engine: its interface, vLLM behind it, and the config.json that it gets."""
