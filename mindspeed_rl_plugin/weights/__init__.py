"""Live weights and training state: from the trainer to engines, to the host and back, published and pulled."""
