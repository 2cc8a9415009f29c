"""A stand-in for a package that the script imports and does not use in training."""
