"""Parts of `docs/generate.py`: each makes one kind of page of the site."""
