"""`rehearse`: a launch script on this machine, shrunk, for one iteration.

rehearse.py      the command
capture.py       runs the launch script with the stand-ins of standins.sh, and keeps what it would launch
confine.py       no change of files outside the rehearsal's folder, by Linux's Landlock
command_line.py  flags that remember what was changed in them, and why
shrink.py        smaller world, model and batches
substitutes.py   tokenizer, data, prompts and paths that do not exist here
unavailable.py   flags that ask for kernels that no host has
entry_script.py  which entry script runs, on which Megatron, with or without MindSpeed
passes.py        the processes: arguments as written, a checkpoint to load, one iteration
outcome.py       what was changed, what happened, what was not exercised
"""
