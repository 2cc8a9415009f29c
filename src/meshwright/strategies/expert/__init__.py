"""`ep=N`: experts of a mixture divided over data ranks; tokens are sent to the ranks of the experts that they chose."""
