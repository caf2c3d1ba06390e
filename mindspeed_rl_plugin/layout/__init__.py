"""Which slices of which parameters each rank of trainer and engine stores, and the plan of a transfer."""
