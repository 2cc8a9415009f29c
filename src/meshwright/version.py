"""Meshwright's version, which checkpoints record."""

VERSION = "0.1.0"
