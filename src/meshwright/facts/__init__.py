"""Frozen values that the rest of Meshwright passes around; `to_json` gives a JSON-ready value, `from_json` reads it."""
