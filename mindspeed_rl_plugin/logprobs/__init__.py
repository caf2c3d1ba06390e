"""Log-probs of given responses under the model as it is, old or reference: `compute.compute_logps`."""
