"""Worker processes: fresh interpreters for a user's code, each a process group that can be killed."""
