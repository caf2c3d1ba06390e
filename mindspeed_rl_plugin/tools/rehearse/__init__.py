"""What `rehearse` is made of.

capture.py      runs the launch script with stand-ins, and keeps what it would launch
standins.py     commands that are only taken down: launchers, and what deletes, kills, logs in or installs
confine.py      no change of files outside the rehearsal's folder, by Linux's Landlock
flags.py        a command line that remembers what was changed in it, and why
shrink.py       smaller world, model and batches
substitutes.py  tokenizer, data, prompts and paths that do not exist here
kernels.py      flags that ask for kernels that no host has
entry.py        which entry script runs, on which Megatron, with or without MindSpeed
passes.py       the processes: arguments as written, a checkpoint to load, one iteration
summary.py      what was changed, what happened, what was not exercised
"""
