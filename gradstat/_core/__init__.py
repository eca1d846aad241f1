"""From tensors to rows: what everything that is public is made of. Nothing here is public."""
