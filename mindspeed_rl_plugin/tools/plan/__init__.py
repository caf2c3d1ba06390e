"""Plans of a reshard without any accelerator: memory a device, bytes a rank and link, seconds."""
