"""`rehearse`: runs a launch script on this machine, shrunk, for one iteration. rehearse.py is the command."""
