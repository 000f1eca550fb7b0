"""Progress, recording and pages; receives plain numbers and never talks to a process group."""
