"""A stand-in for torchvision: tiny images that are drawn from their index, and a small residual network."""
