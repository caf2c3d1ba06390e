"""What each process of a job is doing: a small file per process, and what these files tell of a job that hangs."""
