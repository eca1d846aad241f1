"""A step of an optimizer: what was measured, torch's optimizers and its loss scaler. Nothing here is public."""
