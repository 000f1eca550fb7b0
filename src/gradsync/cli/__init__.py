"""The commands: the only place that parses, prints to the user and exits."""
