"""What ``gradsync doctor`` looks at: the host, the way between every two ranks, and whether a group works."""
