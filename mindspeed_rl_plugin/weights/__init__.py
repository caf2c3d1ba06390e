"""Live weights and training state: moves them from the trainer to engines, to the host and back; publishes and pulls
them."""
