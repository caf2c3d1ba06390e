"""`rehearse`: a launch script on this machine, shrunk, for one iteration. The command is rehearse.py."""
