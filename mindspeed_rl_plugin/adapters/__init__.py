"""LoRA: adapters on the linear layers of Megatron's model, which alone are trained, saved and sent."""
