"""Where model and ranks meet: the parallelisms and the one order in which they are applied."""
