"""The verbs that are no stage of a run, wired: what the command line names, which function does the work, what is printed."""
