"""Which Meshwright this is; checkpoints say which one wrote them."""

VERSION = "0.1.0"
