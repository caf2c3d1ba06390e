"""What RL refuses, takes over or says of a run's arguments, before anything is built."""
