"""Reinforcement learning for an existing Megatron-LM / MindSpeed pretraining script, by flags."""

__version__ = "0.1.0"
