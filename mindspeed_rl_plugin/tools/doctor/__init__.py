"""`python -m mindspeed_rl_plugin doctor`: which part of a machine, or of a job that hangs, is at fault."""
