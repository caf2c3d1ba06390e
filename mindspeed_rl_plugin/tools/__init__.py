"""The sub-commands: `python -m mindspeed_rl_plugin COMMAND`."""
