"""One small class for the accelerator of this process, copies from and to it, and meters of its memory."""

from mindspeed_rl_plugin.device.device import Device, detect, get_device
from mindspeed_rl_plugin.device.meters import ProcessMeter, StorageMeter

__all__ = ["Device", "ProcessMeter", "StorageMeter", "detect", "get_device"]
