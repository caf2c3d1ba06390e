"""Monitor: output of a run while it trains, the files that it writes, and a summary of these."""
