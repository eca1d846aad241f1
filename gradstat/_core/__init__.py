"""From tensors to rows: the internals that the public functions are built from. Nothing here is public."""
