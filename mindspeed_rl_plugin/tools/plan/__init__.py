"""Plans of a reshard without any accelerator: memory per device, bytes per rank and link, seconds."""
