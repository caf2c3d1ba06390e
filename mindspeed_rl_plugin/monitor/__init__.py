"""Monitor: what a run shows while it trains, the files it leaves, and the report made of them."""
