"""Optimizer steps: measurements for a step, torch's optimizers and its loss scaler. Nothing here is public."""
