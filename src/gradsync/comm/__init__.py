"""Process groups: start-up and shutdown, the choice of a backend, and the backends written here."""
