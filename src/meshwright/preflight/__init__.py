"""Properties of a job that matter under some strategies, found before any process starts."""
