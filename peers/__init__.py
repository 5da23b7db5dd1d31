"""One volunteer's process: links, stage worker, rounds, lifecycle and the command line."""
