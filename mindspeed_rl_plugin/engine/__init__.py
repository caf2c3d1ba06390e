"""Generation: the engine's interface, vLLM behind it, and the stages that ask it for responses."""
