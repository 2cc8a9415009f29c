"""One rank's real steps in a fake world, each rehearsal in a separate process."""
