"""The command line: one module per verb, loaded when the verb runs; `main` parses the arguments."""
